"""Perplexity over tokens: exp of the sum of negative log likelihoods divided by the number of scored tokens.

A document longer than the window is read in windows that advance by a stride. Every token is scored once,
in the first window that holds it, so the last, partial window counts by its tokens (Press et al. 2021,
https://arxiv.org/abs/2108.12409, appendix B; https://huggingface.co/docs/transformers/perplexity).

Windows are sharded over the ranks of a sequence-parallel group and data-parallel groups take turns; besides
what attention moves, one sum of two numbers a segment crosses ranks. Logits never exist whole.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from accelerate.utils.memory import clear_device_cache

from ..inputs import prepare_seq_parallel_inputs
from ..loss import token_nll
from ..memory.tiled_loss import IGNORE_INDEX
from ..mesh import current_mesh
from .runtime import sum_over_ranks, turns


@dataclass(frozen=True)
class Segment:
    """The tokens at places `start` up to `stop` (None: the end) of their windows; `nll`: sum, in nats."""

    start: int
    stop: int | None
    tokens: int
    nll: float

    @property
    def perplexity(self) -> float | None:
        """None where no token was scored."""
        return math.exp(self.nll / self.tokens) if self.tokens else None


@dataclass(frozen=True)
class Window:
    """Tokens `begin` up to `end` of a document, of which those from `scored` on are scored here."""

    document: int
    begin: int
    end: int
    scored: int


def windows(length: int, size: int, stride: int, document: int = 0) -> Iterator[Window]:
    """Windows of at most `size` tokens over a document of `length`, `stride` (at most `size`) apart; each
    token is scored in exactly one."""
    scored = 0
    for begin in range(0, length, stride):
        end = min(begin + size, length)
        yield Window(document, begin, end, scored)
        scored = end
        if end == length:
            return


@torch.no_grad()
def perplexity(
    model,
    documents: Sequence[Sequence[int]],
    size: int,
    *,
    seq_algo: str,
    accelerator,
    stride: int = 256,
    truncate: bool = False,
    lead: Sequence[int] = (),
    bounds: Sequence[int] = (),
    aggressive_memory: bool = False,
    progress: Callable[[Sequence], Iterable] = iter,
) -> tuple[Segment, list[Segment]]:
    """The whole and its segments, the same on every rank.

    Args:
        model: a causal language model with the seam in `seq_algo`, as `load_model` returns it.
        documents: token ids, without special tokens.
        size: tokens of a window, those of `lead` included.
        stride: tokens by which windows advance, at most the window; without `lead` one less, so that the
            first token of a window has been scored in the one before.
        truncate: read only the first window of each document.
        lead: special tokens put before every window (a tokenizer's BOS), never scored. Without them the first
            token of a document is not scored either: nothing predicts it.
        bounds: `[0, 8192, 12288]` asks for the segments [0, 8192) and [8192, 12288) of places in a window.
        aggressive_memory: give cached device memory back after every window.
        progress: wraps the windows, to show a bar.
    """
    room = size - len(lead)
    stride = min(stride, room if lead else room - 1)
    if stride < 1:
        raise ValueError(f"windows of {size} tokens at a stride of {stride} score none: take longer ones")
    plan = [
        window
        for number, ids in enumerate(documents)
        for window in windows(min(len(ids), room) if truncate else len(ids), room, stride, number)
    ]
    cuts = torch.tensor(bounds or [0], device=accelerator.device)
    sums = torch.zeros(2, len(cuts) + 1, dtype=torch.float64, device=accelerator.device)
    mesh = current_mesh()
    for _, window, counts in progress(turns(plan, mesh.data_rank, mesh.data_size)):
        ids = torch.tensor([[*lead, *documents[window.document][window.begin : window.end]]])
        targets = torch.full_like(ids, IGNORE_INDEX)
        if counts:
            first = max(len(lead) + window.scored - window.begin, 1)
            targets[:, first - 1 : -1] = ids[:, first:]
        rank, world = accelerator.process_index, accelerator.num_processes
        shard = prepare_seq_parallel_inputs(seq_algo, ids, None, targets, rank, world, accelerator.device)
        places, targets = shard["local_position_ids"], shard["local_target_ids"]
        nll = token_nll(model, shard["local_input_ids"], places, targets)
        segment = torch.bucketize(places + 1, cuts, right=True).flatten()  # places of targets: one further
        sums[0].index_add_(0, segment, nll.flatten().double())
        sums[1].index_add_(0, segment, (targets != IGNORE_INDEX).flatten().double())
        if aggressive_memory:
            clear_device_cache(garbage_collection=True)
    nll, tokens = sum_over_ranks(sums).tolist()
    whole = Segment(0, None, int(sum(tokens)), sum(nll))
    spans = enumerate(zip(bounds, bounds[1:], strict=False), start=1)
    return whole, [Segment(*span, int(tokens[i]), nll[i]) for i, span in spans]
