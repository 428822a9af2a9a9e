"""The process groups, built once: data x ring x ulysses.

Ranks are numbered with ulysses fastest, then ring, then data: the ranks of one all-to-all are neighbours (one node's
fast links), the ring spans what is left of the sequence-parallel group, and data-parallel groups are whole blocks of
ranks. The groups come from a torch `DeviceMesh`; without a process group every size is 1 and every group is None.

Whoever does not call `init_seq_parallel` gets the whole world as one sequence-parallel group.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SeqParallelMesh:
    """This rank's place. Groups are torch `ProcessGroup`s, or None without torch.distributed."""

    world_size: int = 1
    data_rank: int = 0
    data_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    ring_rank: int = 0
    ring_size: int = 1
    ulysses_rank: int = 0
    ulysses_size: int = 1
    sp_group: dist.ProcessGroup | None = None
    ring_group: dist.ProcessGroup | None = None
    ulysses_group: dist.ProcessGroup | None = None


_mesh: SeqParallelMesh | None = None
_world: dist.ProcessGroup | None = None  # that the mesh divides; after a restart of torch.distributed it is another
_ring_degree_chosen = False


def default_ring_degree(sp_size: int) -> int:
    """Ring degree of USP where none was asked for: the number of nodes the group spans; on one node, its smallest
    factor above 1 (2 for every even size)."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", sp_size))
    if per_node < sp_size and sp_size % per_node == 0:
        return sp_size // per_node
    return next((d for d in range(2, sp_size) if sp_size % d == 0), sp_size)


def split_degrees(sp_size: int, ring_degree: int | None) -> tuple[int, int]:
    """`(ring, ulysses)` of a group of `sp_size` ranks; ValueError where `ring_degree` does not divide it."""
    ring = default_ring_degree(sp_size) if ring_degree is None else ring_degree
    if ring < 1 or sp_size % ring:
        raise ValueError(
            f"ring_degree={ring} does not divide the {sp_size} ranks of a sequence-parallel group: "
            "choose a divisor (ring_degree x ulysses degree = seq_parallel_size)"
        )
    return ring, sp_size // ring


def init_seq_parallel(seq_parallel_size: int | None = None, ring_degree: int | None = None) -> SeqParallelMesh:
    """Build the process groups: `world / seq_parallel_size` data-parallel groups of `seq_parallel_size` ranks, each
    split into `ring_degree` x Ulysses.

    Args:
        seq_parallel_size: ranks that share one sequence; None is the whole world.
        ring_degree: ranks of a ring in `usp_attn`; None lets `default_ring_degree` choose.

    Returns the mesh. Calling again with the same sizes returns the same one.
    Raises ValueError, on every rank and before any communication, where the sizes do not divide the world or
    contradict an earlier call. Call it after `torch.distributed` is initialised (after creating the `Accelerator`).
    """
    global _mesh, _world, _ring_degree_chosen
    world = dist.get_world_size() if dist.is_initialized() else 1
    sp_size = world if seq_parallel_size is None else seq_parallel_size
    if sp_size < 1 or world % sp_size:
        raise ValueError(
            f"seq_parallel_size={sp_size} does not divide the {world} processes"
            + ("" if dist.is_initialized() else " (torch.distributed is not initialised)")
            + ": start a multiple of it, or choose a divisor"
        )
    ring, ulysses = split_degrees(sp_size, ring_degree)
    if _mesh is not None and _world is _current_world():
        settled_size = seq_parallel_size in (None, _mesh.sp_size)
        if settled_size and ring_degree in (None, _mesh.ring_size):
            return _mesh
        if not settled_size or _ring_degree_chosen:
            raise ValueError(
                f"the process groups exist already with seq_parallel_size={_mesh.sp_size}, ring_degree="
                f"{_mesh.ring_size}; asked for seq_parallel_size={seq_parallel_size}, ring_degree={ring_degree}. "
                "Call init_seq_parallel once, with both, before the other functions."
            )
    _ring_degree_chosen = ring_degree is not None
    _mesh, _world = _build(world, sp_size, ring, ulysses), _current_world()
    return _mesh


def _current_world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _build(world: int, sp_size: int, ring: int, ulysses: int) -> SeqParallelMesh:
    if not dist.is_initialized():
        return SeqParallelMesh()
    device_type = "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"
    data = world // sp_size
    names = ("data", "ring", "ulysses")
    grid = dist.device_mesh.init_device_mesh(device_type, (data, ring, ulysses), mesh_dim_names=names)
    rows = dist.device_mesh.init_device_mesh(device_type, (data, sp_size), mesh_dim_names=("data", "sequence"))
    return SeqParallelMesh(
        world_size=world,
        data_rank=rows.get_local_rank("data"),
        data_size=data,
        sp_rank=rows.get_local_rank("sequence"),
        sp_size=sp_size,
        ring_rank=grid.get_local_rank("ring"),
        ring_size=ring,
        ulysses_rank=grid.get_local_rank("ulysses"),
        ulysses_size=ulysses,
        sp_group=rows.get_group("sequence"),
        ring_group=grid.get_group("ring"),
        ulysses_group=grid.get_group("ulysses"),
    )


def current_mesh(ring_degree: int | None = None) -> SeqParallelMesh:
    """The mesh in force; builds the default one (the whole world is one group) where none was asked for.

    `ring_degree` is what a caller insists on: ValueError where it contradicts an earlier choice."""
    if _mesh is None or _world is not _current_world():
        return init_seq_parallel(None, ring_degree)
    if ring_degree is not None and ring_degree != _mesh.ring_size:
        return init_seq_parallel(_mesh.sp_size, ring_degree)
    return _mesh


def reset_mesh() -> None:
    """Forget the groups, to choose other sizes."""
    global _mesh, _world, _ring_degree_chosen
    _mesh, _world, _ring_degree_chosen = None, None, False
