"""What all ranks of a sequence-parallel group must agree on, checked by small collectives.

A fault that only data can show (ranks with different samples, positions that are no sequence, a mask with holes) may
be visible on one rank alone. If that rank raised by itself, the others would wait for it in the next exchange for
ever. Hence each check gathers a few numbers from all ranks first, and then every rank raises the same error.
"""

import torch
import torch.distributed as dist

from .blocks import Documents
from .layout import Layout
from .modes import Mode


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


def describe_run(decoder: torch.nn.Module, mode: Mode, layout: Layout, device_type: str) -> str:
    """What decides, besides the sequence, which messages of which sizes a forward and its backward exchange."""
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    sizes = [f"{name}={size}" for name in names if (size := getattr(decoder.config, name, None)) is not None]
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else decoder.dtype
    trained = sum(weight.requires_grad for weight in decoder.parameters()) if torch.is_grad_enabled() else 0
    split = f"{mode.name} with ring_degree={layout.ring}"
    return f"{split}, {type(decoder).__name__} of {', '.join(sizes)}, {dtype}, gradients of {trained} weights"


def gather_sequence(
    group: dist.ProcessGroup | None, layout: Layout, local: torch.Tensor, running: str, fault: str | None
) -> torch.Tensor:
    """The whole sequence `[..., S]`, on the device of `local`, from every rank's shard `[..., S_local]` of integers.

    `running` says what this rank is about to run, `fault` what it found wrong with its own inputs, or None. ValueError
    on every rank where any rank has a fault, where they run different things, where the shapes differ, or where the
    layout has no such shards."""
    header = torch.zeros(_SHAPE + 2 * _TEXT, dtype=torch.int64)
    header[: local.dim()] = torch.tensor(local.shape)
    for start, text in ((_SHAPE, fault or ""), (_SHAPE + _TEXT, running)):
        encoded = torch.tensor(list(text.encode()[:_TEXT]), dtype=torch.int64)
        header[start : start + len(encoded)] = encoded
    headers = torch.stack(gather(group, header))
    shapes, faults, runs = headers.split([_SHAPE, _TEXT, _TEXT], dim=1)
    for rank, message in enumerate(map(_decoded, faults)):
        if message:
            raise ValueError(f"rank {rank} of the sequence-parallel group: {message}")
    runs = list(map(_decoded, runs))
    for rank, other in enumerate(runs):
        if other != runs[0]:
            raise ValueError(
                f"rank {rank} of the sequence-parallel group runs {other}, rank 0 {runs[0]}: load the same model on "
                "all ranks, apply the same mode, and call it alike"
            )
    shapes = [tuple(shape[: local.dim()].tolist()) for shape in shapes]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"the ranks of the sequence-parallel group hold shards of different shapes {shapes}: "
            "shard every input with prepare_seq_parallel_inputs"
        )
    if (length := local.shape[-1] * layout.world) % layout.num_chunks:
        raise ValueError(
            f"the ranks of the sequence-parallel group hold {length} tokens, which do not divide into the "
            f"{layout.num_chunks} chunks of the mode: shard every input with prepare_seq_parallel_inputs, which pads"
        )
    whole = torch.cat(gather(group, local), -1)
    return whole[..., layout.inverse(whole.shape[-1], whole.device)]


_SHAPE, _TEXT = 4, 300  # entries of a header: a shape, and the bytes of each text


def _decoded(text: torch.Tensor) -> str:
    return bytes(text[text != 0].tolist()).decode(errors="replace")


def documents_of(positions: torch.Tensor, visible: torch.Tensor) -> Documents | None:
    """Borders of the documents of a batch, from `[B, S]` positions and a mask of real tokens; None where every row is
    one document.

    A position 0 starts a document. Above 0, equal neighbours (padding repeats the last position) and jumps ahead
    continue one. Masked tokens, left or right or between documents, are documents of their own: nothing real sees
    them. ValueError where positions fall back to anything but 0 (such a row is no sequence of documents, but shards in
    a wrong order), and for a hole inside a document."""
    borders = [_borders(row, seen.bool()) for row, seen in zip(positions, visible, strict=True)]
    return None if all(len(row) == 2 for row in borders) else tuple(borders)


def _borders(positions: torch.Tensor, visible: torch.Tensor) -> tuple[int, ...]:
    real = visible.nonzero().flatten()  # falls and holes are looked for among the real tokens
    before, after = positions[real[:-1]], positions[real[1:]]
    starts = (after == 0) | (after < before)
    for wrong, text in (
        (starts & (after != 0), "position_ids fall to {}, but only a fall to 0 starts a document"),
        (~starts & (real.diff() > 1), "attention_mask has a hole before position {}, inside a document"),
    ):
        if wrong.any():
            at = int(wrong.nonzero()[0]) + 1
            raise ValueError(
                text.format(int(positions[real[at]])) + f" (token {int(real[at])}). Shard inputs once, by "
                "prepare_seq_parallel_inputs, and pass what it returns"
            )
    changes = (visible[1:] != visible[:-1]).nonzero().flatten() + 1
    inner = sorted({*real[1:][starts].tolist(), *changes.tolist()})
    return (0, *inner, len(positions))
