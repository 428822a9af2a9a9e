"""What a memory plan cannot do is refused by name, before a step."""

import pytest
import torch
from harness import tiny_model
from test_memory_plan import LENGTH, batch, gradients
from transformers import AutoConfig, AutoModelForCausalLM

import easy_context as ec
from easy_context.memory.layer import apply_memory_plan, remove_memory_plan
from easy_context.memory.plan import MemoryPlan
from easy_context.memory.rows import tile_rows


@pytest.mark.parametrize("of", [lambda decoder: decoder.layers[1], lambda decoder: decoder.norm], ids=["layer", "norm"])
def test_a_forward_that_is_somebody_elses_is_refused(of):
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    module = of(model.model)
    module.forward = module.forward
    with pytest.raises(ValueError, match="replaced by somebody else"):
        apply_memory_plan(model, MemoryPlan.uniform(2))
    assert "forward" in vars(module)


def test_a_plan_stays_where_another_one_is_refused():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    before = [layer.forward for layer in model.model.layers]
    for refused in (MemoryPlan.uniform(3), MemoryPlan.uniform(2, head_groups=3)):
        with pytest.raises(ValueError):
            apply_memory_plan(model, refused)
        assert [layer.forward for layer in model.model.layers] == before
    apply_memory_plan(model, MemoryPlan.uniform(2, "input"))
    assert {layer.forward.how.keep for layer in model.model.layers} == {"input"}


def test_what_a_plan_cannot_do_is_refused():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    with pytest.raises(ValueError, match="3 layers, the model has 2"):
        apply_memory_plan(model, MemoryPlan.uniform(3))
    with pytest.raises(ValueError, match="head_groups=3"):
        apply_memory_plan(model, MemoryPlan.uniform(2, head_groups=3))
    with pytest.raises(ValueError, match="head_groups=1"):
        apply_memory_plan(tiny_model("phi3"), MemoryPlan.uniform(2, head_groups=2))
    with pytest.raises(ValueError, match="head_groups=1"):
        apply_memory_plan(tiny_model("olmo2"), MemoryPlan.uniform(2, head_groups=2))
    with pytest.raises(ValueError, match="OPTModel"):
        apply_memory_plan(tiny_model("opt", word_embed_proj_dim=64, ffn_dim=96), MemoryPlan.uniform(2))
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        apply_memory_plan(model, MemoryPlan.uniform(2))
    for settings in ({"keep": "all"}, {"tier": "tape"}, {"keep": "everything"}, {"tier": "disk"}, {"tile_size": 0}):
        with pytest.raises(ValueError):
            MemoryPlan.uniform(2, **settings)


def test_host_memory_that_would_not_suffice_is_told_before_the_step():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2, host_memory=2 * 2 * LENGTH * (64 + 64 + 4) * 8))
    gradients(model, batch())
    apply_memory_plan(model, MemoryPlan.uniform(2, host_memory=2 * 2 * LENGTH * (64 + 64 + 4) * 8 - 1))
    with pytest.raises(MemoryError, match="host"):
        gradients(model, batch())


def test_an_unpatched_model_is_refused():
    model = tiny_model()
    apply_memory_plan(model, MemoryPlan.uniform(2))
    ids, positions, _ = batch()
    with pytest.raises(ValueError, match="apply_seq_parallel_monkey_patch"):
        model(ids, position_ids=positions)


def test_a_layer_of_unknown_structure_is_refused():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    layer = model.model.layers[1]

    class Scaled(type(layer)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, **kwargs) if "attention_output" in kwargs else 2 * hidden_states

    layer.__class__ = Scaled
    apply_memory_plan(model, MemoryPlan.uniform(2))
    with pytest.raises(ValueError, match="a memory plan does not know"):
        gradients(model, batch())


def test_a_layer_that_gates_its_attention_output_is_refused():
    """What happens between attention and output projection is in neither half."""
    model = tiny_model("qwen3_next", torch.float32, layer_types=["full_attention"] * 2)
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    with pytest.raises(ValueError, match="a memory plan does not know"):
        gradients(model, batch())


def test_families_of_another_structure_are_refused():
    ids = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **ids))
    ec.apply_seq_parallel_monkey_patch("data_parallel", gpt)
    with pytest.raises(ValueError, match="GPT2Model is built in a way that a memory plan does not know"):
        apply_memory_plan(gpt, MemoryPlan.uniform(2))
    config = AutoConfig.for_model("stablelm", **ids, intermediate_size=96, num_key_value_heads=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    with pytest.raises(ValueError, match="a memory plan does not know"):
        gradients(model, batch())


def test_dropout_is_refused():
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
    model = get_peft_model(tiny_model(), lora).double().train()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    with pytest.raises(ValueError, match="dropout"):
        gradients(model, batch())


RANDOM = {"starcoder2": {"residual_dropout": 1e-4}, "mixtral": {"router_jitter_noise": 1e-3, "num_local_experts": 4}}


@pytest.mark.parametrize("family", RANDOM)
def test_random_numbers_that_no_module_tells_of_are_refused(family):
    """Be they so small that a layer cannot be told from its halves."""
    model = tiny_model(family, torch.float32, **RANDOM[family], attention_dropout=0.0).train()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    with pytest.raises(ValueError, match="draws random numbers"):
        gradients(model, batch())
    model.eval()
    gradients(model, batch())
    remove_memory_plan(model)
    tile_rows(model.model.layers[0].mlp)
    gradients(model, batch())
    with pytest.raises(ValueError, match="draws random numbers"):
        gradients(model.train(), batch())
