"""Packed documents in one kernel call: the batch is laid end to end, and cumulative lengths say where documents begin.

This is the "varlen" interface of flash-attention: tensors `[T, H, D]`, lse `[H, T]`, offsets int32 `[documents + 1]`
on the device, and the longest document on the host.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .variant import document_lengths


class Packed(NamedTuple):
    """The layout of one call. Without documents `offsets` is None and tensors stay as they are."""

    batch: int
    offsets: Tensor | None
    q_longest: int
    k_longest: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, borders: tuple[int, ...] | None) -> "Packed":
        """The layout for q `[B, S_q, H, D]`, k `[B, S_k, H_kv, D]`."""
        if borders is None:
            return cls(q.shape[0], None, q.shape[1], k.shape[1])
        longest = document_lengths(borders)[1]
        return cls(q.shape[0], _offsets(borders, q.shape[0], q.device), longest, longest)

    def fold(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`[B, S, H, D] -> [B S, H, D]`; copies slices of longer sequences."""
        return tensors if self.offsets is None else tuple(tensor.flatten(0, 1) for tensor in tensors)

    def unfold(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`[B S, H, D] -> [B, S, H, D]`, nothing copied."""
        return tensors if self.offsets is None else tuple(tensor.unflatten(0, (self.batch, -1)) for tensor in tensors)

    def fold_lse(self, lse: Tensor) -> Tensor:
        """`[B, H, S] -> [H, B S]`, contiguous, as kernels want it also where there is nothing to fold."""
        return lse.contiguous() if self.offsets is None else lse.transpose(0, 1).flatten(1).contiguous()

    def unfold_lse(self, lse: Tensor) -> Tensor:
        """`[H, B S] -> [B, H, S]`, a view."""
        return lse if self.offsets is None else lse.unflatten(1, (self.batch, -1)).transpose(0, 1)


@functools.lru_cache(maxsize=64)  # one copy to the device, not one a layer
def _offsets(borders: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    length = borders[-1]
    starts = [row * length + start for row in range(batch) for start in borders[:-1]]
    return torch.tensor([*starts, batch * length], dtype=torch.int32, device=device)
