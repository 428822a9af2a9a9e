"""Attention of one rank: which kernels there are, and which one is taken.

One backend a file, all with the interface of `base.Kernel`, so that modes never know which one runs.
`KERNELS` is in the order of speed measured on an H200 (forward and backward, bf16, head size 128):
flash_attn_4 629 TFLOP/s, cudnn 558, torch_flash 329; flash_attn_2 is the same algorithm and comes after it, so that
nobody is told to compile a package for nothing. An optional package is imported only once a GPU that could use it is
about to be used.
"""

import logging
import os

from torch import Tensor, device

from .base import Kernel, wrong_inputs
from .cpu_flash import CpuFlash
from .cudnn import CuDNN
from .flash_attn_2 import FlashAttn2
from .flash_attn_4 import FlashAttn4
from .reference import Reference
from .torch_flash import TorchFlash
from .variant import Variant

KERNELS: tuple[Kernel, ...] = (  # fastest first
    FlashAttn4(),
    CuDNN(),
    TorchFlash(),
    FlashAttn2(),
    CpuFlash(),
    Reference(),
)
VARIABLE = "EASY_CONTEXT_KERNEL"

logger = logging.getLogger("easy_context")
_announced: set[tuple] = set()


def choose(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    window_left: int | None = None,
    softcap: float | None = None,
    borders: tuple[int, ...] | None = None,
    name: str | None = None,
) -> Kernel:
    """The fastest kernel that can do forward and backward of q `[B, S_q, H, D]` over k `[B, S_k, H_kv, D]`.
    `variant.Variant` says what `window_left`, `softcap` and `borders` mean.

    `name`, else the environment variable EASY_CONTEXT_KERNEL, insists on one. Each distinct choice is logged
    once, as a warning with the reasons where a faster kernel for this device is passed over.

    Raises:
        ValueError: no such kernel, or it cannot do this (says why), or no kernel can.
    """
    source = "name" if name else VARIABLE
    name = name or os.environ.get(VARIABLE)
    variant = Variant(causal, window_left, softcap, borders)
    if error := wrong_inputs(q, k, variant):
        raise ValueError(f"attention impossible: {error}")
    if name:
        kernel = _named(name, source)
        if reason := kernel.why_not(q, k, **variant._asdict()):
            raise ValueError(f"attention kernel {name!r}, asked for by {source}, cannot do this: {reason}")
        _announce(logging.INFO, kernel.name, f"asked for by {source}")
        return kernel

    passed_over: list[str] = []
    for kernel in KERNELS:
        if kernel.unfit(q.device):
            continue
        if reason := kernel.why_not(q, k, **variant._asdict()):
            passed_over.append(f"{kernel.name}: {reason}")
            continue
        if passed_over:
            _announce(logging.WARNING, kernel.name, f"not the fastest for this device; {'; '.join(passed_over)}")
        else:
            _announce(logging.INFO, kernel.name, "the fastest for this device")
        return kernel
    raise ValueError(f"no attention kernel can do this: {'; '.join(passed_over)}")


def describe(device_type: str) -> list[dict[str, str]]:
    """Rows of a table, fastest kernel first: what each does, and whether this machine can run it on its "cuda" or
    "cpu", or why not."""
    where = device(device_type)
    return [
        {
            "kernel": kernel.name,
            "dtypes": " ".join(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes),
            "head sizes": kernel.head_sizes,
            "windows": "yes" if kernel.windows else "no",
            "soft cap": "yes" if kernel.softcaps else "no",
            "documents": "packed" if kernel.packs else "one by one",
            "deterministic backward": "yes" if kernel.deterministic else "no",
            f"on this {device_type}": kernel.unfit(where) or kernel.missing(where) or "yes",
        }
        for kernel in KERNELS
    ]


def _named(name: str, source: str) -> Kernel:
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    known = ", ".join(kernel.name for kernel in KERNELS)
    raise ValueError(f"no attention kernel is called {name!r} ({source}); there are {known}")


def _announce(level: int, *choice: str) -> None:
    if choice not in _announced:
        _announced.add(choice)
        logger.log(level, "attention kernel: %s (%s)", *choice)
