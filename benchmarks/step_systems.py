"""Whose training step is timed: this project's memory plans, transformers' own checkpointing, and ALST's pieces.

All start from the same weights, compute the same loss and accumulate into the same gradients. transformers' rows get
this project's tiled loss, without which none of them reaches 128K tokens; ALST brings its own.
"""

import functools
import math
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import step_plans
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import easy_context as ec
from easy_context.kernels import choose
from easy_context.rope import set_rope

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
BACKENDS = {  # of transformers' own attention: how it is called, and what torch is restricted to
    "flash": ("FlashAttention-2 of torch", SDPBackend.FLASH_ATTENTION),
    "cudnn": ("cuDNN", SDPBackend.CUDNN_ATTENTION),
    "fa4": ("flash-attn-4", None),
}
CHECKPOINTS = ("", "-offload", "-whole")
PEERS = (*(f"transformers-{backend}{how}" for backend in BACKENDS for how in CHECKPOINTS), "alst")


@dataclass
class System:
    """A model and how its loss is computed.

    Attributes:
        model: the HuggingFace model that holds the weights.
        loss: `(input_ids, position_ids, target_ids)`, this rank's shards, -> the loss to differentiate, and the mean
            over all ranks' tokens.
        kernel: of attention.
        setting: what is kept and where, in words.
        around: a context in which forward and backward run.
        predicted: what the planner says of a step.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    kernel: str
    setting: str
    around: Callable[[], AbstractContextManager] = nullcontext
    predicted: dict = field(default_factory=dict)


def build(args: Namespace, device: torch.device) -> System:
    """The system named `args.system`."""
    if args.system in step_plans.NAMES:
        return ours(args, device)
    if args.processes > 1:
        raise ValueError(f"{args.system} is compared with on one GPU only")
    return alst(args, device) if args.system == "alst" else transformers(args, device)


def random_llama(args: Namespace, device: torch.device, attention: str = "sdpa") -> nn.Module:
    """The same weights for every system, made on the device itself."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_size,
        vocab_size=args.vocab,
        max_position_embeddings=args.seq_length,
        bos_token_id=None,
        eos_token_id=None,
    )
    set_rope(config, theta=args.rope_theta)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype], attn_implementation=attention)
    return model.train()


def ours(args: Namespace, device: torch.device) -> System:
    ec.apply_seq_parallel_monkey_patch(args.mode, "llama")
    model = random_llama(args, device)
    plan = step_plans.memory_plan(args, model.config, device)
    setting = ec.apply_memory_plan(model, plan)
    probe = torch.empty(1, 128, args.heads, args.head_size, dtype=DTYPES[args.dtype], device=device)
    kernel = choose(probe, probe[:, :, : args.kv_heads], causal=True).name
    predicted = step_plans.predict(args, model.config, plan, kernel, device) if device.type == "cuda" else {}
    return System(model, ec.CausalLMWithLoss(model), kernel, setting, predicted=predicted)


def transformers(args: Namespace, device: torch.device) -> System:
    """transformers' own checkpointing, on the device or with its offload, or none at all."""
    _, kernel, *how = args.system.split("-")
    model = random_llama(args, device, "flash_attention_4" if kernel == "fa4" else "sdpa")
    setting = "nothing is checkpointed"
    if how != ["whole"]:
        _enable_checkpointing(model)(**({"offload": True} if how else {}))
        setting = "layer inputs are kept, " + ("offloaded to the host" if how else "on the GPU")

    def loss(input_ids, position_ids, target_ids):
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return ec.seq_parallel_loss_from_hidden(hidden, model.lm_head, target_ids)

    name, backend = BACKENDS[kernel]
    return System(model, loss, name, setting, functools.partial(sdpa_kernel, backend) if backend else nullcontext)


def _enable_checkpointing(model: nn.Module) -> Callable:
    return getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable


def alst(args: Namespace, device: torch.device) -> System:
    """Arctic Long Sequence Training (https://arxiv.org/abs/2506.13996) without Ulysses, which one GPU does not need:
    DeepSpeed's TiledMLP and TiledFusedLogitsLoss, applied as their documentation does, in ArcticTraining's sizes (MLP
    tiles of as many tokens as the model is wide, loss tiles of 1 GiB of float32 logits). Layer inputs go to the host as
    in ArcticTraining: under the reentrant checkpoint, by one blocking copy each way, not page-locked.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
    from torch.autograd.graph import save_on_cpu
    from torch.utils.checkpoint import checkpoint
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def tiled(self, x):
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(plain, self, x, math.ceil(x.shape[1] / x.shape[2]), weights)

    def offloaded(function, *inputs):
        with save_on_cpu(device_type=device.type):
            return checkpoint(function, *inputs, use_reentrant=True)

    LlamaMLP.forward = tiled
    model = random_llama(args, device)
    _enable_checkpointing(model)()
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=offloaded)

    def loss(input_ids, position_ids, target_ids):
        items = (target_ids != -100).sum()

        def tile(model, hidden, targets):
            logits = model.lm_head(hidden).float()
            return nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100) / items

        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        tiles = math.ceil(target_ids.numel() * args.vocab * 4 / 2**30)
        loss = TiledFusedLogitsLoss.apply(tile, model, hidden, target_ids, None, tiles, [model.lm_head.weight], "sum")
        return loss, loss.detach()

    around = functools.partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION) if device.type == "cuda" else nullcontext
    setting = "layer inputs on the host, tiled MLP and loss"
    return System(model, loss, "cuDNN" if device.type == "cuda" else "torch SDPA", setting, around)
