"""What is computed, counted in FLOPs and in bytes that cross ranks; and what a perfect mode could reach.

FLOPs are those of the (query, key) pairs that the mask leaves: 4 * D * H a pair forward (2 S^2 D H for a causal
sequence of S tokens), 2.5 times that backward. The limit of a mode is its compute at the speed of the one-call kernel
plus whatever part of its messages no compute can hide, given how long a message takes on the link.
"""

from dataclasses import dataclass

import numpy as np
import torch

from easy_context.planner import HARDWARE
from easy_context.planner.exchange import Link, Shard, exposed


@dataclass(frozen=True)
class Workload:
    """One attention layer over one whole sequence, batch 1. `mask` is causal, documents or window."""

    seq_length: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    mask: str = "causal"

    @property
    def window(self) -> int | None:
        return self.seq_length // 8 if self.mask == "window" else None

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Borders of eight documents of random lengths, mean S/8, the same on every machine."""
        if self.mask != "documents":
            return None
        inner = np.random.default_rng(0).choice(np.arange(1, self.seq_length // 64), size=7, replace=False) * 64
        return (0, *sorted(int(border) for border in inner), self.seq_length)

    @property
    def flops(self) -> float:
        """Of the forward of the whole sequence."""
        borders = self.documents or (0, self.seq_length)
        pairs = sum((end - start) ** 2 / 2 for start, end in zip(borders, borders[1:], strict=False))
        if self.window is not None:
            pairs = self.window * self.seq_length - self.window**2 / 2
        return 4 * pairs * self.heads * self.head_size


def link_time(gigabytes_per_second: float | None, device: torch.device) -> Link | None:
    """Seconds of a message; None where nothing is known about the link."""
    if gigabytes_per_second is not None:
        return lambda size, _: size / gigabytes_per_second / 1e9
    if device.type != "cuda" or "H200" not in torch.cuda.get_device_name(device):
        return None
    return lambda size, _: HARDWARE["H200"].message(size)


def limit(mode: str, work: Workload, world: int, ring: int, forward: float, link: Link) -> tuple[float, float]:
    """Least seconds of `mode` for forward, and forward + backward, where `forward` seconds of compute a rank are at
    the one-call kernel's speed and the backward computes 2.5 times as long."""
    shard = Shard(work.seq_length / world, work.heads, work.kv_heads, work.head_size, work.dtype.itemsize)
    ring = {"ulysses_attn": 1, "usp_attn": ring}.get(mode, world)
    least = forward + exposed(mode, shard, world, ring, forward, link, backward=False)
    return least, least + 2.5 * forward + exposed(mode, shard, world, ring, 2.5 * forward, link, backward=True)
