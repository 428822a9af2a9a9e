"""What is timed: this project's modes, and the one-process kernel that they are held against."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from workload import Workload

from easy_context.attention import sequence_parallel_attention
from easy_context.kernels import KERNELS, choose

MODES = ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn")


@dataclass
class System:
    """One row of the table.

    Attributes:
        attend: differentiable, q, k, v -> out.
        tokens: queries that this process holds.
        flops: of its forward, counted for one process (or thread, of a call on several).
        heads_first: tensors are `[1, H, S, D]`, not `[1, S, H, D]`.
        threads: CPU threads of a system that the first process runs alone; None: every process runs it, with one.
        around: a context in which forward and backward run.
        failure: why it does not run.
    """

    name: str
    mode: str
    kernel: str
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    tokens: int
    flops: float
    heads_first: bool = False
    threads: int | None = None
    around: Callable[[], AbstractContextManager] = nullcontext
    failure: str | None = None


def our_modes(work: Workload, world: int, device: torch.device, kernel: str | None) -> list[System]:
    """Every mode of easy_context with `kernel`, None for what it chooses itself."""
    tokens = work.seq_length // world
    window_left = None if work.window is None else work.window - 1
    probe = torch.empty(1, 128, work.heads, work.head_size, dtype=work.dtype, device=device)
    name, failure = kernel or "", None
    try:
        name = choose(probe, probe[:, :, : work.kv_heads], causal=True, window_left=window_left, name=kernel).name
    except ValueError as error:
        failure = str(error)
    documents = None if work.documents is None else (work.documents,)

    def system(mode: str) -> System:
        def attend(q, k, v):
            masks = {"window": work.window, "documents": documents}
            return sequence_parallel_attention(q, k, v, seq_algo=mode, kernel=kernel, **masks)

        return System("easy_context", mode, name, attend, tokens, work.flops / world, failure=failure)

    return [system(mode) for mode in MODES]


def one_call(kernel: str, work: Workload, world: int) -> System:
    """A kernel in one causal call, on as many FLOPs as each rank of a causal sequence has."""
    tokens = round(work.seq_length / sqrt(world) / 128) * 128
    scale = work.head_size**-0.5
    backend = next(k for k in KERNELS if k.name == kernel)

    class OneCall(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = backend.forward(q, k, v, causal=True, scale=scale)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            return backend.backward(dout, *ctx.saved_tensors, causal=True, scale=scale)

    flops = 2 * tokens**2 * work.heads * work.head_size
    return System("one call", "one process", kernel, OneCall.apply, tokens, flops)


def one_process(work: Workload, world: int) -> System:
    """torch's scaled_dot_product_attention on the CPU: the whole sequence in one process with `world` threads."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    flops = 2 * work.seq_length**2 * work.heads * work.head_size / world
    settings = {"heads_first": True, "threads": world}
    return System("torch SDPA", "one process", "cpu_flash", attend, work.seq_length, flops, **settings)
