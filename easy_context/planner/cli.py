"""`easy-context plan ...`: what fits, how fast, and the flags of train.py to take."""

import argparse
import sys

from .flags import size, tokens
from .hardware import HARDWARE
from .planning import plan
from .setting import ENGINES


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="easy-context", description="Long-context training, planned before it runs.")
    commands = whole.add_subparsers(dest="command", required=True)
    form = argparse.ArgumentDefaultsHelpFormatter
    command = commands.add_parser("plan", help="what fits, how fast, and which flags to take", formatter_class=form)
    add = command.add_argument_group("what is trained").add_argument
    add("--model", required=True, help="config.json, its directory, hub name, or a short name such as llama-3.1-8b")
    add("--seq-length", type=tokens, required=True, metavar="TOKENS", help="128K, 1M, ...")
    add("--batch-size", type=int, default=1, help="sequences per group of GPUs that share one")
    add("--lora", type=int, metavar="RANK", help="train LoRA adapters")
    add("--engine", choices=ENGINES, default="zero3_offload", help="who holds weights, gradients and optimizer")
    add("--no-offload", action="store_const", dest="engine", const="zero3", help="optimizer on the GPUs: engine zero3")
    add = command.add_argument_group("on what").add_argument
    add("--gpus", type=int, default=1, help="in all")
    add("--nodes", type=int, default=1, help="hosts that share them")
    add("--gpu", choices=[name for name in HARDWARE if name != "CPU"], default="H200", help="whose speeds to take")
    add("--gpu-memory", type=size, metavar="SIZE", help="of a GPU; without it that of --gpu")
    add("--host-memory", type=size, metavar="SIZE", help="of a node; without it no bound")
    add("--disk", metavar="DIR", help="may also keep tensors here")
    add("--disk-memory", type=size, metavar="SIZE", help="of a node's disk; without it no bound")
    add("--kernel", help="attention kernel; without it the fastest of --gpu")
    add("--measure", action="store_true", help="measure speeds on this machine's GPU instead of --gpu")
    add = command.add_argument_group("how").add_argument
    add("--mode", help="this mode alone")
    add("--seq-parallel-size", type=int, help="this many GPUs a sequence alone")
    add("--ring-degree", "--ring_degree", type=int, help="of usp_attn: this one alone")
    add("--compress", choices=["int8"], help="what is kept outside the GPU")
    add("--picture", metavar="FILE", help="draw memory over the step")
    return whole


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 1 where nothing fits, a setting is wrong, or no picture can be written."""
    from rich.console import Console

    from .report import show

    options = vars(parser().parse_args(argv))
    options.pop("command")
    picture, measure = options.pop("picture"), options.pop("measure")
    try:
        if measure:
            from .measure import measure_here

            options["gpu"] = measure_here()
        made = plan(**options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console = Console()
    show(made, console if console.is_terminal else Console(width=160))
    if picture:
        try:
            made.picture(picture)
        except (OSError, ValueError) as error:
            print(f"error: --picture {picture}: {error}", file=sys.stderr)
            return 1
    return 0
