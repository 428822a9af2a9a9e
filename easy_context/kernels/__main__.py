"""`python -m easy_context.kernels`: which attention kernels this machine can run, how fast, and how exact.

Speed is that of one causal call, counted as 2 S^2 D H FLOPs forward and 2.5 times that backward. Errors are
||got - truth|| / ||truth|| against float64 on a shorter sequence, the larger of dq, dk and dv for the gradients; a
kernel is exact where they are at most twice those of the textbook formula computed in the same dtype, the measure of
FlashAttention's own tests.
"""

import argparse

import torch

from ..metrics import median_seconds
from . import KERNELS, describe
from .base import Kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
CHECKED = 1024  # tokens of the sequence on which errors are measured, at most


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m easy_context.kernels", description=__doc__)
    parser.add_argument("--seq-length", type=int, default=16384 if on_gpu else 1024)
    parser.add_argument("--heads", type=int, default=32 if on_gpu else 8)
    parser.add_argument("--kv-heads", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--head-size", type=int, default=128 if on_gpu else 64)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")
    args = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")

    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, causal, {args.seq_length} tokens, ", end="")
    print(f"{args.heads} query and {args.kv_heads} KV heads of {args.head_size}, {args.dtype}\n")
    rows = []
    for kernel, row in zip(KERNELS, describe(device.type), strict=True):
        inputs = _inputs(args, args.seq_length, device)
        reason = kernel.why_not(*inputs[:2], causal=True)
        measured = _speed(kernel, inputs) | _errors(kernel, args, device) if reason is None else {}
        columns = ("forward", "forward+backward", "error out", "error grads", "exact")
        found = {
            "kernel": kernel.name,
            "here": reason or "yes",
            **{column: measured.get(column, "") for column in columns},
        }
        row.pop(f"on this {device.type}")
        rows.append(found | row)
    print("\n".join(_table(rows)))
    print("\nforward, forward+backward: TFLOP/s. Fastest first; attention takes the first one that can do the task.")


def _inputs(args: argparse.Namespace, length: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v, dout."""
    generator = torch.Generator(device).manual_seed(0)
    settings = {"generator": generator, "device": device, "dtype": DTYPES[args.dtype]}
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    return [torch.randn(1, length, h, args.head_size, **settings) for h in heads]


def _both(kernel: Kernel, q, k, v, dout) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv."""
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, causal=True, scale=scale)
    return out, *kernel.backward(dout, q, k, v, out, lse, causal=True, scale=scale)


def _speed(kernel: Kernel, inputs: list[torch.Tensor]) -> dict[str, str]:
    q, k, v, _ = inputs
    flops = 2 * q.shape[1] ** 2 * q.shape[2] * q.shape[3]
    forward = median_seconds(lambda: kernel.forward(q, k, v, causal=True, scale=q.shape[-1] ** -0.5), q.device)
    both = median_seconds(lambda: _both(kernel, *inputs), q.device)
    return {"forward": f"{flops / forward / 1e12:.3g}", "forward+backward": f"{3.5 * flops / both / 1e12:.3g}"}


def _errors(kernel: Kernel, args: argparse.Namespace, device: torch.device) -> dict[str, str]:
    inputs = _inputs(args, min(CHECKED, args.seq_length), device)
    truth = _textbook(*(t.double() for t in inputs))
    ours, plain = (
        [((got.double() - true).norm() / true.norm()).item() for got, true in zip(values, truth, strict=True)]
        for values in (_both(kernel, *inputs), _textbook(*inputs))
    )
    exact = all(error <= 2 * allowed for error, allowed in zip(ours, plain, strict=True))
    return {"error out": f"{ours[0]:.1e}", "error grads": f"{max(ours[1:]):.1e}", "exact": "yes" if exact else "NO"}


def _textbook(q, k, v, dout) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv by the definition of attention, in the dtype of its inputs."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    groups = q.shape[2] // k.shape[2]
    q, k, v = leaves[0], *(t.repeat_interleave(groups, 2) for t in leaves[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def _table(rows: list[dict[str, str]]) -> list[str]:
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in rows[0]}
    lines = [{column: column for column in widths}, {column: "-" * width for column, width in widths.items()}, *rows]
    return [" | ".join(f"{line[column]:{width}}" for column, width in widths.items()).rstrip() for line in lines]


if __name__ == "__main__":
    main()
