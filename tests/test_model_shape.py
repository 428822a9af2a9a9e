"""Sizes of models as the planner counts them, against real models."""

from dataclasses import replace

import pytest
import torch
from harness import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from easy_context.memory.plan import MemoryPlan
from easy_context.metrics import flops_per_token
from easy_context.planner import HARDWARE, ModelShape
from easy_context.planner.setting import Setting

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"]
FAMILIES += ["starcoder2", "arcee", "apertus", "jais2", "nanochat"]  # MLPs without a gate


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_the_models(family):
    model = tiny_model(family, sliding_window=None) if family != "llama" else tiny_model()
    shape = ModelShape.of(model)
    real = sum(weight.numel() for weight in model.parameters())
    assert shape.parameters == pytest.approx(real, rel=0.02)  # biases and further norms aside
    assert shape.linear_weights == sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert ModelShape.of(model.config) == replace(shape, name=type(model.config).__name__)


@pytest.mark.parametrize("family", ["cohere2", "granite", "glm4", "olmo2", "opt", "gpt2"])
def test_families_without_an_entry_are_compared_with_their_model(family):
    """A config.json leaves out what transformers fills in, such as tied embeddings."""
    config = AutoConfig.for_model(family)
    shape = ModelShape.from_dict({"model_type": family}, "a file")
    assert shape == replace(ModelShape.of(config), name="a file")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # which transformers 5.0 leaves undone without memory
    assert shape.parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.03)


def test_the_comparison_takes_no_part_in_zero3():
    """The first rank plans alone, when DeepSpeed is set up already: a collective would wait for ever."""
    deepspeed = pytest.importorskip("transformers.integrations.deepspeed")
    pytest.importorskip("deepspeed")
    told = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert deepspeed.is_deepspeed_zero3_enabled()
    assert ModelShape.of(AutoConfig.for_model("granite")).layers == 32
    del told


@pytest.mark.parametrize(
    ("family", "why"),
    [("falcon", "beside embeddings"), ("bloom", "beside embeddings"), ("hal9000", "no model_type 'hal9000'")],
)
def test_families_of_another_arithmetic_are_refused(family, why):
    with pytest.raises(ValueError, match=f"a file: .*{why}.*: not modelled"):
        ModelShape.from_dict({"model_type": family}, "a file")


def test_flops_are_those_of_the_metrics():
    model = tiny_model()
    setting = Setting(ModelShape.of(model), HARDWARE["H200"], 1024, MemoryPlan.uniform(2))
    assert setting.flops == pytest.approx(1024 * flops_per_token(model, 1024))


def test_lora_parameters_are_pefts():
    peft = pytest.importorskip("peft")
    model = tiny_model()
    shape = ModelShape.of(model)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapters = peft.get_peft_model(model, lora)
    assert shape.lora_parameters(4) == sum(w.numel() for w in adapters.parameters() if w.requires_grad)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-2-7b", 6.738), ("llama-2-13b", 13.016), ("llama-3.1-8b", 8.030), ("llama-3.2-1b", 1.236)],
)
def test_known_models(name, billions):
    assert ModelShape.of(name).parameters / 1e9 == pytest.approx(billions, abs=0.001)


def test_configuration_files(tmp_path):
    config = tiny_model().config
    config.save_pretrained(tmp_path)
    shape = ModelShape.of(str(tmp_path))
    assert shape == ModelShape.of(tmp_path / "config.json") == replace(ModelShape.of(config), name=tmp_path.name)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixtral is a mixture of experts"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
    ],
)
def test_what_is_not_modelled_is_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        ModelShape.from_dict({**tiny_model().config.to_dict(), **changes}, "some")


def test_windows_leave_fewer_pairs():
    shape = replace(ModelShape.of(tiny_model()), windows=(None, 128))
    assert shape.pairs(1024) == [1024**2 / 2, 128 * 1024 - 128**2 / 2]
