"""What is computed, counted in FLOPs and in bytes that cross ranks; and what a perfect mode could reach.

FLOPs are those of the (query, key) pairs that the mask leaves: 4 * D * H a pair forward (2 S^2 D H for a causal
sequence of S tokens), 2.5 times that backward. The limit of a mode is its compute at the speed of the one-call kernel
plus whatever part of its messages no compute can hide, given how long a message takes on the link.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from easy_context.modes.dist_flash_attn import schedule
from easy_context.modes.ulysses_attn import deal_heads

# Measured over NCCL between two H200 of one host, each way: bytes of a message, bytes a second.
H200_NVLINK = {1 << 20: 10e9, 1 << 24: 184e9, 1 << 26: 264e9, 1 << 28: 301e9, 1 << 30: 359e9}


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


def link_time(gigabytes_per_second: float | None, device: torch.device) -> Callable[[float], float] | None:
    """Seconds of a message as a function of its bytes; None where nothing is known about the link."""
    if gigabytes_per_second is not None:
        return lambda size: size / gigabytes_per_second / 1e9
    if device.type != "cuda" or "H200" not in torch.cuda.get_device_name(device):
        return None
    sizes = np.array(list(H200_NVLINK), dtype=float)
    seconds = sizes / np.array(list(H200_NVLINK.values()))

    def interpolated(size: float) -> float:
        if size > sizes[-1]:
            return size / H200_NVLINK[1 << 30]
        return float(np.exp(np.interp(np.log(max(size, 1)), np.log(sizes), np.log(seconds)))) if size else 0.0

    return interpolated


def limit(mode: str, work: Workload, world: int, ring: int, forward: float, link) -> tuple[float, float]:
    """Least seconds of `mode` for forward, and forward + backward, where `forward` seconds of compute a rank are at
    the one-call kernel's speed and the backward computes 2.5 times as long."""

    def seconds(backward: bool) -> float:
        if mode == "dist_flash_attn":
            return _scheduled(work, world, forward, link, backward)
        degree = {"zigzag_ring_attn": world, "ulysses_attn": 1, "usp_attn": ring}[mode]
        return _heads(work, world, world // degree, link) + _ring(work, world, degree, forward, link, backward)

    return seconds(False), seconds(False) + seconds(True)


def _compute(forward: float, backward: bool) -> float:
    return forward * (2.5 if backward else 1.0)


def bytes_of_ring(work: Workload, world: int, backward: bool) -> tuple[float, float]:
    """Of a step: keys and values, and their gradients."""
    elements = 2 * work.seq_length * work.kv_heads * work.head_size / world  # in USP: more tokens, as many fewer heads
    return elements * work.dtype.itemsize, elements * max(4, work.dtype.itemsize) * backward


def _ring(work: Workload, world: int, ring: int, forward: float, link, backward: bool) -> float:
    step = _compute(forward, backward) / ring
    pair, grads = bytes_of_ring(work, world, backward)
    if ring == 1:
        return step
    if not backward:
        return (ring - 1) * max(step, link(pair)) + step
    return max(step, link(pair)) + (ring - 2) * max(step, link(pair + grads)) + max(step, link(grads)) + link(grads)


def _scheduled(work: Workload, world: int, forward: float, link, backward: bool) -> float:
    """While a step computes, what the next one needs and what the previous one produced are on their way."""
    fetched, given = bytes_of_schedule(work, world, backward)
    computed = _compute(forward, backward)
    total = 0.0
    for step in range(len(fetched)):
        share = 2 if 0 < step < world / 2 else 1  # the own block is half masked, the last one shared
        travelling = (fetched[step + 1] if step + 1 < len(fetched) else 0) + (given[step - 1] if step else 0)
        total += max(computed * share / world, link(travelling))
    return total + link(given[-1])


def bytes_of_schedule(work: Workload, world: int, backward: bool) -> tuple[list[float], list[float]]:
    """Per step, the most that a rank sends for others to compute, and the most that a rank sends back."""
    item, wide = work.dtype.itemsize, max(4, work.dtype.itemsize)
    tokens = work.seq_length / world
    q, kv, lse = tokens * work.heads * work.head_size, 2 * tokens * work.kv_heads * work.head_size, tokens * work.heads
    fetched, given = [], []
    for step in schedule(world):
        sent, back = [0.0], [0.0]
        for task in step:
            if task.worker == task.supplier:
                continue
            part = 1 if task.half is None else 0.5
            if task.query == task.worker:
                sent.append(kv * item)
                back.append(kv * wide * backward)
            else:
                sent.append(part * (q * item * (3 if backward else 1) + lse * wide * backward))
                back.append(part * (q * wide if backward else q * item + lse * wide))
        fetched.append(max(sent))
        given.append(max(back))
    return fetched, given


def bytes_of_heads(work: Workload, world: int, ranks: int) -> tuple[float, float]:
    """What a rank (the first) sends in the all-to-all of q, k and v, and in that of the output."""
    element = work.seq_length / world * work.head_size * work.dtype.itemsize
    (((first, last), _), *others) = deal_heads(work.heads, work.kv_heads, ranks)
    q = sum(end - start for (start, end), _ in others)
    kv = sum(end - start for _, (start, end) in others)
    return element * (q + 2 * kv), element * (last - first) * (ranks - 1)


def _heads(work: Workload, world: int, ranks: int, link) -> float:
    """Nothing hides these; the backward sends the same."""
    return sum(map(link, bytes_of_heads(work, world, ranks)))
