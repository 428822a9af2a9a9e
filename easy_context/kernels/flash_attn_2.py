"""FlashAttention-2 (https://arxiv.org/abs/2307.08691) from its own package, `flash-attn` 2.7 or newer, where it is
installed already: pip compiles it for many minutes.

The algorithm, and so the speed, is that of `torch_flash.py`; what the package adds is the soft cap, through the
hardware's approximate tanh (relative error 2^-11). flash-attn-4 lives in the same namespace, `flash_attn.cute`: only
the compiled module `flash_attn_2_cuda` tells that version 2 is there.
"""

import functools

import torch

from .base import must_be_deterministic
from .packed import Packed
from .torch_flash import TorchFlash

LARGEST_HEAD = 256


class FlashAttn2(TorchFlash):
    name = "flash_attn_2"
    head_sizes = f"multiples of 8 up to {LARGEST_HEAD}"
    softcaps = True

    def missing(self, device):
        return _import_error()

    def head_size_limit(self, device):
        return LARGEST_HEAD

    def compute(self, q, k, v, variant, scale):
        from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward

        packed = Packed.of(q, k, variant.borders)
        forward = _flash_attn_forward if packed.offsets is None else _flash_attn_varlen_forward
        out, lse, *_ = forward(*packed.fold(q, k, v), **_arguments(variant, packed, scale), return_softmax=False)
        return *packed.unfold(out), packed.unfold_lse(lse)

    def compute_backward(self, dout, q, k, v, out, lse, variant, scale):
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_varlen_backward

        packed = Packed.of(q, k, variant.borders)
        backward = _flash_attn_backward if packed.offsets is None else _flash_attn_varlen_backward
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        backward(
            *(*packed.fold(dout, q, k, v, out), packed.fold_lse(lse), *packed.fold(*grads)),
            **_arguments(variant, packed, scale),
            deterministic=must_be_deterministic(),
        )
        return grads


def _arguments(variant, packed, scale):
    """What forward and backward are told alike. -1 stands for no limit of the window."""
    arguments = {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": variant.causal,
        "window_size_left": -1 if variant.window_left is None else variant.window_left,
        "window_size_right": -1,
        "softcap": variant.softcap or 0.0,
        "alibi_slopes": None,
    }
    if packed.offsets is None:
        return arguments
    offsets = {"cu_seqlens_q": packed.offsets, "cu_seqlens_k": packed.offsets}
    return arguments | offsets | {"max_seqlen_q": packed.q_longest, "max_seqlen_k": packed.k_longest}


@functools.cache
def _import_error() -> str | None:
    try:
        import flash_attn_2_cuda  # noqa: F401
        from flash_attn import __version__
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward  # noqa: F401
    except ImportError as error:
        return f"the package flash-attn 2 cannot be imported ({error})"
    if tuple(map(int, __version__.split(".")[:2])) < (2, 7):
        return f"flash-attn {__version__} is too old: upgrade it to 2.7"
    return None
