"""Whether kernels can be compiled here, and the one way in which functions are: by torch.compile, for fixed shapes."""

import functools
import importlib.util
import os
import shutil

import torch


@functools.cache
def why_no_triton() -> str | None:
    """Why Triton cannot build kernels on this machine, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler: install gcc, or set CC"
    return None


@functools.cache
def compiled(function):
    """`function`, compiled when first called with tensors of new shapes, once for all callers."""
    return torch.compile(function, dynamic=False)
