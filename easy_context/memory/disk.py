"""The disk tier: files that hold what neither the GPU nor its host has room for, written and read by two threads.

A chunk of rows goes device -> page-locked staging memory -> file, and back the same way; each thread owns one staging
buffer of a chunk's size, and while one waits for the device the other writes. A disk of 1 GB/s takes 16 s for what a
layer of an 8B model keeps of a million tokens, about as long as its forward; so here the host does wait: for writes in
`settle`, lest rows pile up on the device, and for reads in `tensor`, chunk by chunk.

Files have no names: a crash leaves nothing. They are used again by every step, as host buffers are.
"""

import errno
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .compress import Codec
from .host_pool import GIB, HostMemory
from .lanes import Lane
from .pool import Lease, Pool

THREADS = 2


class File:
    """A nameless file of at most `size` bytes."""

    def __init__(self, size: int, directory: str):
        self.size = size
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self.descriptor = file.fileno()
        weakref.finalize(self, file.close)

    def held(self) -> int:
        """Bytes of the disk in use."""
        return os.fstat(self.descriptor).st_blocks * 512

    def write(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self.descriptor, data, offset)
            data, offset = data[count:], offset + count

    def read(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.preadv(self.descriptor, [data], offset)
            if count == 0:
                raise OSError(errno.EIO, "a file is shorter than what was written to it")
            data, offset = data[count:], offset + count


class DiskPool(Pool):
    """Files in one directory, and the copies between them and the device.

    Raises:
        OSError: the directory can neither be used nor made.
    """

    def __init__(self, device: torch.device, out: Lane, into: Lane, directory: str):
        super().__init__()
        os.makedirs(directory, exist_ok=True)
        self.device, self.out, self.into, self.directory = device, out, into, directory
        place = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._threads = ThreadPoolExecutor(THREADS, "disk tier", *place)
        self._own = threading.local()
        self._made = weakref.WeakSet()

    def require(self, size: int) -> None:
        """Raises:
        OSError: the disk has no room for `size` bytes in all, what the pool's files hold already among them.
        """
        room = shutil.disk_usage(self.directory).free + sum(file.held() for file in self._made)
        if size > room:
            text = f"{size / GIB:.2f} GiB needed, {room / GIB:.2f} GiB free"
            raise self._explained(OSError(errno.ENOSPC, text))

    def make(self, size: int) -> File:
        file = File(size, self.directory)
        self._made.add(file)
        return file

    def write(self, lease: Lease, offset: int, rows: Tensor, codec: Codec) -> Callable[[], None]:
        """Start the way of `rows` to the file's bytes from `offset` on; returns what waits for it, and raises OSError
        if it failed. The rows stay alive until they are written."""
        return self._submit(self._write, lease, offset, rows, codec)

    def read(self, lease: Lease, offset: int, rows: Tensor, codec: Codec) -> Callable[[], None]:
        """Start the way back into `rows`; returns what waits for it, and raises OSError if it failed."""
        return self._submit(self._read, lease, offset, rows, codec)

    def _submit(self, run: Callable[..., None], *arguments) -> Callable[[], None]:
        arguments = [arguments]  # popped: a thread holds its work item, hence the rows, until after the result is out
        return self._threads.submit(lambda: run(*arguments.pop())).result

    def _write(self, lease: Lease, offset: int, rows: Tensor, codec: Codec) -> None:
        staging = self._staging(codec.nbytes(rows))
        with self.out.running():
            codec.pack(rows, staging)
        self.out.finish()
        try:
            lease.slot.write(memoryview(staging.numpy()), offset)
        except OSError as error:
            raise self._explained(error) from error

    def _read(self, lease: Lease, offset: int, rows: Tensor, codec: Codec) -> None:
        staging = self._staging(codec.nbytes(rows))
        try:
            lease.slot.read(memoryview(staging.numpy()), offset)
        except OSError as error:
            raise self._explained(error) from error
        with self.into.running():
            codec.unpack(staging, rows)
        self.into.finish()

    def _staging(self, size: int) -> Tensor:
        """The calling thread's staging memory."""
        if getattr(self._own, "memory", None) is None or self._own.memory.size < size:
            self._own.memory = None  # the smaller one goes first
            self._own.memory = HostMemory(size, self.device)
        return self._own.memory.bytes[:size]

    def _explained(self, error: OSError) -> OSError:
        text = (
            f"disk tier: {error.strerror}; free space in this directory or name another one (disk=...), keep less "
            '(keep="input"), or use tier="host"'
        )
        return OSError(error.errno, text, self.directory)
