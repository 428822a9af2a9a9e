"""Rotary positions: global lengths, float32 frequencies, settings that survive saving."""

import json

import pytest
import torch
from harness import error, spawn, tiny_model
from test_models import EXACT, batch_of, check, parallel, serial

from easy_context import apply_seq_parallel_monkey_patch
from easy_context.rope import set_rope

ORIGINAL = {"original_max_position_embeddings": 16}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, **ORIGINAL},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0, **ORIGINAL},
}


def scaled(kind: str, theta: float = 10000.0) -> dict:
    """Where length decides (dynamic, longrope), the whole sequence lies beyond 16 tokens and every shard within."""
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **SCALINGS[kind]},
        "max_position_embeddings": 16,
    }


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaling_sees_the_global_length(kind):
    ids, targets = batch_of(43)
    results = spawn(parallel, 3, "dist_flash_attn", "llama", ids, targets, None, scaled(kind))
    check(results, serial("llama", ids, targets, **scaled(kind)), EXACT)


@pytest.mark.parametrize("kind", SCALINGS)
def test_settings_survive_saving(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model(dtype=torch.float32, max_position_embeddings=16)
    set_rope(model.config, theta=5e5, scaling={"rope_type": kind, **SCALINGS[kind]})
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {"rope_type": kind, "rope_theta": 5e5, **SCALINGS[kind]}.items() <= loaded.config.rope_parameters.items()
    ids, _ = batch_of(43)
    fresh = tiny_model(dtype=torch.float32, **scaled(kind, theta=5e5))
    assert error(loaded(ids).logits, fresh(ids).logits) < 1e-5


def test_a_new_theta_keeps_the_scaling_of_old_config_files(tmp_path):
    from transformers import AutoConfig

    tiny_model().config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    old = json.loads(path.read_text())
    del old["rope_parameters"]
    path.write_text(json.dumps({**old, "rope_theta": 123.0, "rope_scaling": {"type": "linear", "factor": 2.0}}))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.rope_parameters["rope_type"], config.rope_parameters["rope_theta"]) == ("linear", 123.0)
    set_rope(config, theta=5e6).save_pretrained(tmp_path)
    kept = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (kept["rope_type"], kept["factor"], kept["rope_theta"]) == ("linear", 2.0, 5e6)


def test_windowed_layers_keep_their_own_theta():
    config = tiny_model("gemma3_text", num_hidden_layers=6).config
    before = dict(config.rope_parameters["sliding_attention"])
    set_rope(config, theta=5e6)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 5e6
    assert config.rope_parameters["sliding_attention"] == before


def test_frequencies_stay_float32_when_the_model_is_cast():
    apply_seq_parallel_monkey_patch("data_parallel", "llama")
    model = tiny_model(dtype=torch.float32)
    kept = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    assert not torch.equal(model.model.rotary_emb.inv_freq.float(), kept)
    model(torch.ones(1, 8, dtype=torch.long))
    assert torch.equal(model.model.rotary_emb.inv_freq, kept)


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"theta": -1.0}, "positive"),
        ({"scaling": {"rope_type": "magic"}}, "unknown rope_type"),
        ({"scaling": {"factor": 2.0}}, "rope_type"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        set_rope(tiny_model().config, **settings)
