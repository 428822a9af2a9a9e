"""Every mode over NCCL, a process and a GPU a rank: attention on every kernel, whole models, sequence x data, training.

Truth is float32 in one process. What is allowed is twice the error of one bf16 call of the same kernel on the whole
sequence. The last test runs the functions of this file over gloo, so that they are known to be right without a GPU.
"""

import pytest
import torch
import torch.distributed as dist
from harness import spawn, tiny_model
from kernel_cases import BY_NAME, CUDA

from easy_context import (
    apply_seq_parallel_monkey_patch,
    init_seq_parallel,
    prepare_seq_parallel_inputs,
    seq_parallel_loss,
    sequence_parallel_attention,
    shard_sequence,
)

GPUS = torch.cuda.device_count()
MODES = ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn")
WORLDS = sorted({2, max(2, GPUS)})
WHAT = ("out", "dq", "dk", "dv")


def on_gpus(count: int):
    skip = pytest.mark.skipif(count > GPUS, reason=f"needs {count} NVIDIA GPUs, this machine has {GPUS}")
    return [pytest.mark.cuda, skip]


over_nccl = pytest.mark.parametrize("world", [pytest.param(world, marks=on_gpus(world)) for world in WORLDS])


def masks(length: int) -> dict[str, dict]:
    """Borders are multiples of 64: cuDNN takes no piece of a single token."""
    documents = tuple(length * eighths // 8 for eighths in (0, 1, 4, 5, 8))
    return {"causal": {}, "documents": {"documents": (documents,)}, "window": {"window": length // 5}}


def refusal(kernel: str, q, k, mask: dict) -> str | None:
    window_left = mask["window"] - 1 if "window" in mask else None
    borders = mask["documents"][0] if "documents" in mask else None
    return BY_NAME[kernel].why_not(q, k, causal=True, window_left=window_left, borders=borders)


def with_gradients(tensors, dout, mode: str, **settings):
    """out, dq, dk and dv of this rank's tensors."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = sequence_parallel_attention(*leaves, seq_algo=mode, **settings)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def attention_errors(rank, world, mode, kernels, head_sizes, length, device, heads=8, kv_heads=2):
    """Per case the squares of this rank's errors, of those of one call on the same rows, and of the truth's norm, for
    out, dq, dk and dv."""
    errors, random = {}, torch.Generator().manual_seed(0)
    for head_size in head_sizes:
        whole = [
            torch.randn(1, length, h, head_size, generator=random).to(device)
            for h in (heads, kv_heads, kv_heads, heads)
        ]
        low = [t.bfloat16() for t in whole]
        own = [shard_sequence(mode, t) for t in low]
        for name, mask in masks(length).items():
            truth = with_gradients(
                [t.float() for t in low[:3]], low[3].float(), "data_parallel", kernel="reference", **mask
            )
            for kernel in kernels:
                if refusal(kernel, *low[:2], mask):
                    continue
                alone = with_gradients(low[:3], low[3], "data_parallel", kernel=kernel, **mask)
                got = with_gradients(own[:3], own[3], mode, kernel=kernel, **mask)
                squares = []
                for a, b, c in zip(got, alone, truth, strict=True):
                    b, c = (shard_sequence(mode, t).float() for t in (b, c))
                    squares.append([(x**2).sum().item() for x in (a.float() - c, b - c, c)])
                errors[kernel, head_size, name] = squares
    return errors


def assert_close(of_ranks: list[dict], cases: set) -> None:
    """`cases` were computed, and all ranks together are within twice the error of one call."""
    assert all(set(errors) == cases for errors in of_ranks) and cases
    for case in cases:
        for what, squares in zip(WHAT, zip(*(errors[case] for errors in of_ranks), strict=True), strict=True):
            got, alone, norm = (sum(parts) ** 0.5 for parts in zip(*squares, strict=True))
            assert got <= 2 * alone < 0.1 * norm, (case, what, got / norm, alone / norm)


@over_nccl
@pytest.mark.parametrize("kernel", CUDA)
@pytest.mark.parametrize("mode", MODES)
def test_attention_within_twice_the_error_of_one_call(mode, kernel, world):
    length = 2048 * world
    q = torch.zeros(1, 128, 8, 64, dtype=torch.bfloat16, device="cuda")
    if reason := BY_NAME[kernel].why_not(q, q, causal=True):
        pytest.skip(reason)
    of_ranks = spawn(attention_errors, world, mode, [kernel], [64, 128], length, "cuda", backend="nccl")
    named = {name for name in masks(length) if kernel != "cudnn" or name != "window"}
    assert_close(of_ranks, {(kernel, head_size, name) for head_size in (64, 128) for name in named})


# --- models


def batch(rows: int, length: int):
    ids = torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    targets[:, -1], targets[0, 5:20] = -100, -100
    return ids, targets


def model_for(device: str, dtype: torch.dtype):
    """The same weights in every dtype."""
    model = tiny_model(dtype=torch.bfloat16, hidden_size=256, head_dim=64, max_position_embeddings=4096)
    return model.to(device, dtype)


def gradients_of_a_step(rank, world, mode, seq_parallel_size, rows, length, device):
    """Loss of the whole batch and every gradient, as data-parallel training averages them; rank 0's."""
    mesh = init_seq_parallel(seq_parallel_size)
    apply_seq_parallel_monkey_patch(mode, "llama")
    model = model_for(device, torch.bfloat16).train()
    mine = [t.chunk(mesh.data_size)[mesh.data_rank].to(device) for t in batch(rows, length)]
    local = prepare_seq_parallel_inputs(mode, mine[0], None, mine[1], rank, world, device)
    logits = model(local["local_input_ids"], position_ids=local["local_position_ids"]).logits
    loss, reported = seq_parallel_loss(logits, local["local_target_ids"])
    loss.backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return reported.item(), {name: (g / world).cpu() for name, g in gradients.items()} if rank == 0 else None


def true_gradients(rank, world, rows, length, device):
    """The same of the unpatched model in float32, with torch's own attention."""
    ids, targets = (t.to(device) for t in batch(rows, length))
    model = model_for(device, torch.float32).train()
    logits = model(ids, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), {name: p.grad.float().cpu() for name, p in model.named_parameters()}


def assert_trains_alike(world, mode, seq_parallel_size, length, device, backend):
    rows = 2 * world // seq_parallel_size
    run = {"backend": backend}
    ((loss, truth),) = spawn(true_gradients, 1, rows, length, device, **run)
    ((_, low),) = spawn(gradients_of_a_step, 1, "data_parallel", 1, rows, length, device, **run)
    results = spawn(gradients_of_a_step, world, mode, seq_parallel_size, rows, length, device, **run)
    assert all(reported == pytest.approx(loss, rel=2e-3) for reported, _ in results)
    for name, got in results[0][1].items():
        allowed = (low[name] - truth[name]).norm()
        assert (got - truth[name]).norm() <= 2 * allowed < 0.2 * truth[name].norm(), name


@over_nccl
@pytest.mark.parametrize("mode", MODES)
def test_a_bf16_model_within_twice_the_error_of_one_process(mode, world):
    assert_trains_alike(world, mode, world, 1000, "cuda", "nccl")


@pytest.mark.parametrize("world", [pytest.param(4, marks=on_gpus(4))])
@pytest.mark.parametrize("mode", MODES)
def test_sequence_times_data_parallel(mode, world):
    assert_trains_alike(world, mode, world // 2, 1000, "cuda", "nccl")


@pytest.mark.parametrize("mode", MODES)
def test_the_functions_of_this_file_over_gloo(mode):
    of_ranks = spawn(attention_errors, 2, mode, ["cpu_flash"], [16], 512, "cpu")
    assert_close(of_ranks, {("cpu_flash", 16, name) for name in masks(512)})
    assert_trains_alike(2, mode, 1 if mode == "ulysses_attn" else 2, 60, "cpu", "gloo")
