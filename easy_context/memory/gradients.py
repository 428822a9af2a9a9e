"""Gradients whose memory matters: those of weights, summed exactly, and those that may be written over."""

import functools
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..refusals import once_differentiable


class Gradients:
    """Sums of weights' gradients, in float32 or more."""

    def __init__(self):
        self.sums: dict[nn.Parameter, Tensor] = {}

    def add(self, found: Iterable[tuple]) -> None:
        """`(weight, rows of it, gradient of these rows)`, any number."""
        for weight, rows, gradient in found:
            wide = torch.promote_types(weight.dtype, torch.float32)
            if weight in self.sums:
                self.sums[weight][rows].add_(gradient)
            elif gradient.shape == weight.shape:
                self.sums[weight] = gradient.to(wide)
            else:
                self.sums[weight] = torch.zeros(weight.shape, dtype=wide, device=gradient.device)
                self.sums[weight][rows] = gradient.to(wide)

    def of(self, weights: list[nn.Parameter]) -> list[Tensor | None]:
        """The sums, in the weights' dtypes, given away one by one."""
        return [self.sums.pop(w).to(w.dtype) if w in self.sums else None for w in weights]


def references(gradient: Tensor) -> int:
    """How many references there are to a gradient and to its memory. The interpreter counts those in Python. torch
    counts those in C++, of which the interpreter does not hear before torch 2.13. The storage counts the tensors and
    arrays that share its memory, as `detach` and `numpy` make them."""
    memory = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    return sys.getrefcount(gradient) + gradient._use_count() + memory


@functools.cache
def references_to_a_gradient() -> int:
    """`references(dy)` at the top of a once differentiable backward, for a gradient dy that nobody else holds.

    Any other holder adds to it: a hook that stored the gradient, and those in C++ (a function that shares it and runs
    later, a gradient that `torch.autograd.grad` returns). On a torch whose holders in C++ do not show, 0: every
    gradient then counts as held.
    """

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            counts.append(references(dy))
            return dy

    counts = []
    with torch.inference_mode(False), torch.enable_grad():
        (Counting.apply(torch.ones(1, requires_grad=True)) * 2).backward()
        x = torch.ones(1, requires_grad=True)
        y = Counting.apply(x)
        torch.autograd.grad((y * 2).sum(), (x, y))  # y's gradient is returned as well
    alone, shared = counts
    return alone if shared > alone else 0
