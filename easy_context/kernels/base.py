"""What every attention kernel of one rank looks like from outside, and what none of them has to think about.

A kernel computes exact attention of `q` over `k`, `v`, and `lse`, the natural log of each row's softmax
denominator. With lse, results over different keys combine exactly, and so do gradients: the backward
recomputes the probabilities as exp(score - lse) from the lse of the *whole* softmax, so the gradient over all
keys is the sum of backward calls over blocks of keys (FlashAttention-2, https://arxiv.org/abs/2307.08691,
section 3).

Layout: q, out, dout `[B, S_q, H, D]`; k, v `[B, S_k, H_kv, D]`, H a multiple of H_kv; lse `[B, H, S_q]` in
float32, or float64 for float64 inputs. `causal` means S_q == S_k, aligned. The scale is always explicit.

This base handles, once for all backends:
  - nothing to attend to (B, H, S_q or S_k is 0): out 0, lse -inf, gradients 0; no backend sees an empty
    tensor;
  - rows whose lse is -inf in the backward (they saw no key anywhere): the backend is handed +inf instead,
    with which flash kernels fill their own padding rows: exp(score - inf) is exactly 0, and so is the row's
    gradient;
  - head vectors that are not contiguous: kernels may read them wrongly without a word, so they are copied.
A new capability (windows, documents) is a keyword argument here and one more reason in `refuses`.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def lse_dtype(q: Tensor) -> torch.dtype:
    """float64 for float64, otherwise float32; also what a kernel written in torch should compute in."""
    return torch.promote_types(q.dtype, torch.float32)


def must_be_deterministic() -> bool:
    """Whether torch was told to use deterministic algorithms only (warn_only does not count, as in torch)."""
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()


def wrong_inputs(q: Tensor, k: Tensor, *, causal: bool) -> str | None:
    """Why no kernel whatsoever takes these shapes, or None."""
    if q.dtype != k.dtype or q.device != k.device:
        return f"q is {q.dtype} on {q.device}, k is {k.dtype} on {k.device}"
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return f"q {tuple(q.shape)} and k {tuple(k.shape)} are not [B, S_q, H, D] and [B, S_k, H_kv, D]"
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads and (not kv_heads or heads % kv_heads):
        return f"{heads} query heads are not a multiple of {kv_heads} KV heads"
    if causal and q.shape[1] != k.shape[1]:
        return f"causal attention needs as many queries as keys, not {q.shape[1]} and {k.shape[1]}"
    return None


class Kernel(ABC):
    """One backend. Subclasses set the attributes and implement the methods below `backward`."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    head_sizes: str  # for people; `refuses` decides
    deterministic: bool  # is the backward bit-reproducible when torch asks for it (`must_be_deterministic`)?

    def why_not(self, q: Tensor, k: Tensor, *, causal: bool) -> str | None:
        """Why this kernel cannot do forward and backward of these inputs, for the user; None if it can."""
        reason = wrong_inputs(q, k, causal=causal) or self.unfit(q.device) or self.missing(q.device)
        if reason is None and q.dtype not in self.dtypes:
            reason = f"takes {', '.join(_short(dtype) for dtype in self.dtypes)}, not {_short(q.dtype)}"
        if reason is None and must_be_deterministic() and not self.deterministic:
            reason = "its backward is not deterministic, and torch.use_deterministic_algorithms is on"
        return reason or self.refuses(q, k, causal=causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """`(out, lse)` of softmax(scale q k^T) v, for inputs that `why_not` accepts."""
        _assert_well_formed(q, k, v, causal)
        if q.numel() == 0 or k.numel() == 0:
            batch, length, heads, _ = q.shape
            return q.new_zeros(q.shape), q.new_full((batch, heads, length), -torch.inf, dtype=lse_dtype(q))
        q, k, v = map(_readable, (q, k, v))
        return self.compute(q, k, v, causal=causal, scale=scale)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)` that flow through the keys `k`, in the inputs' dtype. `out` and `lse` belong to the
        softmax over all keys, of which `k` may be a part: the sum of calls over all parts is the gradient."""
        _assert_well_formed(q, k, v, causal)
        assert dout.shape == out.shape == q.shape, (dout.shape, out.shape, q.shape)
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]), (lse.shape, q.shape)
        if q.numel() == 0 or k.numel() == 0:
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        dout, q, k, v, out = map(_readable, (dout, q, k, v, out))
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        return self.compute_backward(dout, q, k, v, out, lse, causal=causal, scale=scale)

    @abstractmethod
    def unfit(self, device: torch.device) -> str | None:
        """Why this hardware will never run the kernel, or None. Nothing can be done about it: no warning."""

    def missing(self, device: torch.device) -> str | None:
        """What has to be installed before this fitting device can run the kernel, or None."""
        return None

    def refuses(self, q: Tensor, k: Tensor, *, causal: bool) -> str | None:
        """Which property of well-formed inputs, other than their dtype, the kernel cannot handle, or None."""
        return None

    @abstractmethod
    def compute(self, q, k, v, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """`forward` without empty inputs, last dimensions contiguous."""

    @abstractmethod
    def compute_backward(self, dout, q, k, v, out, lse, *, causal: bool, scale: float) -> tuple[Tensor, ...]:
        """`backward` without empty inputs, last dimensions contiguous, lse never -inf."""


def unless_nvidia(device: torch.device, majors: range) -> str | None:
    """Why `device` is no NVIDIA GPU whose compute capability begins with one of `majors`, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"runs on NVIDIA GPUs, not on {'ROCm' if device.type == 'cuda' else device.type}"
    if torch.cuda.get_device_capability(device)[0] not in majors:
        return f"needs a GPU of compute capability {majors[0]}.x to {majors[-1]}.x"
    return None


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views `[B, S, H, D] <-> [B, H, S, D]`, nothing copied."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _assert_well_formed(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    error = wrong_inputs(q, k, causal=causal)
    assert error is None, error
    assert k.shape == v.shape and k.dtype == v.dtype, (k.shape, k.dtype, v.shape, v.dtype)


def _readable(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
