"""From a whole batch to a rank's shard, and back.

Every rank of a sequence-parallel group starts from the same `[B, S]` batch, whose targets are already the next tokens
of the whole sequence: nothing is shifted after sharding. The only bytes moved are a checksum of the batch (to refuse
ranks that drew different samples) and, in `unshard_sequence`, the gathered tensor.
"""

import torch
import torch.distributed as dist

from .agreement import check_same, gather
from .layout import Layout
from .memory.tiled_loss import IGNORE_INDEX
from .mesh import SeqParallelMesh, current_mesh
from .modes import get_mode

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def prepare_seq_parallel_inputs(
    seq_algo: str,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    rank: int,
    world_size: int,
    device: torch.device | str,
    *,
    attention_mask: torch.Tensor | None = None,
    ring_degree: int | None = None,
) -> dict[str, torch.Tensor | None]:
    """This rank's shard of a batch.

    Args:
        seq_algo: name of the mode.
        input_ids: `[B, S]` token ids of the whole sequence, the same on all ranks of a sequence-parallel group. They,
            positions and targets are integers of any width.
        position_ids: `[B, S]` or `[1, S]`; None means 0..S-1. A fall to 0 starts a packed document.
        target_ids: `[B, S]` next tokens (already shifted by one), -100 where there is none; None stays None.
        rank, world_size: the global ones (`accelerator.process_index`, `accelerator.num_processes`). The process
            groups map them to the sequence-parallel group; without a process group the function is pure.
        device: where the shards go.
        attention_mask: `[B, S]`, 0 for padding (left or right), of a padded batch.
        ring_degree: degree of the ring in `usp_attn`, where `init_seq_parallel` did not say it already.

    Returns `local_input_ids`, `local_position_ids`, `local_target_ids` (None without targets), each `[B, S_local]`
    int64 on `device`. A length that does not divide is padded at the end: the padding repeats the last token and
    position and has target -100. With an attention_mask also `local_attention_mask`, to be passed to the model.

    Raises ValueError, on every rank of the group, for an unknown mode, an empty sequence, shapes that do not fit, or
    ranks that hold different batches.
    """
    mode = get_mode(seq_algo)
    if dist.is_initialized():
        mesh = current_mesh(ring_degree)
        if (rank, world_size) != (dist.get_rank(), mesh.world_size):
            raise ValueError(
                f"rank {rank} of {world_size} was given, but this is process {dist.get_rank()} of {mesh.world_size}: "
                "pass accelerator.process_index and accelerator.num_processes"
            )
        layout, sp_rank = mode.layout(mesh.sp_size, mesh.ring_size), mesh.sp_rank
    else:
        mesh, layout, sp_rank = None, mode.layout(world_size, ring_degree), rank
    given = {"input_ids": input_ids, "position_ids": position_ids, "target_ids": target_ids}
    given["attention_mask"] = attention_mask
    _check_kinds(**given)
    if mesh is not None and layout.world > 1:
        check_same(mesh.sp_group, **given)
    _check_shapes(**given)

    batch, length = input_ids.shape
    if position_ids is None:
        position_ids = torch.arange(length, device=input_ids.device)[None]
    position_ids = position_ids.expand(batch, -1)
    own = layout.indices(layout.padded_length(length), sp_rank if layout.world > 1 else 0).to(input_ids.device)
    within, padding = own.clamp(max=length - 1), own >= length
    local = {
        "local_input_ids": input_ids[:, within].to(device, torch.int64),
        "local_position_ids": position_ids[:, within].to(device, torch.int64),
        "local_target_ids": None,
    }
    if target_ids is not None:
        local["local_target_ids"] = target_ids[:, within].long().masked_fill(padding, IGNORE_INDEX).to(device)
    if attention_mask is not None:
        local["local_attention_mask"] = attention_mask[:, within].masked_fill(padding, 0).to(device)
    return local


def _check_kinds(input_ids, attention_mask, **others) -> None:
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        raise ValueError(f"attention_mask must be a tensor, not {type(attention_mask).__name__}")
    others = {name: ids for name, ids in others.items() if ids is not None}
    for name, ids in {"input_ids": input_ids, **others}.items():
        if not isinstance(ids, torch.Tensor) or ids.dtype not in INTEGERS:
            kind = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ValueError(f"{name} must be a tensor of integers, not {kind}")


def _check_shapes(input_ids, position_ids, **others) -> None:
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"input_ids must be a batch of sequences [B, S] of at least one token, not {shape}")
    if position_ids is not None and tuple(position_ids.shape) not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids {tuple(position_ids.shape)} do not fit input_ids {shape}")
    for name, tensor in others.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} do not fit input_ids {shape}")


def unshard_sequence(seq_algo: str, local: torch.Tensor, dim: int = 1, length: int | None = None) -> torch.Tensor:
    """The exact inverse of the sharding, gathered on every rank of the group.

    Args:
        seq_algo: name of the mode that sharded.
        local: this rank's shard, any shape and dtype, with `S_local` entries along `dim`.
        length: entries of the whole sequence to keep; None keeps the padding too.

    Returns the whole tensor in the order of the sequence. Differentiable: a rank's gradient is its own slice of the
    whole tensor's gradient (every rank is taken to compute the same loss from the whole tensor).
    Raises ValueError for an unknown mode or a `length` beyond what the shards hold.
    """
    mesh = current_mesh()
    layout = get_mode(seq_algo).layout(mesh.sp_size, mesh.ring_size)
    available = local.shape[dim] * layout.world
    if length is not None and not 0 <= length <= available:
        raise ValueError(f"length={length}, but the shards hold {available} entries along dim {dim}")
    whole = local if layout.world == 1 else _Unshard.apply(local, dim, layout, mesh)
    return whole if length is None else whole.narrow(dim, 0, length)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: torch.Tensor, dim: int, layout: Layout, mesh: SeqParallelMesh):
        ctx.dim, ctx.own = dim, layout.indices(local.shape[dim] * layout.world, mesh.sp_rank).to(local.device)
        order = layout.inverse(local.shape[dim] * layout.world, local.device)
        return torch.cat(gather(mesh.sp_group, local), dim).index_select(dim, order)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.index_select(ctx.dim, ctx.own), None, None, None
