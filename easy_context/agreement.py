"""What all ranks of a sequence-parallel group must agree on, checked by small collectives.

A fault that only data can show (ranks with different samples, positions that are no sequence, a mask with holes) may
be visible on one rank alone. If that rank raised by itself, the others would wait for it in the next exchange for
ever. Hence each check gathers a few numbers from all ranks first, and then every rank raises the same error.
"""

import torch
import torch.distributed as dist

from .blocks import Documents
from .layout import Layout


def gather(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors (equal shapes) of all ranks of the group, in rank order, on the device of `tensor`."""
    if group is None or dist.get_world_size(group) == 1:
        return [tensor]
    on_cpu = dist.get_backend(group) == "gloo"
    mine = (tensor.cpu() if on_cpu else tensor.cuda()).contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [part.to(tensor.device) for part in parts]


def check_same(group: dist.ProcessGroup | None, **tensors: torch.Tensor | None) -> None:
    """ValueError on every rank unless all ranks of the group hold the same values, by shape and checksum."""
    mine = torch.tensor([entry for tensor in tensors.values() for entry in _fingerprint(tensor)])
    rows = torch.stack(gather(group, mine)).view(-1, len(tensors), 4)
    for index, name in enumerate(tensors):
        if (rows[:, index] != rows[0, index]).any():
            different = [rank for rank in range(len(rows)) if (rows[rank, index] != rows[0, index]).any()]
            raise ValueError(
                f"{name} of ranks {different} of the sequence-parallel group differ from rank 0's: all ranks of a "
                "group need the same batch. Use the loader that prepare_dataloader returns."
            )


def _fingerprint(tensor: torch.Tensor | None) -> list[int]:
    if tensor is None:
        return [-1, -1, -1, -1]
    flat = tensor.reshape(-1).long()
    weights = torch.arange(1, flat.numel() + 1, device=flat.device)
    mixed = (flat + 0x9E3779B1) * (weights * 0x85EBCA77 + 1)  # int64 arithmetic wraps: position and value both count
    rows, columns = tensor.shape if tensor.dim() == 2 else (1, tensor.numel())
    return [rows, columns, *torch.stack([mixed.sum(), (mixed >> 17).sum()]).tolist()]


def whole_positions(group: dist.ProcessGroup | None, layout: Layout, local: torch.Tensor, fault: str | None):
    """Positions `[B, S]` of the whole sequence on the CPU, from every rank's `[B, S_local]`.

    `fault` is what this rank found wrong with its own inputs, or None. ValueError on every rank where any rank has a
    fault or the shapes differ."""
    header = torch.zeros(3 + _FAULT_BYTES, dtype=torch.int64)
    header[:3] = torch.tensor([*local.shape, fault is not None])
    text = (fault or "").encode()[:_FAULT_BYTES]
    header[3 : 3 + len(text)] = torch.tensor(list(text), dtype=torch.int64)
    headers = gather(group, header)
    for rank, other in enumerate(headers):
        if other[2]:
            message = bytes(other[3:].tolist()).rstrip(b"\0").decode(errors="replace")
            raise ValueError(f"rank {rank} of the sequence-parallel group: {message}")
    shapes = [tuple(other[:2].tolist()) for other in headers]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"the ranks of the sequence-parallel group hold shards of different shapes {shapes}: "
            "shard every input with prepare_seq_parallel_inputs"
        )
    return torch.cat(gather(group, local), 1).cpu()[:, layout.inverse(local.shape[1] * layout.world)]


_FAULT_BYTES = 200


def documents_of(positions: torch.Tensor) -> Documents | None:
    """Borders of packed documents in `[B, S]` positions; None where every row is one document.

    A position that falls back to 0 starts a document; equal neighbours and jumps ahead continue one (padding repeats
    the last position). ValueError for positions that fall back to anything but 0: such a row is not a sequence of
    documents, but shards in a wrong order, or positions made for something else."""
    falls = positions[:, 1:] < positions[:, :-1]
    starts = positions[:, 1:] == 0
    if (falls & ~starts).any():
        row, at = (falls & ~starts).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids fall from {positions[row, at].item()} to {positions[row, at + 1].item()} at token {at + 1} "
            f"of row {row}: only a fall to 0 starts a document. Shard inputs once, by prepare_seq_parallel_inputs, and "
            "pass its local_position_ids"
        )
    if not starts.any():
        return None
    length = positions.shape[1]
    return tuple((0, *(row.nonzero().flatten() + 1).tolist(), length) for row in starts)
