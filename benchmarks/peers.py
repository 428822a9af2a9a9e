"""The systems to compare with, unmodified, as their packages ship them.

ring-flash-attn and yunchang call the package flash-attn, which has to be compiled. Where it is missing, a stand-in
module hands `_flash_attn_forward` and `_flash_attn_backward` to the same algorithm inside torch: FlashAttention-2 on
CUDA, the flash kernel on CPU. torch allocates the gradients itself, hence one copy into the buffers that the peers pass
(0.3% of a step of 32K tokens on an H200). ring-flash-attn's adapter for transformers does not import on transformers 5
and is kept out; none of its attention functions use it.
"""

import contextlib
import importlib
import logging
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from systems import System
from workload import Workload

PEERS = ("ring-flash-attn", "yunchang", "deepspeed", "torch")
aten = torch.ops.aten


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    """As flash-attn 2.8: `[B, S, H, D]` in, `(out, lse [B, H, S], None, None)` out."""
    assert dropout_p == 0 and alibi_slopes is None and not softcap and window_size_left == -1
    if q.is_cuda:
        lengths = q.shape[1], k.shape[1]
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, *lengths, 0.0, causal, False, scale=softmax_scale
        )
        return out, lse, None, None
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):  # fmt: skip
    """As flash-attn 2.8: fills dq, dk and dv."""
    assert dropout_p == 0 and alibi_slopes is None and not softcap and window_size_left == -1
    if q.is_cuda:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # of a dropout
        how = None, None, q.shape[1], k.shape[1], 0.0, causal, *unused
        grads = aten._flash_attention_backward(dout, q, k, v, out, softmax_lse.contiguous(), *how, scale=softmax_scale)
    else:
        heads_first = (t.transpose(1, 2) for t in (dout, q, k, v, out))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, softmax_lse, 0.0, causal, scale=softmax_scale
        )
        grads = [grad.transpose(1, 2) for grad in grads]
    for buffer, grad in zip((dq, dk, dv), grads, strict=True):
        buffer.copy_(grad)


class _FlashAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal):
        out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, softmax_scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = softmax_scale, causal
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.0, *ctx.how)
        return *grads, None, None


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **settings):
    """As flash-attn 2.8, without what its defaults leave out."""
    return _FlashAttn.apply(q, k, v, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, causal)


def _missing(*args, **kwargs):
    raise NotImplementedError("the stand-in for flash-attn has no variable lengths")


def install_stand_in() -> None:
    """Make `flash_attn.flash_attn_interface` importable. flash-attn 2 is used where it is installed; flash-attn-4,
    which shares the package name, is left as it is."""
    try:
        importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:
        interface = ModuleType("flash_attn.flash_attn_interface")
        interface._flash_attn_forward, interface._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
        interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = _missing
        try:
            package = importlib.import_module("flash_attn")
        except ImportError:
            package = sys.modules["flash_attn"] = ModuleType("flash_attn")
            package.__path__, package.__spec__ = [], ModuleSpec("flash_attn", None)  # others ask for its spec
        package.flash_attn_interface, package.flash_attn_func = interface, flash_attn_func
        package.__version__ = "2.8.3"
        sys.modules[interface.__name__] = interface


def peers(work: Workload, world: int, rank: int, ring: int, device: torch.device, names) -> list[System]:
    """The peers called `names`; those that are missing, or cannot run here, carry the reason."""
    flash = "torch_flash" if device.type == "cuda" else "cpu_flash"
    known = [
        ("ring-flash-attn", "zigzag", flash, _zigzag),
        ("ring-flash-attn", "ring", flash, _plain_ring),
        ("yunchang", "USP", flash, lambda system: _yunchang_usp(system, world, rank, ring)),
        ("yunchang", "Ulysses", flash, _yunchang_ulysses),
        ("deepspeed", "Ulysses", flash, _deepspeed),
        ("torch", "context parallel", "cudnn", lambda system: _context_parallel(system, world, device)),
    ]
    systems = []
    for name, mode, kernel, prepare in known:
        if name not in names:
            continue
        system = System(f"{name} {_version(name)}", mode, kernel, None, work.seq_length // world, work.flops / world)
        try:
            prepare(system)
        except (ImportError, NotImplementedError) as error:
            system.failure = f"{type(error).__name__}: {error}"
        systems.append(system)
    return systems


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(version unknown)"


def _ring_flash_attn():
    install_stand_in()
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = _missing
    sys.modules[adapters.__name__] = adapters
    return importlib.import_module("ring_flash_attn")


def _zigzag(system: System) -> None:
    function = _ring_flash_attn().zigzag_ring_flash_attn_func
    system.attend = lambda q, k, v: function(q, k, v, causal=True, group=dist.group.WORLD)


def _plain_ring(system: System) -> None:
    function = _ring_flash_attn().ring_flash_attn_func
    system.attend = lambda q, k, v: function(q, k, v, causal=True, group=dist.group.WORLD)


def _yunchang_usp(system: System, world: int, rank: int, ring: int) -> None:
    install_stand_in()
    yunchang = importlib.import_module("yunchang")
    yunchang.set_seq_parallel_pg(world // ring, ring, rank, world)
    module = yunchang.LongContextAttention(ring_impl_type="zigzag")
    system.attend = lambda q, k, v: module(q, k, v, causal=True)


def _yunchang_ulysses(system: System) -> None:
    install_stand_in()
    module = importlib.import_module("yunchang").UlyssesAttention(dist.group.WORLD)
    system.attend = lambda q, k, v: module(q, k, v, causal=True)


def _deepspeed(system: System) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    comm = importlib.import_module("deepspeed.comm")
    layer = importlib.import_module("deepspeed.sequence.layer")
    comm.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)

    def local(q, k, v):
        return flash_attn_func(q, k, v, causal=True)

    module = layer.DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    system.attend = lambda q, k, v: module(q, k, v, 0)


def _context_parallel(system: System, world: int, device: torch.device) -> None:
    if device.type != "cuda":
        raise NotImplementedError("no CPU path")
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = dist.device_mesh.init_device_mesh("cuda", (world,))

    @contextlib.contextmanager
    def around():
        shards = torch.zeros(1, 2 * world, device=device)  # it wants something to shard; q, k and v are shards already
        with context_parallel(mesh, buffers=[shards], buffer_seq_dims=[1]), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield

    system.heads_first, system.around = True, around
    system.attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
