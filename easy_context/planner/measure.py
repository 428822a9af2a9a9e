"""The speeds of this machine's GPU, measured in a few seconds, in place of the table's."""

from dataclasses import replace

import torch

from ..kernels import KERNELS
from ..metrics import median_seconds
from .hardware import Hardware
from .training import this_machine

HEAD_SIZES = (64, 128)


def measure_here(
    device: torch.device | None = None, *, tokens: int = 32768, side: int = 8192, mib: int = 1024
) -> Hardware:
    """Speeds of a product of `side` x `side` matrices, of attention over `tokens` with each kernel that is installed,
    of copies of `mib` MiB on the device and from pinned host memory. Links between GPUs and the optimizer's speed
    stay the table's. Without `device` the GPU is meant.

    Raises:
        ValueError: there is none.
    """
    if device is None:
        if not torch.cuda.is_available():
            raise ValueError("no GPU here to measure: leave out --measure, and say which one is meant by --gpu")
        device = torch.device("cuda", torch.cuda.current_device())
    table = this_machine(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    product = median_seconds(lambda: a @ b, device)
    here = torch.empty(mib << 20, dtype=torch.uint8, device=device)
    there = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copy = median_seconds(here.clone, device)
    link = here.nbytes / median_seconds(lambda: here.copy_(there, non_blocking=True), device)
    return replace(
        table,
        matmul=2 * side**3 / product,
        bandwidth=2 * here.nbytes / copy,
        kernels=_kernels(device, dtype, tokens),
        host_link=link,
        host_total=link * table.host_total / table.host_link,
    )


def _kernels(device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, dict[int, tuple[float, float]]]:
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for head_size in HEAD_SIZES:
        heads, kv_heads = 2048 // head_size, 512 // head_size
        q, dout = (torch.randn(1, tokens, heads, head_size, dtype=dtype, device=device) for _ in range(2))
        k, v = (torch.randn(1, tokens, kv_heads, head_size, dtype=dtype, device=device) for _ in range(2))
        flops, scale = 2 * tokens**2 * heads * head_size, head_size**-0.5
        for kernel in KERNELS:
            if kernel.name == "reference" or kernel.why_not(q, k, causal=True):
                continue
            out, lse = kernel.forward(q, k, v, causal=True, scale=scale)
            forward = median_seconds(lambda: kernel.forward(q, k, v, causal=True, scale=scale), device)  # noqa: B023
            backward = median_seconds(
                lambda: kernel.backward(dout, q, k, v, out, lse, causal=True, scale=scale),  # noqa: B023
                device,
            )
            found.setdefault(kernel.name, {})[head_size] = flops / forward, 2.5 * flops / backward
    return found
