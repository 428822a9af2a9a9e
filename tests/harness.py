"""What tests share: processes that stay up, and tiny models.

`spawn` runs a function in several processes, over gloo on the CPU or over NCCL with a GPU each. The processes live as
long as the test session (importing torch and transformers takes longer than most tests) and get a fresh process group
for every call.
"""

import atexit
import contextlib
import os
import secrets
import socket
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_SECONDS = 240
_workers: list = []


def spawn(fn, world: int, *args, backend: str = "gloo") -> list:
    """`fn(rank, world, *args)` in `world` processes; returns what they return, by rank. `fn` is a module-level
    function of a test module. With `backend="nccl"` the current device of rank r is GPU r. The first failure is raised
    here as AssertionError with its traceback."""
    while len(_workers) < world:
        _workers.append(_Worker())
    port = free_port()
    for rank in range(world):
        _workers[rank].pipe.send((fn.__module__, fn.__qualname__, backend, rank, world, port, args))
    replies = [_workers[rank].reply() for rank in range(world)]
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(replies) if not ok]
    if failures:
        _stop()
        raise AssertionError("\n".join(failures))
    return [value for _, value in replies]


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """||got - truth|| / ||truth||; the plain norm of the difference where the truth is zero."""
    return ((got - truth).norm() / (truth.norm() if truth.norm() > 0 else 1.0)).item()


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float64, **overrides) -> torch.nn.Module:
    """A random causal LM of a transformers family: hidden 64, 2 layers, 4 query and 2 KV heads, vocabulary 97."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).to(dtype)
    return _with_exact_norms(model) if dtype == torch.float64 else model


def _with_exact_norms(model: torch.nn.Module) -> torch.nn.Module:
    """transformers' RMSNorm computes in float32 whatever the model's dtype; torch's own keeps float64."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
                exact = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64)
                exact.weight = norm.weight
                setattr(parent, name, exact)
    return model


class _Worker:
    def __init__(self):
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, list(sys.path)), daemon=True)
        self.process.start()

    def reply(self):
        if not self.pipe.poll(TIMEOUT_SECONDS):
            return False, f"no answer within {TIMEOUT_SECONDS} s"
        try:
            return self.pipe.recv()
        except EOFError:
            return False, "the process died"


def _serve(pipe, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        pipe.send(_call(*call))


def _call(module: str, name: str, backend: str, rank: int, world: int, port: int, args: tuple):
    from importlib import import_module

    from easy_context.mesh import reset_mesh

    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.update({**address, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)})
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_SECONDS // 2))
        value = getattr(import_module(module), name)(rank, world, *args)
        if dist.is_initialized():  # a script's end has destroyed it
            dist.barrier()  # rank 0 keeps the store: it must not leave while another rank still sets up groups
        return True, value
    except Exception:
        return False, traceback.format_exc()
    finally:
        _clean_up()
        reset_mesh()
        if dist.is_initialized():
            dist.destroy_process_group()


def _clean_up() -> None:
    if "easy_context.monkey_patch" in sys.modules:
        sys.modules["easy_context.monkey_patch"].remove_seq_parallel_monkey_patch()
    if "accelerate" in sys.modules:  # it would remember the size of this call's world
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def free_port() -> int:
    """Below those that Linux hands out itself: one of these may go to another test's gloo before it is used here."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


@atexit.register
def _stop() -> None:
    for worker in _workers:
        worker.process.kill()
    _workers.clear()
