"""Host memory of DeepSpeed ZeRO-3 with the optimizer offloaded: 18 bytes a trained parameter, all there before a step.

Left alone, DeepSpeed (0.18 to 0.19, `runtime/zero/stage3.py`) takes 22 where gradients are summed in float32, and what
page-locking rounds up. By bytes:

    2   the weights' shares in bf16, page-locked; two more while they are loaded, which torch's allocator keeps
    4   sums of gradients over micro-steps (`grad_partitions_flat_buffer`), page-locked; 2 for a bf16 model whose JSON
        does not say "data_types": {"grad_accum_dtype": "fp32"}, as train.py makes it say: such sums round every time
    4   the gradients that the optimizer reads (`.grad` of each master), page-locked: at the last micro-step a copy
    4   masters (`fp32_partitioned_groups_flat`)
    8   Adam's two states, which it makes in the first step: too late to learn that they do not fit

Here memory is page-locked in exactly its size (`exact_pinning`); the masters' gradients are views of float32 sums, so
that the copy is one onto itself; and Adam's states are there from the start (`hold_once`).

What changes: between micro-steps `safe_get_full_grad` gives the sum so far, not the step before. Norms, clipping and
checks for overflow read and scale at the same points of the step as before. `offload_states` of gradients puts the
sums elsewhere; from then on there are two again, and the copy between them does what it did.
"""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
import torch.distributed as dist

from .host_pool import GIB, HostMemory
from .leaf import is_zero3

logger = logging.getLogger("easy_context")
PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
NAMES = ("grad_partitions_flat_buffer", "fp32_partitioned_groups_flat", "fp16_groups", "grad_position", PARTITIONS)


@contextmanager
def exact_pinning(device: torch.device) -> Iterator[None]:
    """Within, what DeepSpeed page-locks takes exactly its bytes, rounded up to pages, and is the system's again when
    its last tensor is gone. Around loading the model and `accelerator.prepare`; nothing without CUDA or ZeRO-3.

    Raises:
        MemoryError: inside, where the system does not give the memory.
    """
    if device.type != "cuda" or not is_zero3():
        yield
        return
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    own = accelerator.pin_memory

    def pin(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if args or kwargs or not tensor.numel():  # other uses than copies of tensors
            return own(tensor, *args, **kwargs)
        try:
            memory = HostMemory(tensor.nbytes, device).bytes
        except MemoryError as error:
            raise MemoryError(_shortage("a buffer of weights or gradients", tensor.nbytes)) from error
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor).data  # a view would hold its base for ever

    accelerator.pin_memory = pin
    try:
        yield
    finally:
        del accelerator.pin_memory  # the class's own again


def hold_once(engine, host_memory: float | None = None) -> None:
    """Hold the gradients of a model that DeepSpeed ZeRO-3 has prepared once, and Adam's states from now on.

    Every rank calls it, after `accelerator.prepare` (or `deepspeed.initialize`), before the first step and before a
    checkpoint is loaded. Nothing without ZeRO-3 and `offload_optimizer`; what this cannot change is left as DeepSpeed
    made it, and logged.

    Args:
        engine: the prepared model.
        host_memory: bytes that may be in use on a host, for one that shows less at first than it may use.

    Raises:
        MemoryError: on every rank, where the states do not fit in what a host has available.
    """
    optimizer = getattr(engine, "optimizer", None)
    if not getattr(optimizer, "offload_optimizer", False):
        return
    why = _why_not(optimizer)
    if why is not None:
        logger.warning(
            "ZeRO-3 offload is left as DeepSpeed made it: %s. Up to 22 bytes of host memory a trained parameter and "
            "what page-locking rounds up, 8 of them in the first step",
            why,
        )
        return
    start = 0
    for master in optimizer.fp32_partitioned_groups_flat:
        master.grad = optimizer.grad_partitions_flat_buffer.narrow(0, start, master.numel())
        start += master.numel()
    _make_states(optimizer.optimizer, optimizer.fp32_partitioned_groups_flat, host_memory)


def let_go(engine) -> None:
    """Free masters, gradients and Adam's states, 16 of the 18 bytes, so that a host that was full in training has room
    to gather the model to be saved. Every rank calls it; the engine can neither train nor write a checkpoint after it.
    Nothing without ZeRO-3 and `offload_optimizer`.
    """
    optimizer = getattr(engine, "optimizer", None)
    if not getattr(optimizer, "offload_optimizer", False) or _why_not(optimizer) is not None:
        return
    getattr(optimizer, PARTITIONS).clear()
    optimizer.grad_partitions_flat_buffer = None
    optimizer.optimizer.state.clear()
    for master in optimizer.fp32_partitioned_groups_flat:
        master.data, master.grad = master.new_empty(0), None


def _why_not(optimizer) -> str | None:
    """Why the gradients of the masters cannot be views of the sums; None where they can."""
    if missing := [name.rpartition("__")[2] for name in NAMES if not hasattr(optimizer, name)]:
        return f"this version of it has no {', '.join(missing)}"
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer_Stage3" or getattr(optimizer, "zenflow", False):
        return "SuperOffload and ZenFlow update weights while gradients come"
    if getattr(optimizer, "swap_optimizer", False):
        return "the optimizer is on NVMe"
    sums, masters = optimizer.grad_partitions_flat_buffer, optimizer.fp32_partitioned_groups_flat
    kinds = {(tensor.dtype, tensor.device) for master in masters for tensor in (sums, master, master.grad)}
    if len(kinds) > 1:
        return (
            f"gradients are summed in {sums.dtype} on {sums.device}, and not all masters are like that "
            '(in its JSON: "data_types": {"grad_accum_dtype": "fp32"}, and no "ratio" in "offload_optimizer")'
        )
    partitions, start = getattr(optimizer, PARTITIONS), 0
    for group, (master, params) in enumerate(zip(masters, optimizer.fp16_groups, strict=True)):
        for param in params:
            place, offset, _ = optimizer.grad_position[optimizer.get_param_id(param)]
            sum_of_param = partitions[param.ds_id]
            here = sum_of_param.untyped_storage().data_ptr() == sums.untyped_storage().data_ptr()
            if not here or place != group or sum_of_param.storage_offset() != start + offset:
                return "this version of it orders sums of gradients otherwise than the masters"
        start += master.numel()
    return None


def _make_states(adam: torch.optim.Optimizer, masters: list[torch.Tensor], host_memory: float | None) -> None:
    """As the first step of DeepSpeedCPUAdam would (`ops/adam/cpu_adam.py`)."""
    if type(adam).__name__ != "DeepSpeedCPUAdam":
        logger.warning("states of %s come in the first step: their host memory is not checked", type(adam).__name__)
        return
    without = [master for master in masters if not adam.state[master]]
    dtypes = [torch.float32 if adam.fp32_optimizer_states else master.dtype for master in without]
    size = sum(2 * master.numel() * dtype.itemsize for master, dtype in zip(without, dtypes, strict=True))
    _require(size, host_memory)
    for master, dtype in zip(without, dtypes, strict=True):
        zeros = {name: torch.zeros_like(master.data, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[master].update(step=0, **zeros)


def _require(size: int, host_memory: float | None) -> None:
    """All ranks learn what each host has before any takes of it."""
    memory, told = psutil.virtual_memory(), [None] * dist.get_world_size()
    available = max(memory.available, (host_memory or 0) - (memory.total - memory.available))
    dist.all_gather_object(told, (socket.gethostname(), size, available))
    for host in sorted({name for name, _, _ in told}):
        sizes, rooms = zip(*((size, room) for name, size, room in told if name == host), strict=True)
        if sum(sizes) > min(rooms):
            raise MemoryError(_shortage("Adam's states", sum(sizes), min(rooms)))


def _shortage(what: str, needed: int, available: float | None = None) -> str:
    available = psutil.virtual_memory().available if available is None else available
    return (
        f"ZeRO-3 offload: {needed / GIB:.2f} GiB of host memory needed for {what}, {available / GIB:.2f} GiB there; "
        "weights and optimizer take 18 bytes a trained parameter of all nodes together: use more nodes, or LoRA, or, "
        "where the machine shows less memory than it may use, say how much that is (host_memory=..., --host-memory)"
    )
