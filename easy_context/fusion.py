"""Whether kernels can be compiled here, and the one way in which functions are: by torch.compile."""

import functools
import importlib.util
import os
import shutil
from types import FunctionType

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
def compiled(function, purpose: str = ""):
    """`function`, compiled when it is first called. Callers of one `purpose` share what is compiled: a graph for the
    first sizes, and one for any size once sizes vary. torch keeps a limited number of graphs per code object, so each
    purpose has a code object of its own."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{purpose}")
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return torch.compile(own)
