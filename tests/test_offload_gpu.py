"""Offloaded checkpoints on a GPU: bit-identical steps, late copies, exact pools, nothing leaks."""

import gc

import pytest
import test_offload
import torch
from harness import error, tiny_model
from test_offload import LAYERS, LENGTH, WIDTH, cuda, needs_gpu
from torch import nn
from torch.utils.checkpoint import checkpoint

from easy_context.memory import host_pool as host_pool_module
from easy_context.memory import offload
from easy_context.memory.host_pool import HostPool
from easy_context.memory.offload import (
    apply_unsloth_offloaded_gradient_checkpoint_monkey_patch,
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch,
)

patched = test_offload.patched


INPUT_BYTES = LENGTH * WIDTH * 2


def gpu_model(layers=LAYERS, attention="eager"):
    settings = {"num_hidden_layers": layers, "hidden_size": WIDTH, "intermediate_size": WIDTH, "head_dim": 128}
    model = tiny_model(dtype=torch.bfloat16, attn_implementation=attention, **settings)
    return model.cuda().train()


def gpu_batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (1, LENGTH), generator=generator).cuda() for _ in range(steps)]


def train(model, steps):
    """Losses and final parameters of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for batch in gpu_batches(steps):
        loss = model(batch, use_cache=False).logits.float().logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), [p.detach() for p in model.parameters()]


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def host_pool():
    return offload._inputs(torch.device("cuda", torch.cuda.current_device())).store.host


@pytest.fixture
def slow_copies(monkeypatch):
    """Copies that come late: whoever does not wait for them reads garbage."""

    def delayed(method, lane):
        def run(self, *args):
            with getattr(self, lane).running():
                torch.cuda._sleep(5_000_000)
            return method(self, *args)

        return run

    monkeypatch.setattr(HostPool, "write", delayed(HostPool.write, "out"))
    monkeypatch.setattr(HostPool, "read", delayed(HostPool.read, "into"))


@cuda
@needs_gpu
def test_twenty_steps_are_bit_identical(patched, deterministic):
    truth = train(gpu_model(), 20)
    model = gpu_model()
    model.gradient_checkpointing_enable()
    losses, parameters = train(model, 20)
    assert torch.isfinite(losses).all() and torch.equal(losses, truth[0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, truth[1], strict=True))
    assert len(host_pool().idle) == LAYERS


@cuda
@needs_gpu
def test_late_copies_change_nothing(patched, deterministic, slow_copies):
    truth = train(gpu_model(), 3)
    model = gpu_model()
    model.gradient_checkpointing_enable()
    losses, parameters = train(model, 3)
    assert torch.equal(losses, truth[0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, truth[1], strict=True))


@cuda
@needs_gpu
def test_pool_does_not_grow_after_the_first_step_and_is_exact(patched):
    model = gpu_model()
    model.gradient_checkpointing_enable()
    train(model, 1)
    pool = host_pool()
    first = set(map(id, pool.idle))
    assert [buffer.size for buffer in pool.idle] == [INPUT_BYTES] * LAYERS
    assert all(buffer.bytes.is_pinned() for buffer in pool.idle)
    train(model, 3)
    assert set(map(id, pool.idle)) == first


@cuda
@needs_gpu
def test_peak_memory_does_not_grow_with_depth(patched):
    def peak(layers, enable):
        model = gpu_model(layers=layers, attention="sdpa").requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(True)
        enable(model)
        batch = gpu_batches(1)[0].repeat(1, 8)
        for _ in range(2):  # the first pass pays for workspaces
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model.model(batch, use_cache=False).last_hidden_state.sum().backward()
        return torch.cuda.max_memory_allocated() - before

    def plain(model):
        model._set_gradient_checkpointing(True)
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = lambda f, *args: checkpoint(f, *args, use_reentrant=False)

    def offloaded(model):
        model.gradient_checkpointing_enable()

    assert peak(12, plain) - peak(4, plain) > 7 * 8 * INPUT_BYTES
    assert peak(12, offloaded) - peak(4, offloaded) < 8 * INPUT_BYTES


@cuda
@needs_gpu
def test_failed_steps_corrupt_and_leak_nothing(patched, deterministic, slow_copies, monkeypatch):
    locked, own = [], host_pool_module.page_lock
    monkeypatch.setattr(host_pool_module, "page_lock", lambda memory: (locked.append(memory), own(memory)))
    truth = train(gpu_model(), 2)
    model = gpu_model()
    model.gradient_checkpointing_enable()
    batch = gpu_batches(1)[0]

    def fail(*args):
        raise FloatingPointError("on purpose")

    for layer in (1, 2):  # a backward that ends in the middle, and a forward that does
        handle = model.model.layers[layer].mlp.register_full_backward_hook(fail)
        with pytest.raises(FloatingPointError):
            model.model(batch, use_cache=False).last_hidden_state.sum().backward()
        handle.remove()
        handle = model.model.layers[layer].mlp.register_forward_hook(fail)
        with pytest.raises(FloatingPointError):
            model.model(batch, use_cache=False)
        handle.remove()
    model.model(batch, use_cache=False)  # a graph dropped without a backward
    model.zero_grad()
    losses, parameters = train(model, 2)
    assert torch.equal(losses, truth[0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, truth[1], strict=True))
    gc.collect()
    assert len(host_pool().idle) == len(locked)


@cuda
@needs_gpu
def test_two_graphs_at_once_and_a_second_backward(patched, deterministic, slow_copies):
    def run(model):
        one, two = (model.model(batch, use_cache=False).last_hidden_state.sum() for batch in gpu_batches(2))
        two.backward(retain_graph=True)
        one.backward()
        two.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    truth = run(gpu_model())
    model = gpu_model()
    model.gradient_checkpointing_enable()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(run(model), truth, strict=True))


@cuda
@needs_gpu
def test_removing_frees_the_host_memory(monkeypatch):
    unlocked, own = [], host_pool_module.page_unlock
    monkeypatch.setattr(
        host_pool_module, "page_unlock", lambda memory, device: (unlocked.append(memory.nbytes), own(memory, device))
    )
    apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    model = gpu_model()
    model.gradient_checkpointing_enable()
    train(model, 1)
    graph = model.model(gpu_batches(1)[0], use_cache=False).last_hidden_state.sum()
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    assert unlocked == []
    graph.backward()
    del graph
    gc.collect()
    assert unlocked == [INPUT_BYTES] * LAYERS


@cuda
@needs_gpu
def test_tiled_loss_in_bf16():
    """Weight gradients are accumulated in float32 by the GPU's own bf16 product."""
    from easy_context.memory.tiled_loss import tiled_nll_sum

    torch.manual_seed(0)
    head = nn.Linear(256, 1000, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(1, 4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(1000, (1, 4096), device="cuda")
    tiled_nll_sum(hidden, head, targets, tile_size=64).backward()
    wide, states = head.weight.detach().double().requires_grad_(), hidden.detach().double().requires_grad_()
    nn.functional.cross_entropy((states @ wide.t())[0], targets[0], reduction="sum").backward()
    assert error(head.weight.grad.double(), wide.grad) < 4e-3
    assert error(hidden.grad.double(), states.grad) < 1e-2
