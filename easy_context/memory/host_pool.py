"""The host tier: page-locked memory of exactly the bytes needed.

torch's own pinned allocator rounds to powers of two, up to twice the memory. Here a buffer is an anonymous mapping,
registered with CUDA (`cudaHostRegister`, CUDA Runtime API, "Memory Management"), page-locked once and used again by
every step. For CPU tensors it is ordinary memory.

Registering memory that nobody has touched makes it page by page on one core, at 2 GiB/s: minutes, for hundreds of GiB.
So threads touch it before, in pages of 2 MiB where the system has them (madvise(2), MADV_HUGEPAGE): four to nine times
as fast (benchmarks/results/h200x2_page_locking.md).
"""

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch
from torch import Tensor

from .compress import Codec
from .lanes import Lane
from .pool import Lease, Pool

GIB = 2**30
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")  # a system without them refuses to be asked for them
TOUCHING = 8  # threads of a process; more gain nothing
_locked: weakref.WeakKeyDictionary[mmap.mmap, weakref.finalize] = weakref.WeakKeyDictionary()


class HostMemory:
    """`size` bytes, page-locked where the device is a GPU, until the last tensor on them is gone. A forked child, of a
    data loader say, has no part in page-locked memory: shared, its pages would become copy-on-write under a running
    copy.

    Raises:
        MemoryError: the system does not give it.
    """

    def __init__(self, size: int, device: torch.device):
        self.size = size
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            view = memoryview(mapping)  # what the storage of `bytes` refers to: it goes when that goes
            self.bytes = torch.frombuffer(view, dtype=torch.uint8)
            if device.type == "cuda":
                mapping.madvise(mmap.MADV_DONTFORK)
                if HUGE_PAGES.exists():
                    mapping.madvise(mmap.MADV_HUGEPAGE)
                touch(self.bytes)
                page_lock(self.bytes)
        except (OSError, RuntimeError) as error:  # of mmap, of cudaHostRegister
            shortage = _shortage(size, psutil.virtual_memory().available)
            raise MemoryError(f"{shortage} ({type(error).__name__}: {error})") from error
        if device.type == "cuda":
            locked = torch.frombuffer(mapping, dtype=torch.uint8)
            _locked[mapping] = weakref.finalize(view, page_unlock, locked, device)
            _locked[mapping].atexit = False
            _mind_children()


@functools.cache
def _mind_children() -> None:
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def _leave_to_the_parent() -> None:
    """In a forked child something else may get the addresses of page-locked memory, which is not there: whatever the
    child's Python gives up, they must not be unmapped, not even as it ends."""
    for end in list(_locked.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(end.detach()))


def touch(memory: Tensor) -> None:
    """Has the system make every page."""
    with ThreadPoolExecutor(TOUCHING) as threads:
        list(threads.map(Tensor.zero_, memory[:: mmap.PAGESIZE].chunk(TOUCHING)))


def page_lock(memory: Tensor) -> None:
    portable = 1  # cudaHostRegisterPortable: page-locked for every device
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable))


def page_unlock(memory: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # no copy may be under way
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


class HostPool(Pool):
    """Host buffers, and the copies between them and the device.

    Args:
        limit: bytes that this process may hold here; None: whatever the machine says is available, whenever asked.
    """

    def __init__(self, device: torch.device, out: Lane, into: Lane, limit: int | None):
        super().__init__()
        self.device, self.out, self.into, self.limit = device, out, into, limit
        self._made = weakref.WeakSet()

    def require(self, size: int) -> None:
        """Asks for this process alone: ranks do not tell each other what they have locked, so what they need together
        may pass here and run out in `make`, with the same error, during the first step.

        Raises:
            MemoryError: the pool could not hold `size` bytes in all, what it holds already among them.
        """
        room = self._available() + self._held()
        if self.limit is None:  # ranks of one machine need as much again each, whoever has locked it first
            room = min(room, psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        if size > room:
            raise MemoryError(_shortage(size, room))

    def make(self, size: int) -> HostMemory:
        if size > self._available():
            self.idle.clear()
        available = self._available()
        if size > available:
            raise MemoryError(_shortage(size, available))
        memory = HostMemory(size, self.device)
        self._made.add(memory)
        return memory

    def write(self, lease: Lease, offset: int, rows: Tensor, codec: Codec) -> Callable[[], None]:
        """Start the copy of `rows` to the buffer's bytes from `offset` on; returns what waits for it.
        `rows` must live until somebody has waited."""
        with self.out.running():
            codec.pack(rows, lease.slot.bytes[offset : offset + codec.nbytes(rows)])
        return self.out.mark()

    def read(self, lease: Lease, offset: int, rows: Tensor, codec: Codec) -> Callable[[], None]:
        """Start the copy back into `rows`; returns what waits for it."""
        with self.into.running():
            codec.unpack(lease.slot.bytes[offset : offset + codec.nbytes(rows)], rows)
        return self.into.mark()

    def _held(self) -> int:
        return sum(memory.size for memory in self._made)

    def _available(self) -> int:
        return psutil.virtual_memory().available if self.limit is None else self.limit - self._held()


def _shortage(needed: int, available: int) -> str:
    return (
        f"host tier: {needed / GIB:.2f} GiB of host memory needed, {available / GIB:.2f} GiB available; shorten the "
        'sequence, keep less (keep="input"), move layers to tier="disk", use more GPUs, or, where the machine shows '
        "less memory than it may use, say how much this process may take (host_memory=...)"
    )
