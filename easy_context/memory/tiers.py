"""What a layer keeps for its backward, and where it waits: on the GPU, in host memory, or on disk.

    compute   forward of layer i ..........  forward of i+1 ...  ||  backward of i ............  backward of i-1 ....
    out       kept by i, from the device ..  kept by i+1 ......  ||
    into                                                         ||  kept by i-1, to the device  kept by i-2 ........

Kept rows leave and return a chunk of rows at a time, first rows first; they cross PCIe once each way. Events order the
streams and the host does not wait for the host tier:

- `out` waits for compute before it reads rows, and compute waits for `out` in `settle`, at the layer's end, before the
  memory of the rows can be used again.
- Returning rows live in memory of the compute stream's pool: `into` waits for compute first, since that memory may
  still be in use there, and compute waits for the chunks that it is about to read.
- A kept tensor that is dropped in the middle of a copy, as a failed step does, protects the memory until it is done.

Files are written and read by threads (`disk.py`); for them `settle` and `tensor` are where the host waits.
"""

import weakref
from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from .compress import Codec, choose_codec
from .disk import DiskPool
from .host_pool import HostPool
from .lanes import Lane
from .plan import TIERS
from .pool import Lease


class Store:
    """What waits for one device's backward. For a CPU the tiers "gpu" and "host" are both its memory.

    Args:
        device: whose tensors are kept.
        host_memory: bytes of host memory that this process may take; None: what the machine says is available.
        disk: directory of the disk tier, made if need be; None: no such tier.
        compress: "int8" compresses what leaves the device (`compress.py`); None: nothing.

    Raises:
        ValueError: for a `compress` that is not known.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        host_memory: int | None = None,
        disk: str | None = None,
        compress: str | None = None,
    ):
        self.device = torch.empty(0, device=device).device  # with its index
        self.compress = compress
        choose_codec(torch.empty(0), compress)  # raises for one that is not known
        self.out, self.into = Lane(self.device), Lane(self.device)
        self.host = HostPool(self.device, self.out, self.into, host_memory)
        self.disk = DiskPool(self.device, self.out, self.into, disk) if disk else None
        self._leaving = weakref.WeakSet()

    def require(self, nbytes_host: int, nbytes_disk: int) -> None:
        """To be asked before a step: can the tiers hold this many bytes, as stored (`compress.stored_bytes`)?

        Raises:
            MemoryError: host memory would not suffice.
            OSError: the disk would not.
            ValueError: there is no disk tier.
        """
        self.host.require(nbytes_host)
        if nbytes_disk:
            self._pool("disk").require(nbytes_disk)

    def keep(self, rows: Tensor, tier: str, chunk: int, *, exact: bool = False) -> "Kept":
        """Keep `rows` [N, ...], contiguous, in a tier; they start to leave, `chunk` rows at a time, behind what the
        current stream was given until now. They may be written to after `settle`, unless they stay where they are (tier
        "gpu"; on a CPU, "host" too). `exact` rows are never compressed.

        Raises:
            MemoryError: no host memory is left.
            ValueError: for a tier that is not known or has no directory.
        """
        assert rows.device == self.device and rows.is_contiguous() and chunk > 0
        codec, pool = choose_codec(rows, None if exact else self.compress), self._pool(tier)
        unchanged = pool is self.host and self.device.type == "cpu" and type(codec) is Codec
        if pool is None or unchanged or not rows.numel():
            return Kept(rows.detach())
        self.out.follow_current()  # rows may still be being written
        self.out.follow(self.into)  # what pool.take gives may still be being read
        return _Away(self, pool, pool.take(codec.nbytes(rows)), rows.detach(), codec, chunk)

    def settle(self) -> None:
        """The current stream waits for all copies out: the memory of what is kept may be used again after it.

        Raises:
            OSError: rows could not be written to disk.
        """
        for kept in list(self._leaving):
            self._leaving.discard(kept)  # a failure is told once
            kept._settle()

    def fetch(self, *several: "Kept") -> None:
        """`Kept.fetch` of several whose first rows are needed together: their chunks return in turn."""
        for _ in zip_longest(*(kept._returning() for kept in several)):
            pass

    def _pool(self, tier: str) -> HostPool | DiskPool | None:
        if tier not in TIERS:
            raise ValueError(f"tier={tier!r} is not known: choose one of {TIERS}")
        if tier == "disk" and self.disk is None:
            raise ValueError('tier="disk" needs a directory: disk=...')
        return {"gpu": None, "host": self.host, "disk": self.disk}[tier]


class Kept:
    """Rows that stayed where they are; and what every kept tensor can do."""

    def __init__(self, rows: Tensor):
        self._rows, self._version = rows, rows._version

    def fetch(self) -> None:
        """Start the way back to the device. Does nothing when the rows are there or on their way."""
        for _ in self._returning():
            pass

    def tensor(self, stop: int | None = None) -> Tensor:
        """All rows [N, ...] on the device, fetched if need be. The current stream waits until rows before `stop`
        (None: all) have arrived; the others may be read after another call only.

        Raises:
            OSError: rows could not be written to disk, or read from it.
            RuntimeError: rows that stayed where they are were written to, which autograd would refuse as well.
        """
        if self._rows._version != self._version:
            raise RuntimeError(
                "what a layer keeps for its backward was modified by an inplace operation after the layer's forward: "
                "let that operation work on a copy"
            )
        return self._rows

    def drop(self) -> None:
        """Give up the device's copy of rows that wait elsewhere; they can be fetched again."""

    def release(self) -> None:
        """Give up the rows, wherever they are and whatever copy is under way. Happens when the last reference goes."""
        self._rows = None

    def _returning(self) -> Iterator[None]:
        """Starts the way back of one chunk each time it is asked for the next item."""
        return iter(())


class _Away(Kept):
    """Rows that left the device, each chunk to its own part of a slot."""

    def __init__(self, store: Store, pool: HostPool | DiskPool, lease: Lease, rows: Tensor, codec: Codec, chunk: int):
        self.store, self.pool, self.codec, self.chunk = store, pool, codec, chunk
        self._like = rows.new_empty(rows.shape, device="meta")
        self._lease, self._rows, self._arrivals, self._arrived = lease, None, [], 0
        self._source, self._departures = rows, []
        store._leaving.add(self)
        for part, offset in self._parts(rows):
            self._departures.append(pool.write(lease, offset, part, codec))

    def tensor(self, stop: int | None = None) -> Tensor:
        self.fetch()
        needed = len(self._arrivals) if stop is None else min(-(-stop // self.chunk), len(self._arrivals))
        while self._arrived < needed:
            self._arrivals[self._arrived]()
            self._arrived += 1
        return self._rows

    def drop(self) -> None:
        if self._arrived < len(self._arrivals):  # nobody waits for the rest
            self.store.into.protect(self._rows)
        self._rows, self._arrivals, self._arrived = None, [], 0

    def release(self) -> None:
        self.drop()
        if self._source is not None:
            self.store.out.protect(self._source)
        self._lease, self._source, self._departures = None, None, []

    def __del__(self):
        self.release()

    def _settle(self) -> None:
        for departed in self._departures:
            departed()
        self._source, self._departures = None, []

    def _returning(self) -> Iterator[None]:
        if self._rows is not None:
            return
        self._settle()
        self._rows = torch.empty_like(self._like, device=self.store.device)
        self.store.into.follow_current()  # the memory may still be in use there
        for part, offset in self._parts(self._rows):
            self._arrivals.append(self.pool.read(self._lease, offset, part, self.codec))
            yield

    def _parts(self, rows: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Chunks of `rows`, each with its offset in the slot, in bytes."""
        offset = 0
        for part in rows.split(self.chunk):
            yield part, offset
            offset += self.codec.nbytes(part)
