"""Who holds which tokens.

A sequence-parallel group of `ring * ulysses` ranks holds one sequence. Everything about its distribution (shards,
positions, labels, padding, the inverse, which attention blocks exist) derives from one function, `Layout.chunks`: the
sequence is cut into equal chunks, and every rank holds some of them, in ascending order.

* contiguous: as many chunks as ranks, rank r holds chunk r.
* zigzag: `2 * ring` chunks, ring rank r holds chunks r and `2 * ring - 1 - r`, so that every rank has the same number
  of visible (query, key) pairs under a causal mask (zigzag ring attention, Zhu 2024; striped attention,
  https://arxiv.org/abs/2311.09431, for the idea).
* Ulysses inside a ring (USP, https://arxiv.org/abs/2405.07719): the shard of ring rank r is cut once more into
  `ulysses` contiguous pieces. Ranks are numbered ring-major: rank = ring_rank * ulysses + ulysses_rank.

Lengths that do not divide are padded at the end (`padded_length`), which changes nothing under a causal mask.
"""

from dataclasses import dataclass

import torch

Span = tuple[int, int]  # [start, end) in positions of the whole, padded sequence


@dataclass(frozen=True)
class Layout:
    """The distribution of one sequence over `ring * ulysses` ranks."""

    ring: int = 1
    ulysses: int = 1
    zigzag: bool = False

    @property
    def world(self) -> int:
        return self.ring * self.ulysses

    @property
    def num_chunks(self) -> int:
        return self.world * (2 if self._mirrored else 1)

    @property
    def _mirrored(self) -> bool:
        """Whether ranks hold chunks of both ends; in a ring of one these would be neighbours."""
        return self.zigzag and self.ring > 1

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks that `rank` (0..world-1 of the group) holds, ascending."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not one of the {self.world} ranks of this layout")
        if not self._mirrored:
            return (rank,)
        ring_rank, ulysses_rank = divmod(rank, self.ulysses)
        mirror = 2 * self.ring - 1 - ring_rank
        shard = [c * self.ulysses + i for c in (ring_rank, mirror) for i in range(self.ulysses)]
        return tuple(shard[2 * ulysses_rank : 2 * ulysses_rank + 2])

    def padded_length(self, seq_len: int) -> int:
        """The smallest length >= `seq_len` (tokens) that every rank holds an equal part of."""
        return -(-seq_len // self.num_chunks) * self.num_chunks

    def spans(self, seq_len: int, rank: int) -> list[Span]:
        """What `rank` holds of a padded sequence, as [start, end) ranges, neighbours merged, ascending."""
        assert seq_len % self.num_chunks == 0, (seq_len, self)
        size = seq_len // self.num_chunks
        spans: list[Span] = []
        for chunk in self.chunks(rank):
            start, end = chunk * size, (chunk + 1) * size
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, end))
        return spans

    def ring_spans(self, seq_len: int, ring_rank: int) -> list[Span]:
        """What the Ulysses ranks of one ring position hold together: the shard that travels the ring."""
        return Layout(self.ring, 1, self.zigzag).spans(seq_len, ring_rank)

    def indices(self, seq_len: int, rank: int) -> torch.Tensor:
        """Positions of `rank`'s tokens in the padded sequence: LongTensor `[seq_len / world]`, in local order."""
        return torch.cat([torch.arange(start, end) for start, end in self.spans(seq_len, rank)])

    def inverse(self, seq_len: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """For shards concatenated in rank order, where each position of the sequence is: LongTensor `[seq_len]`."""
        assert seq_len % self.num_chunks == 0, (seq_len, self)
        size = seq_len // self.num_chunks
        held = [chunk for rank in range(self.world) for chunk in self.chunks(rank)]
        starts = torch.tensor([held.index(chunk) * size for chunk in range(self.num_chunks)], device=device)
        return (starts[:, None] + torch.arange(size, device=device)).flatten()
