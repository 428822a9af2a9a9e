"""FlashAttention-4 (optional package `flash-attn-4`): the fastest on Hopper and Blackwell.

Python over NVIDIA's CuTe DSL (https://github.com/Dao-AILab/flash-attention), so pip alone installs it; the
version bound in the hint below lets pip take pre-releases, all there is of version 4. Kernels are compiled, in
seconds, when a head size, dtype or mask is first met. Takes `[B, S, H, D]` as it is.
"""

import functools

import torch

from .base import HALVES, Kernel, must_be_deterministic, unless_nvidia

HEAD_SIZES = (64, 96, 128)


class FlashAttn4(Kernel):
    name = "flash_attn_4"
    dtypes = HALVES
    head_sizes = ", ".join(map(str, HEAD_SIZES))
    deterministic = True

    def unfit(self, device):
        return unless_nvidia(device, range(9, 12))

    def missing(self, device):
        return _import_error()

    def refuses(self, q, k, *, causal):
        size = q.shape[3]
        return None if size in HEAD_SIZES else f"head size {size} is none of {self.head_sizes}"

    def compute(self, q, k, v, *, causal, scale):
        from flash_attn.cute.interface import _flash_attn_fwd

        with torch.cuda.device(q.device):  # it compiles for, and launches on, the current device
            out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
        return out, lse

    def compute_backward(self, dout, q, k, v, out, lse, *, causal, scale):
        from flash_attn.cute.interface import _flash_attn_bwd

        with torch.cuda.device(q.device):
            dq, dk, dv, *_ = _flash_attn_bwd(
                *(q, k, v, out, dout, lse.contiguous()),
                softmax_scale=scale,
                causal=causal,
                deterministic=must_be_deterministic(),
            )
        return dq, dk, dv


@functools.cache
def _import_error() -> str | None:
    try:
        import flash_attn.cute.interface  # noqa: F401
    except ImportError as error:
        return f"the package flash-attn-4 cannot be imported ({error}): pip install 'flash-attn-4>=4.0.0b1'"
    return None
