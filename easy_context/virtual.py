"""Many ranks in one process: each rank is a thread, messages are copies.

With these groups any mode runs in any world on one device, no process group needed: exactness on one GPU, and what a
rank's work costs apart from the wire. Everything a rank sends is copied at the moment of sending, as a network would.
Whether threads run side by side changes nothing: every message has one sender, one receiver and its place in line.
`run_ranks` makes a rank's backward run in the rank's own thread, where waiting for another rank is allowed.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch

from .comm import Message
from .layout import Layout


class VirtualWorld:
    """The mailboxes of one run: a box holds the messages of one sender to one receiver in one group, in their order."""

    def __init__(self):
        self._boxes = defaultdict(deque)
        self._turn = threading.Condition()
        self._failed = False

    def post(self, box, tensor: torch.Tensor) -> None:
        with self._turn:
            self._boxes[box].append(tensor.clone())
            self._turn.notify_all()

    def collect(self, box) -> torch.Tensor:
        with self._turn:
            while not self._boxes[box]:
                if self._failed:
                    raise RuntimeError("another virtual rank failed")
                self._turn.wait()
            return self._boxes[box].popleft()

    def fail(self) -> None:
        with self._turn:
            self._failed = True
            self._turn.notify_all()


class _Receives:
    def __init__(self, world: VirtualWorld, receives):
        self.world, self.receives = world, receives

    def wait(self) -> None:
        for buffer, box in self.receives:
            buffer.copy_(self.world.collect(box))
        self.receives = []


class VirtualComm:
    """A `Comm` whose `members` are global ranks that run as threads."""

    def __init__(self, world: VirtualWorld, members: Sequence[int], global_rank: int):
        self.world, self.members = world, tuple(members)
        self.rank, self.size = self.members.index(global_rank), len(self.members)

    def _box(self, source: int, target: int):
        return self.members, source, target

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Receives:
        for tensor, peer in sends:
            assert tensor.is_contiguous()
            self.world.post(self._box(self.rank, peer), tensor)
        return _Receives(self.world, [(buffer, self._box(peer, self.rank)) for buffer, peer in receives])

    def all_to_all(self, send: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]) -> torch.Tensor:
        received, peers = send.new_empty(sum(receive_sizes)), range(self.size)
        sends, receives = send.split(send_sizes), received.split(receive_sizes)
        self.exchange(list(zip(sends, peers, strict=True)), list(zip(receives, peers, strict=True))).wait()
        return received


def run_ranks(layout: Layout, work: Callable) -> list:
    """`work(rank, groups)` for every rank of `layout`, each in a thread; `groups` are the keyword arguments
    `sequence`, `ring` and `ulysses` of `AttentionContext`. Returns the results by rank; a failure is raised here."""
    world, results, errors = VirtualWorld(), [None] * layout.world, []

    def body(rank: int) -> None:
        ring_rank, ulysses_rank = divmod(rank, layout.ulysses)
        groups = {
            "sequence": VirtualComm(world, range(layout.world), rank),
            "ring": VirtualComm(world, range(ulysses_rank, layout.world, layout.ulysses), rank),
            "ulysses": VirtualComm(world, range(ring_rank * layout.ulysses, (ring_rank + 1) * layout.ulysses), rank),
        }
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = work(rank, groups)
        except BaseException as error:  # re-raised below, in the caller's thread
            errors.append(error)
            world.fail()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(layout.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
