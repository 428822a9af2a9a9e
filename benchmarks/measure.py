"""Times of systems, taken in turns so that drift hits all alike.

A GPU at its power limit owes its speed to what ran before: after a system that draws little power, the next one is
faster for a tenth of a second or more; and its clock goes up and down, by a fifth within tenths of a second. So a
system runs untimed until the GPU is in that system's own state, then a sample is as many forwards and backwards again,
one behind the other as the layers of a model are. Several GPUs start it together.
"""

import math
import time
from random import Random
from statistics import median

import torch
import torch.distributed as dist
from systems import System
from workload import Workload

HEAD_START = 20_000_000  # GPU cycles, 10 ms: in training the host runs ahead of the GPU
PERIOD = 0.25  # seconds that a sample takes on a GPU, or one run if that takes longer; and as long before, untimed


class Clock:
    """Moments on the device: CUDA events there, the wall clock on CPU."""

    def __init__(self, device: torch.device):
        self.cuda, self.moments = device.type == "cuda", []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.moments.append(event)
        else:
            self.moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Since the first moment, of every later one."""
        first, *later = self.moments
        if not self.cuda:
            return [moment - first for moment in later]
        torch.cuda.synchronize()
        return [first.elapsed_time(moment) / 1000 for moment in later]


class Inputs:
    """q, k, v and dout of every shape that the systems ask for; those of one shape share them."""

    def __init__(self, work: Workload, device: torch.device):
        self.work, self.device, self.made = work, device, {}

    def of(self, system: System) -> tuple[list[torch.Tensor], torch.Tensor]:
        key = system.tokens, system.heads_first
        if key not in self.made:
            heads = (self.work.heads, self.work.kv_heads, self.work.kv_heads, self.work.heads)
            *leaves, dout = (self._draw(system, h) for h in heads)
            self.made[key] = [leaf.requires_grad_() for leaf in leaves], dout
        return self.made[key]

    def _draw(self, system: System, heads: int) -> torch.Tensor:
        shape = (heads, system.tokens) if system.heads_first else (system.tokens, heads)
        return torch.randn(1, *shape, self.work.head_size, dtype=self.work.dtype, device=self.device)


def measure(systems: list[System], work: Workload, device: torch.device, repeats: int, virtual: bool) -> list:
    """Per system the medians `(forward, forward + backward)` in seconds over `repeats` samples, each sample that of
    the slowest process; None for those that failed. One round more warms up; peers that fail in it are dropped."""
    inputs = Inputs(work, device)
    first = virtual or dist.get_rank() == 0
    samples, runs = [[] for _ in systems], [1] * len(systems)
    for turn in range(repeats + 1):
        for index in Random(turn).sample(range(len(systems)), len(systems)):  # the same order on every process
            system = systems[index]
            if not virtual:
                dist.barrier()
            if system.failure is not None:
                continue
            seconds = [0.0, 0.0]
            if first or system.threads is None:
                try:
                    seconds = _sample(system, *inputs.of(system), runs[index], device, together=not virtual)
                except Exception as error:
                    if system.name == "easy_context" or turn > 0:
                        raise
                    system.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            samples[index].append(seconds)
        if turn == 0 and device.type == "cuda":
            runs = [1 if s.failure else _fill(taken, virtual) for s, taken in zip(systems, samples, strict=True)]
    return [
        None if system.failure is not None else _slowest(taken[1:], virtual)
        for system, taken in zip(systems, samples, strict=True)
    ]


def start_together(device: torch.device, together: bool) -> None:
    """On a GPU, what is launched from here on waits for the host's head start and, if `together`, for the others'."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)
        if together:
            dist.all_reduce(torch.zeros(1, device=device))


def _sample(
    system: System, leaves: list[torch.Tensor], dout: torch.Tensor, runs: int, device: torch.device, together: bool
) -> list[float]:
    """Seconds of a forward, and of a forward and backward: means of `runs`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(system.threads or threads)
    if device.type == "cuda":
        for _ in range(runs):
            _run(system, leaves, dout, Clock(device))
    start_together(device, together)
    clock = Clock(device)
    for _ in range(runs):
        _run(system, leaves, dout, clock)
    moments = [0.0, *clock.seconds()]
    torch.set_num_threads(threads)
    forward = sum(end - start for start, end in zip(moments[::3], moments[1::3], strict=True))
    return [forward / runs, moments[-1] / runs]


def _run(system: System, leaves: list[torch.Tensor], dout: torch.Tensor, clock: Clock) -> None:
    """Forward and backward, with moments before, between and after."""
    for leaf in leaves:
        leaf.grad = None
    with system.around():
        clock.mark()
        out = system.attend(*leaves)
        clock.mark()
        out.backward(dout)
        clock.mark()


def _fill(first_sample: list[list[float]], virtual: bool) -> int:
    """How many runs take `PERIOD`; the same number on every process."""
    return math.ceil(PERIOD / _slowest(first_sample, virtual)[1])


def _slowest(samples: list[list[float]], virtual: bool) -> tuple[float, float]:
    times = torch.tensor(samples, dtype=torch.float64)
    if not virtual and dist.get_world_size() > 1:
        times = times.to(_device_of_group())
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return tuple(median(column) for column in times.T.tolist())


def _device_of_group() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
