"""Every byte of attention that crosses ranks.

A `Comm` is one group seen from one rank: point-to-point exchanges (all of a step in one batch, so that no order of
sends and receives can deadlock) and an all-to-all of flat buffers. Both move whole contiguous tensors; nothing here
knows about attention. Waiting orders the current CUDA stream behind the transfer and never blocks the host there.

`ProcessGroupComm` runs over torch.distributed; tests and benchmarks bring a comm of their own in which the ranks are
threads of one process (`easy_context.virtual`).
"""

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

Message = tuple[torch.Tensor, int]  # (contiguous tensor, peer rank within the group)


class Pending(Protocol):
    """Transfers in flight."""

    def wait(self) -> None:
        """Order everything that follows behind the transfers."""


class Comm(Protocol):
    """One group, seen from one of its ranks."""

    rank: int
    size: int

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start all these transfers. Tensors are contiguous and stay untouched until `wait` returns. Every rank of
        the group calls `exchange` equally often in the same order; empty lists are fine."""
        ...

    def all_to_all(self, send: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]) -> torch.Tensor:
        """Send `send_sizes[i]` elements of the flat `send` to rank i, one rank's after the other's. Returns, flat and
        in the same order, `receive_sizes[i]` elements from rank i."""
        ...


class _Works:
    def __init__(self, works, tensors):
        self.works, self.tensors = works, tensors

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = self.tensors = ()


_connected: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


class ProcessGroupComm:
    """A `Comm` over a torch.distributed process group; `group=None` is a group of one."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Works:
        self._connect()
        ops = [self._op(dist.isend, *message) for message in sends if message[0].numel()]
        ops += [self._op(dist.irecv, *message) for message in receives if message[0].numel()]
        works = dist.batch_isend_irecv(ops) if ops else []
        return _Works(works, [op.tensor for op in ops])

    def _connect(self) -> None:
        """NCCL connects a group in its first call, for which it waits for all ranks of the group; of an exchange some
        have no part, where documents or windows leave pairs of ranks nothing to send
        (https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.batch_isend_irecv)."""
        if self.size > 1 and self.group not in _connected:
            nccl = dist.get_backend(self.group) == "nccl"
            dist.barrier(self.group, device_ids=[torch.cuda.current_device()] if nccl else None)
            _connected.add(self.group)

    def _op(self, function, tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(function, tensor, group=self.group, group_peer=peer)

    def all_to_all(self, send: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]) -> torch.Tensor:
        received = send.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=self.group)
        return received


def pass_on(comm: Comm, tensor: torch.Tensor, received: torch.Tensor) -> Pending:
    """Send `tensor` to the next rank of the ring and fill `received`, of the same shape, from the previous one. Both
    belong to the transfer until `wait`."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return comm.exchange([(tensor, after)], [(received, before)])
