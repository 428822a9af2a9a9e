"""The flags of train.py, and what they may be together.

`check` needs neither model, data nor GPU: it finds what is wrong before anything is loaded, and is all of a dry run.
"""

import argparse
import json
import math
from pathlib import Path

from .dataset import PACKINGS
from .engine import StepSettings, check_deepspeed_file
from .memory.plan import MemoryPlan
from .mesh import split_degrees
from .modes import available_modes
from .planner.flags import size

_COUNTS = ("seq_length", "batch_size", "gradient_accumulate_every", "max_train_steps", "eval_steps")
_RANGES = dict.fromkeys((*_COUNTS, "lora", "checkpointing_steps"), (1, math.inf))
_RANGES |= dict.fromkeys(("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm"), (0, math.inf))
_RANGES["min_lr_ratio"] = (0, 1)


def parse_args(description: str) -> argparse.Namespace:
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    add = parser.add_argument_group("model and output").add_argument
    add("--model", required=True, help="hub name or directory")
    add("--output-dir", type=Path, required=True, help="on storage that all nodes share")
    add("--overwrite-output-dir", action="store_true", help="replace the results of an earlier run")
    add("--rope-theta", type=float, help="rotary base; without it the model's own")
    add("--rope-scaling", type=json.loads, metavar="JSON", help='such as {"rope_type": "yarn", "factor": 4}')
    add("--lora", type=int, metavar="RANK", help="train LoRA adapters of this rank on all linear layers")
    add(
        "--dtype",
        choices=["bf16", "fp32"],
        default="bf16",
        help="to compute and to save in; master weights are float32",
    )
    add = parser.add_argument_group("data").add_argument
    add("--dataset", required=True, help="hub name, saved dataset, parquet or json files, text file or directory")
    add("--seq-length", type=int, default=32768, help="tokens of a sequence")
    add("--packing", choices=PACKINGS, help="join rows to full sequences, with or without attention across them")
    add("--eval-dataset", help="held-out sequences for a validation loss")
    add("--eval-steps", type=int, default=100, help="steps from one validation to the next")
    add("--num-workers", type=int, default=0, help="processes that load data, per rank")
    add("--deterministic", action="store_true", help="bit-identical runs, by slower kernels where need be")
    add("--seed", type=int, default=42, help="of the order of the data, and all else that is random")
    add = parser.add_argument_group("optimization").add_argument
    add("--batch-size", type=int, default=1, help="sequences of a micro-step, per sequence-parallel group")
    add("--gradient-accumulate-every", type=int, default=1, help="micro-steps of a step")
    add("--max-train-steps", type=int, default=400, help="steps in all")
    add("--learning-rate", type=float, default=2e-5, help="at its highest")
    add("--lr-schedule", choices=["constant", "linear", "cosine"], default="constant", help="after the warm-up")
    add("--min-lr-ratio", type=float, default=0.0, help="of the highest, where linear and cosine end")
    add("--warmup-steps", type=int, default=0, help="of linear warm-up")
    add("--adam-beta2", type=float, default=0.95, help="of AdamW; beta1 is 0.9")
    add("--weight-decay", type=float, default=0.0, help="of AdamW")
    add("--max-grad-norm", type=float, default=1.0, help="clip the global gradient norm here; 0 does not clip")
    add = parser.add_argument_group("parallelism and memory").add_argument
    modes = [*available_modes(), "auto"]
    add("--parallel_mode", choices=modes, default="zigzag_ring_attn", help="how ranks share a sequence; auto: planned")
    add("--seq-parallel-size", type=int, help="ranks that share a sequence; without it all")
    add("--ring_degree", type=int, help="ranks of a ring in usp_attn")
    how = "without --keep: offload layer inputs to the host (the default), keep them on the GPU, or checkpoint nothing"
    add("--gradient-checkpointing", choices=["offload", "plain", "none"], help=how)
    how = "what layers keep for the backward, and where: auto, attention:host, 28xattention:host,4xeverything:gpu, ..."
    add("--keep", metavar="PLAN", help=how)
    how = "with --keep: groups of heads that attention computes in turn"
    add("--head-groups", type=int, default=MemoryPlan.head_groups, help=how)
    how = "with --keep: rows that norms, projections and MLP compute at once"
    add("--tile-size", type=int, default=MemoryPlan.tile_size, help=how)
    add("--prefetch", action="store_true", help="with --keep: what layers keep comes back one layer ahead")
    add("--compress", choices=["int8"], help="with --keep: what leaves the GPU in 8 bits; not exact")
    add("--disk", metavar="DIR", help="with --keep: of the tier disk")
    how = "of a node, such as 1TB: all of it with --keep auto, with another --keep what layers may take beside weights "
    add("--host-memory", type=size, metavar="SIZE", help=f"{how}and optimizer; default: what it says it has")
    add = parser.add_argument_group("running").add_argument
    add("--checkpointing-steps", type=int, metavar="N", help="write a checkpoint every N steps")
    add("--resume", nargs="?", const="", metavar="DIR", help="from this checkpoint, or the newest complete one")
    add("--wandb", metavar="PROJECT", help="log to Weights & Biases")
    add("--tracker", nargs=2, metavar=("NAME", "DIR"), help="log to another tracker of Accelerate's, in DIR")
    add("--dry-run", action="store_true", help="check flags, parallel sizes and configuration, and stop")
    return parser.parse_args()


def check(args: argparse.Namespace, world_size: int) -> str:
    """What is going to run, in a line. ValueError for flags that cannot be; before anything is loaded or started.

    Sets `seq_parallel_size` to 1 for `data_parallel`, where it was left open."""
    for flag, (least, most) in _RANGES.items():
        if (value := getattr(args, flag)) is not None and not least <= value <= most:
            expected = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise ValueError(f"--{flag.replace('_', '-')} must be {expected}, not {value}")
    if (Path(args.model) / "adapter_config.json").is_file():
        raise ValueError(f"--model {args.model} holds adapters: merge them into their model first (merge_and_unload)")
    if args.resume is not None and args.overwrite_output_dir:
        raise ValueError("--resume needs what --overwrite-output-dir removes: give one of them")
    _check_memory(args)
    if args.parallel_mode == "data_parallel":
        if args.seq_parallel_size is None:
            args.seq_parallel_size = 1
        if args.seq_parallel_size > 1:
            raise ValueError("--parallel_mode data_parallel leaves sequences whole: leave out --seq-parallel-size")
    sp_size = world_size if args.seq_parallel_size is None else args.seq_parallel_size
    if sp_size < 1 or world_size % sp_size:
        raise ValueError(f"--seq-parallel-size {sp_size} does not divide the {world_size} processes")
    check_deepspeed_file(step_settings(args))
    if args.parallel_mode == "auto":
        return f"the planner splits {world_size} processes, {args.max_train_steps} steps, {args.dtype}"
    ring, ulysses = split_degrees(sp_size, args.ring_degree)
    groups = world_size // sp_size
    tokens = args.batch_size * args.gradient_accumulate_every * groups * args.seq_length
    ways = f"{groups} x {sp_size} processes" + (
        f" (ring {ring} x {ulysses})" if args.parallel_mode == "usp_attn" else ""
    )
    return f"{args.parallel_mode} on {ways}, {args.max_train_steps} steps of {tokens:,} tokens, {args.dtype}"


def _check_memory(args: argparse.Namespace) -> None:
    planned = args.keep == "auto" or args.keep is None and args.parallel_mode == "auto"
    names = ["head_groups", "tile_size", "prefetch", *([] if planned else ["compress", "disk", "host_memory"])]
    given = [f"--{n.replace('_', '-')}" for n in names if getattr(args, n) != getattr(MemoryPlan, n)]
    if given and planned:
        raise ValueError(f"{', '.join(given)}: the planner chooses; leave it out, or say what layers --keep")
    if given and args.keep is None:
        raise ValueError(f"{', '.join(given)} are settings of a memory plan: give --keep as well, such as --keep auto")
    if args.gradient_checkpointing is not None and (planned or args.keep is not None):
        raise ValueError("--keep takes the place of --gradient-checkpointing: give one of them")


def step_settings(args: argparse.Namespace) -> StepSettings:
    bf16 = args.dtype == "bf16"
    return StepSettings(args.batch_size, args.gradient_accumulate_every, args.max_grad_norm, bf16)
