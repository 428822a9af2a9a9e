"""Attention over two sets of keys out of attention over each: the merge of blockwise attention, in place.

    weight = sigmoid(block_lse - lse)      out += weight * (block_out - out)      lse = log(exp(lse) + exp(block_lse))

The sigmoid form neither overflows nor loses the smaller part when partial maxima differ by hundreds. A side that saw
no key (lse -inf) leaves the other as it is, two such sides stay out 0, lse -inf.

In torch this is half a dozen passes over float32 copies; it is bound by memory, and a ring does it in every step. On
CUDA one Triton kernel reads each of the four tensors once and writes two: 10 bytes per element of a bf16 block's
output, an eighth of a millisecond for 16K tokens of 32 heads of 128 on an H200. Triton comes with torch for CUDA and
is imported only when first used (`merge_triton.py`).
"""

import functools
import importlib.util
import logging
import os
import shutil

import torch
from torch import Tensor

logger = logging.getLogger("easy_context")


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """In place: `(out, lse)` becomes the attention over both key sets.

    out, block_out `[B, S, H, D]`, lse, block_lse `[B, H, S]`, of any strides (slices along S, say); out and both lse
    in float32 or float64, block_out in that or any narrower dtype. A row without keys has lse -inf, out 0."""
    assert out.dtype == lse.dtype == block_lse.dtype, (out.dtype, lse.dtype, block_lse.dtype)
    assert out.shape == block_out.shape and lse.shape == block_lse.shape, (out.shape, block_out.shape)
    if out.is_cuda and _triton_is_missing() is None:
        from .merge_triton import merge_in_one_pass

        merge_in_one_pass(out, lse, block_out, block_lse)
        return
    weight = torch.sigmoid(block_lse - lse).masked_fill_(block_lse == -torch.inf, 0.0)  # [B, H, S]
    out.lerp_(block_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


@functools.cache
def _triton_is_missing() -> str | None:
    """Why the fused kernel cannot be built here, said once, or None."""
    reason = None
    if importlib.util.find_spec("triton") is None:
        reason = "the package triton is not installed"
    elif not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        reason = "Triton needs a C compiler: install gcc, or set CC"
    if reason is not None:
        logger.warning("partial results of attention are merged by torch, in several passes: %s", reason)
    return reason
