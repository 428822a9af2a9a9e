"""One process as any rank of any world: a torch.distributed backend whose messages are copies on the same device.

What a rank receives is copied from elsewhere in the device's memory: as many bytes as the message has, normally
distributed, on a stream of its own as with NCCL, and `wait` orders the current stream behind it. What it sends is only
counted. So one GPU does the whole work of one rank of a ring, for any system that talks through torch.distributed,
and everything is measured but the wire. Results are meaningless, times are not: kernels do not depend on values.
"""

import torch
import torch.distributed as dist


def become(rank: int, world: int) -> None:
    """Make this process rank `rank` of a virtual world of `world` ranks."""
    VirtualGroup.bytes_sent = 0
    dist.init_process_group("virtual", rank=rank, world_size=world, store=dist.HashStore())


class _Copy(dist._Work):
    """Copies in flight. Holds the tensors until they are waited for."""

    def __init__(self, tensors=(), event: torch.cuda.Event | None = None):
        super().__init__()
        self.tensors, self.event = list(tensors), event

    def wait(self, timeout=None) -> bool:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self.tensors = []
        return True


class VirtualGroup(dist.ProcessGroup):
    """One group of a virtual world, seen from the rank that this process plays."""

    bytes_sent = 0  # to other ranks, by all groups since `become`
    supports_coalescing = False  # asked of a group's backend, which it is itself
    _sources: dict = {}
    _streams: dict = {}

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._size, self._name = size, "virtual"

    def getBackendName(self):
        return "virtual"

    def setGroupName(self, name):
        self._name = name

    _set_group_name = setGroupName

    def _get_backend(self, device):
        return self

    @property
    def group_name(self):
        return self._name

    def send(self, tensors, target, tag):
        self._count(sum(map(_bytes, tensors)))
        return _Copy()

    def recv(self, tensors, source, tag):
        return self._arrive(tensors)

    def all_to_all_single(self, output, input, output_sizes, input_sizes, options=None):
        own = input_sizes[self.rank()] / max(1, sum(input_sizes)) if input_sizes else 1 / self._size
        self._count(round(_bytes(input) * (1 - own)))
        return self._arrive([output])

    def all_gather_single(self, output, input, options=None):
        self._count(_bytes(input) * (self._size - 1))
        return self._arrive([output])

    def all_gather_single_coalesced(self, outputs, inputs, options=None):
        self._count(sum(map(_bytes, inputs)) * (self._size - 1))
        return self._arrive(outputs)

    def barrier(self, opts=None):
        return _Copy()

    # the same under the names of older and newer releases of torch
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _count(self, size: int) -> None:
        VirtualGroup.bytes_sent += size

    def _arrive(self, tensors) -> _Copy:
        device = tensors[0].device
        if device.type != "cuda":
            for tensor in tensors:
                tensor.copy_(self._source(tensor))
            return _Copy()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        sources = [self._source(tensor) for tensor in tensors]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for tensor, source in zip(tensors, sources, strict=True):
                tensor.copy_(source)
        return _Copy(tensors, stream.record_event())

    def _source(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.numel(), tensor.dtype, tensor.device
        if key not in self._sources:
            made = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            self._sources[key] = made.normal_() if made.is_floating_point() else made.zero_()
        return self._sources[key].view(tensor.shape)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _create(store, rank: int, size: int, timeout) -> VirtualGroup:
    return VirtualGroup(rank, size)


dist.Backend.register_backend("virtual", _create, devices=["cpu", "cuda"])
