"""This project's memory plans by name, and what the planner says of a step before it runs."""

from argparse import Namespace
from dataclasses import replace

import torch

from easy_context.memory.plan import MemoryPlan
from easy_context.planner import for_training
from easy_context.planner.memory import peak
from easy_context.planner.timing import step_time

PRESETS = {
    "fast": {"keep": "attention", "tier": "host", "prefetch": True},
    "lean": {"keep": "attention", "tier": "host", "head_groups": 4},
    "whole": {"keep": "everything", "tier": "gpu"},
}
NAMES = (*PRESETS, "auto", "custom")  # the planner's choice; what the flags say


def memory_plan(args: Namespace, config, device: torch.device) -> MemoryPlan:
    """The plan that `args.system` names."""
    if args.system == "auto":
        return _planned(args, config, device).memory_plan
    settings = {"tile_size": args.plan["tile_size"], **PRESETS.get(args.system, args.plan)}
    return MemoryPlan.uniform(args.layers, host_memory=args.host_memory, **settings)


def predict(args: Namespace, config, plan: MemoryPlan, device: torch.device) -> dict:
    """Seconds of a step and GiB of a GPU, in tensors, as the planner has them."""
    setting = replace(_planned(args, config, device).setting, plan=plan)
    return {"predicted_seconds": step_time(setting).total, "predicted_gib": peak(setting).total / 2**30}


def _planned(args: Namespace, config, device: torch.device):
    """Forward and backward alone, with weights and gradients on the GPU; as the GPUs share the sequence here."""
    return for_training(
        config,
        world_size=args.processes,
        seq_length=args.seq_length,
        device=device,
        engine="plain",
        local_world_size=args.processes,
        host_memory=args.host_memory and args.host_memory * args.processes,
        mode=args.mode,
        seq_parallel_size=args.processes,
    )
