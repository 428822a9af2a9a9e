"""Copies between a GPU and its host, each direction on a stream of its own, ordered by events.

On the CPU a copy is done when it returns: a lane has no stream there and nothing to wait for.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Lane:
    """The copies of one direction, in order. "The current stream" is the one on which the caller computes."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def running(self) -> AbstractContextManager:
        """A context in which copies, and what is computed for them, run on this lane."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def follow_current(self) -> None:
        """What runs here from now on waits for the current stream."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def follow(self, other: "Lane") -> None:
        """What runs here from now on waits for the other lane."""
        if self.stream:
            self.stream.wait_stream(other.stream)

    def mark(self) -> Callable[[], None]:
        """A function that lets the current stream, not the host, wait for all that this lane was given until now."""
        if not self.stream:
            return lambda: None
        event = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        """The host waits, asleep, for all that this lane was given until now."""
        if self.stream:
            event = torch.cuda.Event(blocking=True)
            event.record(self.stream)
            event.synchronize()

    def protect(self, tensor: Tensor) -> None:
        """The tensor's memory, when dropped, is not used again before all that this lane was given until then is done.
        For tensors that nobody waits for; memory protected in this way returns late."""
        if self.stream:
            tensor.record_stream(self.stream)
