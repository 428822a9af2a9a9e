"""Slots that are used again: host buffers and files that steps take and give back, in one pool for each kind.

Making a slot is dear (page-locking runs at some GiB/s), so a step takes what the step before gave back. Sizes
are exact. A slot serves a smaller request, down to a quarter of its size, since batches may vary in length; otherwise
a request makes a new slot in place of the idle one nearest in size, so that a pool never holds more slots than were in
use at once, nor sizes that nobody asks for any more.
"""

LARGEST_FIT = 4  # times the bytes asked for


class Lease:
    """A slot in use. The slot is idle again when the last reference to its lease goes, be it held by the tensor that
    it was taken for or by a copy that is still under way; a failed step gives back like any other."""

    def __init__(self, slot, idle: list):
        self.slot, self._idle = slot, idle

    def __del__(self):
        self._idle.append(self.slot)  # atomic: leases end on any thread


class Pool:
    """Slots, each with its `size` in bytes. Kinds of pools say how one is made."""

    def __init__(self):
        self.idle = []

    def make(self, size: int):
        raise NotImplementedError

    def take(self, size: int) -> Lease:
        """The smallest idle slot that fits, or a new one. On one thread at a time."""
        fitting = [slot for slot in self.idle if size <= slot.size <= LARGEST_FIT * size]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.size)
            self.idle.remove(slot)
            return Lease(slot, self.idle)
        if self.idle:
            self.idle.remove(min(self.idle, key=lambda slot: max(slot.size / size, size / slot.size)))
        return Lease(self.make(size), self.idle)
