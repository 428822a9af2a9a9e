"""FlashAttention-4 (optional package `flash-attn-4`): the fastest on Hopper and Blackwell.

Python over NVIDIA's CuTe DSL (https://github.com/Dao-AILab/flash-attention), so pip alone installs it; the
version bound in the hint below lets pip take pre-releases, all there is of version 4. Kernels are compiled when a head
size, number of heads, dtype or variant is first met: in seconds to a minute, by every process of every run, unless
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 lets the package keep them on disk (`train_scripts/common.sh` sets it). Takes
`[B, S, H, D]` as it is; packed documents in one call. Its soft cap uses the hardware's approximate tanh (relative error
2^-11).
"""

import functools
import threading

import torch

from .base import HALVES, Kernel, must_be_deterministic, unless_nvidia
from .packed import Packed

HEAD_SIZES = (64, 96, 128)
_one_at_a_time = threading.Lock()  # a call may compile, which the DSL does in state that threads share


class FlashAttn4(Kernel):
    name = "flash_attn_4"
    dtypes = HALVES
    head_sizes = ", ".join(map(str, HEAD_SIZES))
    deterministic = True
    windows = True
    softcaps = True
    packs = True

    def unfit(self, device):
        return unless_nvidia(device, range(9, 12))

    def missing(self, device):
        return _import_error()

    def refuses(self, q, k, variant):
        size = q.shape[3]
        if size not in HEAD_SIZES:
            return f"head size {size} is none of {self.head_sizes}"
        if variant.softcap is None:
            return None
        if torch.cuda.get_device_capability(q.device)[0] != 9:
            return "its backward with a soft cap is reported to hang on Blackwell (flash-attention issue 2466)"
        return (
            None if _differentiates_softcap() else "this version has no backward for a soft cap: upgrade flash-attn-4"
        )

    def compute(self, q, k, v, variant, scale):
        from flash_attn.cute.interface import _flash_attn_fwd

        packed = Packed.of(q, k, variant.borders)
        with _one_at_a_time, torch.cuda.device(q.device):  # it compiles for, and launches on, the current device
            out, lse, *_ = _flash_attn_fwd(
                *packed.fold(q, k, v), softmax_scale=scale, return_lse=True, **_arguments(variant, packed)
            )
        return *packed.unfold(out), packed.unfold_lse(lse)

    def compute_backward(self, dout, q, k, v, out, lse, variant, scale):
        from flash_attn.cute.interface import _flash_attn_bwd

        packed = Packed.of(q, k, variant.borders)
        with _one_at_a_time, torch.cuda.device(q.device):
            grads = _flash_attn_bwd(
                *(*packed.fold(q, k, v, out, dout), packed.fold_lse(lse)),
                softmax_scale=scale,
                deterministic=must_be_deterministic(),
                **_arguments(variant, packed),
            )
        return packed.unfold(*grads[:3])


def _arguments(variant, packed):
    """What forward and backward are told alike. Without a right limit the window is open to the right."""
    arguments = {"causal": variant.causal, "window_size_left": variant.window_left, "softcap": variant.softcap or 0.0}
    if packed.offsets is None:
        return arguments
    offsets = {"cu_seqlens_q": packed.offsets, "cu_seqlens_k": packed.offsets}
    return arguments | offsets | {"max_seqlen_q": packed.q_longest, "max_seqlen_k": packed.k_longest}


@functools.cache
def _import_error() -> str | None:
    try:
        import flash_attn.cute.interface  # noqa: F401
    except ImportError as error:
        return f"the package flash-attn-4 cannot be imported ({error}): pip install 'flash-attn-4>=4.0.0b1'"
    return None


@functools.cache
def _differentiates_softcap() -> bool:
    """The first betas computed the cap wrongly and left it out of the backward without a word."""
    import flash_attn.cute.utils

    return hasattr(flash_attn.cute.utils, "create_softcap_scoremod_bwd")
