"""Gradient checkpointing that keeps each layer's input in host memory.

With checkpointing, what is left to grow with depth are the layer inputs: 8 KiB a token and layer for an 8B model,
244 GiB for a million tokens. They leave the GPU during their layer's forward and come back, one layer ahead, during
the backward: `S * hidden * 2` bytes (bf16) a layer each way, hidden behind the layer's computation.

The checkpoint is torch's non-reentrant one inside `saved_tensors_hooks`: it saves its tensor arguments as autograd
saves tensors, so the hooks see exactly the layer's inputs, while whatever the layer saves itself goes to the
checkpoint's own hooks. Nothing requires the input to need a gradient (LoRA), and keyword arguments pass untouched.

Three streams a device, ordered by events:

    compute   forward of layer i ........  forward of i+1 ...   ||   backward of layer i ........  backward of i-1 ...
    out       input of i to the host ....  input of i+1 .....   ||
    into                                                        ||   input of i-1 from the host .  input of i-2 ......

`out` waits for compute before it reads the input, and compute waits for `out` at the layer's end, before that memory
can be used again. A fetch's memory comes from the compute stream's pool, hence `into` waits for compute first; compute
waits for the fetch. On CPU tensors the same path runs without copies.

After the offloaded checkpoints of Unsloth, https://unsloth.ai/blog/long-context, whose copies share the compute
stream.
"""

import functools
import mmap
import weakref

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

MIN_BYTES = 2**20  # smaller tensors stay where they are

_transformers_own = None


def apply_unsloth_offloaded_gradient_checkpoint_monkey_patch() -> None:
    """From now on `model.gradient_checkpointing_enable()`, by its newer name `activation_checkpointing_enable()`,
    offloads, for any HuggingFace model. Models that enabled checkpointing before keep what they have.

    Applying it again changes nothing. It supersedes transformers' own `offload=True`, whose copies
    run on the compute stream.

    Raises:
        ValueError: (when checkpointing is enabled) for `use_reentrant=True`, under which a layer whose input needs no
            gradient would train nothing.
        MemoryError: (during a forward) when the host has no memory left for a layer's input.
    """
    from transformers import PreTrainedModel

    global _transformers_own
    if _transformers_own is not None:
        return
    own = _transformers_own = PreTrainedModel._set_gradient_checkpointing

    @functools.wraps(own)
    def set_offloaded(self, enable=True, gradient_checkpointing_func=checkpoint, **kwargs):
        settings = getattr(gradient_checkpointing_func, "keywords", {})
        if settings.get("use_reentrant"):
            raise ValueError("offloaded gradient checkpointing is non-reentrant: leave out use_reentrant=True")
        offloaded = functools.partial(offloaded_checkpoint, **{**settings, "use_reentrant": False})
        own(self, enable=enable, gradient_checkpointing_func=offloaded, **kwargs)

    PreTrainedModel._set_gradient_checkpointing = set_offloaded


def remove_unsloth_offloaded_gradient_checkpoint_monkey_patch() -> None:
    """Restore transformers and free the page-locked memory: at once, or with the last graph that still uses it.
    Models that enabled checkpointing in between go on offloading until they enable it anew."""
    from transformers import PreTrainedModel

    global _transformers_own
    if _transformers_own is not None:
        PreTrainedModel._set_gradient_checkpointing = _transformers_own
        _transformers_own = None
    _offloader.cache_clear()


def offloaded_checkpoint(function, *args, **settings):
    """`torch.utils.checkpoint.checkpoint(function, *args, **settings)` with the tensors among `args` kept on the host.

    Raises:
        RuntimeError: `function` changed an argument in place, so that it could not be computed again.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    versions = [tensor._version for tensor in tensors]
    with saved_tensors_hooks(_pack, _unpack):
        output = checkpoint(function, *args, **settings)
    if versions != [tensor._version for tensor in tensors]:
        raise RuntimeError("a checkpointed layer changed its input in place")
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).wait_stream(_offloader(device).out)
    return output


def _pack(tensor: Tensor) -> "Tensor | _Offloaded":
    if tensor.is_cuda and tensor.is_floating_point() and tensor.nbytes >= MIN_BYTES:
        return _offloader(tensor.device).send(tensor)
    return tensor


def _unpack(packed: "Tensor | _Offloaded") -> Tensor:
    return packed.offloader.receive(packed) if isinstance(packed, _Offloaded) else packed


@functools.cache
def _offloader(device: torch.device) -> "_Offloader":
    return _Offloader(device)


class _Offloader:
    """One device's copy streams, its host buffers, and the order in which inputs left."""

    def __init__(self, device: torch.device):
        self.device = device
        self.out, self.into = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.pool = _BufferPool(device)
        self.newest = lambda: None

    def send(self, tensor: Tensor) -> "_Offloaded":
        """Start the copy to the host. The caller's `tensor` must live until compute has waited for `self.out`."""
        buffer = self.pool.take(tensor.nbytes)
        sent = _Offloaded(self, buffer, tensor, previous=self.newest)
        self.newest = weakref.ref(sent)
        self.out.wait_stream(torch.cuda.current_stream(self.device))  # tensor is being written
        self.out.wait_stream(self.into)  # the buffer may still be read from
        with torch.cuda.stream(self.out):
            sent.host.copy_(tensor, non_blocking=True)
        return sent

    def receive(self, sent: "_Offloaded") -> Tensor:
        """The tensor, back on the device; the one that left before it starts to return as well."""
        self._fetch(sent)
        tensor, arrived = sent.arriving
        sent.arriving = None
        torch.cuda.current_stream(self.device).wait_event(arrived)
        previous = sent.previous()
        if previous is not None:
            self._fetch(previous)
        return tensor

    def _fetch(self, sent: "_Offloaded") -> None:
        if sent.arriving is None:
            tensor = torch.empty_like(sent.host, device=self.device)
            self.into.wait_stream(torch.cuda.current_stream(self.device))  # its memory may still be in use there
            with torch.cuda.stream(self.into):
                tensor.copy_(sent.host, non_blocking=True)
            sent.arriving = tensor, self.into.record_event()


class _Offloaded:
    """A tensor in host memory. It owns its buffer; both go when the graph, or a failed step, drops it."""

    def __init__(self, offloader: _Offloader, buffer: "_HostBuffer", tensor: Tensor, previous):
        self.offloader, self.buffer, self.previous = offloader, buffer, previous
        self.host = buffer.bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.arriving = None  # (device tensor, event) of a fetch that is under way

    def __del__(self):
        if self.arriving is not None:  # nobody will wait for it: its memory must not be reused before it is done
            self.arriving[0].record_stream(self.offloader.into)
        self.offloader.pool.give(self.buffer)


class _BufferPool:
    """Idle host buffers. There are never more than were in use at once, nor larger ones than were asked for."""

    def __init__(self, device: torch.device):
        self.device = device
        self.idle = []

    def take(self, size: int) -> "_HostBuffer":
        """The smallest idle buffer that fits, or a new one in place of an idle one that is too small."""
        fitting = [buffer for buffer in self.idle if buffer.size >= size]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.size)
            self.idle.remove(best)
            return best
        if self.idle:
            self.idle.pop()
        return _HostBuffer(size, self.device)

    def give(self, buffer: "_HostBuffer") -> None:
        self.idle.append(buffer)


class _HostBuffer:
    """Page-locked memory of `size` bytes, without the rounding to powers of two of torch's own pinned allocator. The
    mapping is a shared one: a forked data loader must not make pages under a running copy copy-on-write."""

    def __init__(self, size: int, device: torch.device):
        available = psutil.virtual_memory().available
        if size > available:
            raise MemoryError(
                f"no host memory left for an offloaded layer input: {size / 2**30:.1f} GiB needed, "
                f"{available / 2**30:.1f} available; shorten the sequence, use more GPUs or plain checkpointing"
            )
        self.size = size
        self.bytes = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        _page_lock(self.bytes)
        weakref.finalize(self, _page_unlock, self.bytes, device).atexit = False


def _page_lock(memory: Tensor) -> None:
    portable = 1  # cudaHostRegisterPortable: page-locked for every device
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable))


def _page_unlock(memory: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # no copy may be under way
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
