"""What every attention kernel of one rank looks like from outside, and what none of them has to think about.

A kernel computes exact attention of `q` over `k`, `v`, and `lse`, the natural log of each row's softmax
denominator. With lse, results over different keys combine exactly, and so do gradients: the backward
recomputes the probabilities as exp(score - lse) from the lse of the *whole* softmax, so the gradient over all
keys is the sum of backward calls over blocks of keys (FlashAttention-2, https://arxiv.org/abs/2307.08691,
section 3).

Layout: q, out, dout `[B, S_q, H, D]`; k, v `[B, S_k, H_kv, D]`, H a multiple of H_kv; lse `[B, H, S_q]` in
float32, or float64 for float64 inputs. The scale is always explicit. `causal` means S_q == S_k, aligned; windows, soft
caps and packed documents are those of `variant.Variant`.

This base handles, once for all backends:
  - nothing to attend to (B, H, S_q or S_k is 0): out 0, lse -inf, gradients 0; no backend sees an empty
    tensor;
  - rows whose lse is -inf in the backward (they saw no key anywhere): the backend is handed +inf instead,
    with which flash kernels fill their own padding rows: exp(score - inf) is exactly 0, and so is the row's
    gradient;
  - head vectors that are not contiguous: kernels may read them wrongly without a word, so they are copied;
  - documents, one after the other, for kernels that do not take them packed, and whatever else a kernel has to
    compute in pieces (`split`): pieces have rows of their own, dk and dv are summed in float32.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .variant import Piece, Variant

HALVES = (torch.bfloat16, torch.float16)


def lse_dtype(q: Tensor) -> torch.dtype:
    """float64 for float64, otherwise float32; also what a kernel written in torch should compute in."""
    return torch.promote_types(q.dtype, torch.float32)


def must_be_deterministic() -> bool:
    """Whether torch was told to use deterministic algorithms only (warn_only does not count, as in torch)."""
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()


def wrong_inputs(q: Tensor, k: Tensor, variant: Variant) -> str | None:
    """Why no kernel whatsoever takes these inputs, or None."""
    if q.dtype != k.dtype or q.device != k.device:
        return f"q is {q.dtype} on {q.device}, k is {k.dtype} on {k.device}"
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return f"q {tuple(q.shape)} and k {tuple(k.shape)} are not [B, S_q, H, D] and [B, S_k, H_kv, D]"
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads and (not kv_heads or heads % kv_heads):
        return f"{heads} query heads are not a multiple of {kv_heads} KV heads"
    return variant.wrong(q.shape[1], k.shape[1])


class Kernel(ABC):
    """One backend. Subclasses set the attributes and implement the methods below `backward`."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    head_sizes: str  # for people; `refuses` decides
    deterministic: bool  # is the backward bit-reproducible when torch asks for it (`must_be_deterministic`)?
    windows: bool = False
    softcaps: bool = False
    packs: bool = False  # does `compute` take all documents in one call?

    def why_not(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool,
        window_left: int | None = None,
        softcap: float | None = None,
        borders: tuple[int, ...] | None = None,
    ) -> str | None:
        """Why this kernel cannot do forward and backward of these inputs, for the user; None if it can.
        Reasons do not depend on lengths, so that not every new length is news."""
        variant = Variant(causal, window_left, softcap, borders)
        reason = wrong_inputs(q, k, variant) or self.unfit(q.device) or self.missing(q.device)
        if reason:
            return reason
        if q.dtype not in self.dtypes:
            return f"takes {', '.join(_short(dtype) for dtype in self.dtypes)}, not {_short(q.dtype)}"
        if must_be_deterministic() and not self.deterministic:
            return "its backward is not deterministic, and torch.use_deterministic_algorithms is on"
        variant = variant.simplified(k.shape[1])
        if variant.window_left is not None and not self.windows:
            return "has no sliding windows"
        if variant.softcap is not None and not self.softcaps:
            return "has no soft cap"
        return self.refuses(q, k, variant)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        window_left: int | None = None,
        softcap: float | None = None,
        borders: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`(out, lse)` of softmax(scale q k^T) v, or of its `Variant`, for inputs that `why_not` accepts."""
        variant = Variant(causal, window_left, softcap, borders)
        _assert_well_formed(q, k, v, variant)
        batch, length, heads, _ = q.shape
        if q.numel() == 0 or k.numel() == 0:
            return q.new_zeros(q.shape), q.new_full((batch, heads, length), -torch.inf, dtype=lse_dtype(q))
        q, k, v = map(_readable, (q, k, v))
        variant = variant.simplified(k.shape[1])
        pieces = self._pieces(q, k, variant)
        if pieces is None:
            return self.compute(q, k, v, variant, scale)
        out, lse = q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=lse_dtype(q))
        for rows, keys, part in pieces:
            out[:, rows], lse[:, :, rows] = self.compute(q[:, rows], k[:, keys], v[:, keys], part, scale)
        return out, lse

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
        window_left: int | None = None,
        softcap: float | None = None,
        borders: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)` that flow through the keys `k`, in the inputs' dtype. `out` and `lse` belong to the
        softmax over all keys, of which `k` may be a part: the sum of calls over all parts is the gradient."""
        variant = Variant(causal, window_left, softcap, borders)
        _assert_well_formed(q, k, v, variant)
        assert dout.shape == out.shape == q.shape, (dout.shape, out.shape, q.shape)
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]), (lse.shape, q.shape)
        if q.numel() == 0 or k.numel() == 0:
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        dout, q, k, v, out = map(_readable, (dout, q, k, v, out))
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        variant = variant.simplified(k.shape[1])
        pieces = self._pieces(q, k, variant)
        if pieces is None:
            dq, dk, dv = self.compute_backward(dout, q, k, v, out, lse, variant, scale)
        else:
            dq, (dk, dv) = q.new_empty(q.shape), (x.new_zeros(x.shape, dtype=lse_dtype(x)) for x in (k, v))
            for rows, keys, part in pieces:
                inputs = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows]
                dq[:, rows], dk_part, dv_part = self.compute_backward(*inputs, part, scale)
                dk[:, keys].add_(dk_part)
                dv[:, keys].add_(dv_part)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    @abstractmethod
    def unfit(self, device: torch.device) -> str | None:
        """Why this hardware will never run the kernel, or None. Nothing can be done about it: no warning."""

    def missing(self, device: torch.device) -> str | None:
        """What has to be installed before this fitting device can run the kernel, or None."""
        return None

    def refuses(self, q: Tensor, k: Tensor, variant: Variant) -> str | None:
        """Which property of well-formed inputs, other than what the attributes say, it cannot handle, or None."""
        return None

    def split(self, q: Tensor, k: Tensor, variant: Variant) -> list[Piece] | None:
        """The pieces in which it has to compute this; None: in one call. Without borders, unless it `packs`."""
        return None

    @abstractmethod
    def compute(self, q, k, v, variant: Variant, scale: float) -> tuple[Tensor, Tensor]:
        """`forward` of a piece, not empty, last dimensions contiguous."""

    @abstractmethod
    def compute_backward(self, dout, q, k, v, out, lse, variant: Variant, scale: float) -> tuple[Tensor, ...]:
        """`backward` of a piece, not empty, last dimensions contiguous, lse never -inf; dk and dv may be wider."""

    def _pieces(self, q: Tensor, k: Tensor, variant: Variant) -> list[Piece] | None:
        if variant.borders is None or self.packs:
            return self.split(q, k, variant)
        pieces = []
        for start, end in zip(variant.borders, variant.borders[1:], strict=False):
            document = variant._replace(borders=None).simplified(end - start)
            whole = [Piece(slice(0, end - start), slice(0, end - start), document)]
            for rows, keys, part in self.split(q[:, start:end], k[:, start:end], document) or whole:
                pieces.append(Piece(_moved(rows, start), _moved(keys, start), part))
        return pieces


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


def _moved(where: slice, by: int) -> slice:
    return slice(where.start + by, where.stop + by)


def _assert_well_formed(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> None:
    error = wrong_inputs(q, k, variant)
    assert error is None, error
    assert k.shape == v.shape and k.dtype == v.dtype, (k.shape, k.dtype, v.shape, v.dtype)


def _readable(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
