"""This project's memory plans by name, and what the planner says of a step before it runs."""

from argparse import Namespace

import torch

from easy_context.memory.plan import MemoryPlan
from easy_context.mesh import current_mesh
from easy_context.planner import ModelShape, for_training
from easy_context.planner.flags import parse_keep
from easy_context.planner.memory import peak
from easy_context.planner.setting import Setting
from easy_context.planner.timing import step_time
from easy_context.planner.training import this_machine

PRESETS = {
    "fast": {"keep": "attention:host", "prefetch": True},
    "lean": {"keep": "attention:host", "head_groups": 4},
    "whole": {"keep": "everything:gpu"},
}
NAMES = (*PRESETS, "auto", "custom")  # the planner's choice; what the flags say


def memory_plan(args: Namespace, config, device: torch.device) -> MemoryPlan:
    """The plan that `args.system` names."""
    if args.system == "auto":
        split = {"mode": args.mode, "seq_parallel_size": args.processes}
        machine = {"world_size": args.processes, "local_world_size": args.processes, "device": device}
        host = args.host_memory and args.host_memory * args.processes
        planned = for_training(config, seq_length=args.seq_length, engine="plain", host_memory=host, **machine, **split)
        return planned.memory_plan
    settings = {"tile_size": args.plan["tile_size"], **PRESETS.get(args.system, args.plan)}
    layers = parse_keep(settings.pop("keep"), args.layers)
    return MemoryPlan(layers, host_memory=args.host_memory, **settings)


def predict(args: Namespace, config, plan: MemoryPlan, kernel: str, device: torch.device) -> dict:
    """Seconds of a step and GiB of a GPU, in tensors, as the planner has them: forward and backward alone, weights and
    gradients on the GPU, one sequence on all GPUs."""
    hardware, rings = this_machine(device), {"ulysses_attn": 1, "usp_attn": current_mesh().ring_size}
    setting = Setting(
        shape=ModelShape.of(config),
        hardware=hardware,
        seq_length=args.seq_length,
        plan=plan,
        gpus=args.processes,
        mode=args.mode,
        sp_size=args.processes,
        ring=rings.get(args.mode, args.processes),
        kernel=kernel if kernel in hardware.kernels else None,
        engine="plain",
    )
    return {"predicted_seconds": step_time(setting).total, "predicted_gib": peak(setting).total / 2**30}
