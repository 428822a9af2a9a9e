"""The loss of a model, over ranks and under ZeRO-3, equals one process's cross-entropy: value and gradients."""

import contextlib
import os
import sys

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from harness import error, free_port, spawn, tiny_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from easy_context import (
    MemoryPlan,
    apply_memory_plan,
    apply_seq_parallel_monkey_patch,
    tile_rows,
)
from easy_context.loss import (
    CausalLMWithLoss,
    global_num_items,
    logits_transform_of,
    seq_parallel_loss,
    seq_parallel_loss_from_hidden,
    token_nll,
)

VOCAB, HIDDEN = 97, 16
TIGHT = 1e-12


def draw_targets(batch, length, seed, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(VOCAB, (batch, length), generator=generator)
    return targets.masked_fill(torch.rand(batch, length, generator=generator) < ignored, -100)


def problem(dtype=torch.float64, bias=False, batch=2, length=25, ignored=0.3):
    torch.manual_seed(1)
    head = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=dtype)
    hidden = (4 * torch.randn(batch, length, HIDDEN)).to(dtype).requires_grad_()
    return hidden, head, draw_targets(batch, length, seed=2, ignored=ignored)


def cross_entropy_sum(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def gradients(scalar, *leaves):
    return torch.autograd.grad(scalar, [leaf for leaf in leaves if leaf is not None])


# Tiles


# One process


@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
def test_both_losses_are_the_token_mean(ignored):
    hidden, head, targets = problem(ignored=ignored)
    logits = head(hidden)
    truth = cross_entropy_sum(logits, targets) / max(1, (targets != -100).sum())
    for loss, reported in (
        seq_parallel_loss(logits, targets),
        seq_parallel_loss_from_hidden(hidden, head, targets, tile_size=7),
    ):
        assert loss.dtype == reported.dtype == torch.float64 and not reported.requires_grad
        assert error(loss, truth) < TIGHT and error(reported, truth) < TIGHT
        (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        assert error(gradient, *torch.autograd.grad(truth, hidden, retain_graph=True)) < TIGHT


def test_ignored_rows_are_exactly_zero_even_if_not_finite():
    hidden, head, targets = problem()
    with torch.no_grad():
        hidden[targets == -100] = torch.inf
    loss, _ = seq_parallel_loss(head(hidden), targets)
    assert torch.isfinite(loss)


def ids(batch=2, length=12):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCAB, (batch, length), generator=generator)
    return tokens, torch.arange(length).expand(batch, -1), draw_targets(batch, length, seed=4)


FAMILIES = [
    ("llama", {}, False, 1e-9),
    ("llama", {"tie_word_embeddings": True}, False, 1e-9),
    ("qwen3", {}, False, 1e-9),
    ("gemma2", {"final_logit_softcapping": 3.0}, True, 1e-6),
    ("cohere", {"logit_scale": 0.3}, True, 1e-6),
    ("granite", {"logits_scaling": 3.0}, True, 1e-9),
]


@pytest.mark.parametrize(("family", "settings", "transformed", "tolerance"), FAMILIES)
def test_model_with_loss_equals_the_models_own_logits(family, settings, transformed, tolerance):
    model = tiny_model(family, **settings)
    tokens, positions, targets = ids()
    assert (logits_transform_of(model) is not None) == transformed
    logits = model(tokens, position_ids=positions).logits
    truth = cross_entropy_sum(logits, targets) / (targets != -100).sum()
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").detach()
    expected = torch.autograd.grad(truth, list(model.parameters()))
    wrapper = CausalLMWithLoss(model)
    loss, reported = wrapper(tokens, positions, targets)
    assert wrapper.config is model.config
    assert error(loss, truth) < tolerance and error(reported, truth) < tolerance
    assert error(token_nll(model, tokens, positions, targets), each) < tolerance
    for mine, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        assert error(mine, theirs) < tolerance


@pytest.mark.parametrize("by", ["logits", "hidden", "attention", "plan", "tiles"])
def test_second_derivatives_are_refused(by):
    """torch's once_differentiable lets those pass that do not run through the gradient that it is handed: as zero."""
    model, (tokens, positions, targets) = tiny_model(), ids()
    if by in ("attention", "plan"):
        apply_seq_parallel_monkey_patch("zigzag_ring_attn", model)
    if by == "plan":
        apply_memory_plan(model, MemoryPlan.uniform(2))
    if by == "tiles":
        tile_rows(model.model.layers[0].mlp, 4)
    loss = CausalLMWithLoss(model)(tokens, positions, targets)[0]
    if by != "hidden":
        logits = model(tokens, position_ids=positions).logits
        loss = seq_parallel_loss(logits, targets)[0] if by == "logits" else logits.square().sum()
    with pytest.raises(ValueError, match="create_graph=True"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_a_compiled_model_with_loss_trains():
    model = tiny_model(num_hidden_layers=1)
    tokens, positions, targets = ids()
    logits = model(tokens, position_ids=positions).logits
    truth = cross_entropy_sum(logits, targets) / (targets != -100).sum()
    expected = torch.autograd.grad(truth, list(model.parameters()))
    loss, _ = torch.compile(CausalLMWithLoss(model), backend="aot_eager")(tokens, positions, targets)
    assert error(loss, truth) < 1e-12
    for mine, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        assert error(mine, theirs) < 1e-12


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_lora_models_train(settings):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **settings)
    model = get_peft_model(tiny_model(), config).double()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tokens, positions, targets = ids()
    truth = cross_entropy_sum(model(tokens, position_ids=positions).logits, targets) / (targets != -100).sum()
    loss, _ = CausalLMWithLoss(model)(tokens, positions, targets)
    assert error(loss, truth) < 1e-9
    for mine, theirs in zip(
        torch.autograd.grad(loss, trained.values()), torch.autograd.grad(truth, trained.values()), strict=True
    ):
        assert theirs.norm() > 0 and error(mine, theirs) < 1e-9


def test_models_that_are_more_than_decoder_and_head_are_refused():
    from peft import PromptTuningConfig, get_peft_model

    with pytest.raises(ValueError, match="BertLMHeadModel"):
        CausalLMWithLoss(tiny_model("bert", is_decoder=True))
    with pytest.raises(ValueError, match="OPTForCausalLM"):
        CausalLMWithLoss(tiny_model("opt", word_embed_proj_dim=64, ffn_dim=96))
    with pytest.raises(ValueError, match="output_router_logits"):
        CausalLMWithLoss(tiny_model("mixtral", num_local_experts=2, output_router_logits=True))
    with pytest.raises(ValueError, match="soft prompts"):
        CausalLMWithLoss(get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))


# Ranks

LENGTHS = {  # valid targets of each rank's micro-batches, of 12
    "even": [[12], [12], [12]],
    "uneven": [[12], [5], [1]],
    "a rank with none": [[7], [0], [11]],
    "all ignored": [[0], [0], [0]],
    "accumulation": [[12, 1], [3, 0], [0, 9]],
}


def micro_batches(case, rank):
    for step, valid in enumerate(LENGTHS[case][rank]):
        seed = 10 * rank + step
        tokens = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(seed))
        targets = draw_targets(1, 12, seed, ignored=0)
        targets[:, valid:] = -100
        yield tokens, torch.arange(12)[None], targets


def one_process(model, case, world):
    """(loss, gradients) of the micro-batches of all ranks as one batch."""
    batches = [batch for rank in range(world) for batch in micro_batches(case, rank)]
    tokens, positions, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = cross_entropy_sum(model(tokens, position_ids=positions).logits, targets)
    loss = loss / max(1, (targets != -100).sum())
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def ddp_step(rank, world, case, tiled):
    """(gradients, reported) of one optimizer step under DDP, which averages over ranks."""
    model = tiny_model()
    wrapped = DistributedDataParallel(CausalLMWithLoss(model) if tiled else model)
    batches = list(micro_batches(case, rank))
    num_items = global_num_items(targets for *_, targets in batches) if len(batches) > 1 else None
    reported = 0
    for step, (tokens, positions, targets) in enumerate(batches):
        with wrapped.no_sync() if step < len(batches) - 1 else contextlib.nullcontext():
            if tiled:
                loss, part = wrapped(tokens, positions, targets, num_items)
            else:
                loss, part = seq_parallel_loss(wrapped(tokens, position_ids=positions).logits, targets, num_items)
            loss.backward()
        reported += part
    return [p.grad for p in model.parameters()], reported


@pytest.mark.parametrize("tiled", [False, True], ids=["logits", "tiled"])
@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_one_process(world, case, tiled):
    truth, expected = one_process(tiny_model(), case, world)
    for grads, reported in spawn(ddp_step, world, case, tiled):
        assert error(reported, truth) < 1e-9
        for grad, theirs in zip(grads, expected, strict=True):
            assert error(grad, theirs) < 1e-9


def counted(rank, world):
    return [global_num_items(targets).item() for targets in (draw_targets(2, 9, rank), [draw_targets(2, 9, rank)] * 3)]


def test_num_items_counts_micro_batches_of_all_ranks():
    truth = sum((draw_targets(2, 9, rank) != -100).sum().item() for rank in range(2))
    assert spawn(counted, 2) == [[truth, 3 * truth]] * 2
    tokens, positions, targets = ids()
    model = CausalLMWithLoss(tiny_model())
    loss, reported = model(tokens, positions, targets, num_items=1000)
    assert error(loss, model(tokens, positions, targets)[0] * (targets != -100).sum() / 1000) < TIGHT
    assert loss == reported


# DeepSpeed ZeRO-3: parameters exist only while their module is called


def zero3_step(rank, world, port, path):
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad

    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # ninja, as pip installs it
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    model = CausalLMWithLoss(tiny_model(dtype=torch.float32, tie_word_embeddings=True))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    batches = list(micro_batches("accumulation", rank))
    num_items = global_num_items(targets for *_, targets in batches)
    reported = 0
    for tokens, positions, targets in batches:
        loss, part = engine(tokens, positions, targets, num_items)
        engine.backward(loss * engine.gradient_accumulation_steps())
        reported += part
        if engine.is_gradient_accumulation_boundary():
            grads = [safe_get_full_grad(p) for p in model.parameters()]
        engine.step()
    torch.save((grads, reported), f"{path}/{rank}.pt")


@pytest.mark.filterwarnings("ignore")
def test_zero3_follows_one_process(tmp_path):
    pytest.importorskip("deepspeed")
    mp.spawn(zero3_step, (2, free_port(), str(tmp_path)), nprocs=2)
    model = tiny_model(dtype=torch.float32, tie_word_embeddings=True)
    truth, expected = one_process(model, "accumulation", 2)
    for rank in range(2):
        grads, reported = torch.load(tmp_path / f"{rank}.pt")
        assert error(reported, truth) < 1e-6
        for grad, theirs in zip(grads, expected, strict=True):
            assert error(grad, theirs) < 1e-5
