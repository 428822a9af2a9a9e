"""Extend a model's context: train it on sequences that are split over many processes.

    accelerate launch --config_file accelerate_configs/single_node.yaml train.py --model MODEL --dataset DATA ...
    python train.py ...                                              # one process, with or without a GPU

Batch sizes, learning rate, schedule and clipping are set by the flags alone; a DeepSpeed JSON leaves them out or says
"auto". Writes the model, its tokenizer, metrics.jsonl and checkpoints/step_N to --output-dir.
"""

import argparse
import math
import os
import shutil
import time
from itertools import islice
from pathlib import Path

import torch
from accelerate import skip_first_batches
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import easy_context as ec
from easy_context.checkpoint import find_checkpoint, save_checkpoint, save_model
from easy_context.data import collate, load_tokenized
from easy_context.engine import StepSettings, check_deepspeed_file, load_in_turns, make_accelerator
from easy_context.loss import CausalLMWithLoss, global_num_items
from easy_context.mesh import current_mesh, split_degrees
from easy_context.metrics import MetricsFile, flops_per_token, peak_flops, peak_memory_gib, progress_line
from easy_context.modes import available_modes
from easy_context.rope import set_rope
from easy_context.script import run

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument_group("model and output").add_argument
    add("--model", required=True, help="hub name or directory")
    add("--output-dir", type=Path, required=True, help="on storage that all nodes share")
    add("--overwrite-output-dir", action="store_true", help="remove the checkpoints and metrics of an earlier run")
    add("--rope-theta", type=float, help="rotary base; the model's own without it")
    add("--lora", type=int, metavar="RANK", help="train LoRA adapters of this rank on all linear layers")
    add("--dtype", choices=DTYPES, default="bf16", help="of computing and of the saved model; masters are fp32")
    add = parser.add_argument_group("data").add_argument
    add("--dataset", required=True, help="hub name, saved dataset, parquet/json files, text file or directory of text")
    add("--seq-length", type=int, default=32768, help="tokens a sequence")
    add("--eval-dataset", help="sequences for a validation loss")
    add("--eval-steps", type=int, default=100, help="steps between validations")
    add("--num-workers", type=int, default=0, help="processes that load data, per rank")
    add("--seed", type=int, default=42)
    add = parser.add_argument_group("optimization").add_argument
    add("--batch-size", type=int, default=1, help="sequences per micro-step and sequence-parallel group")
    add("--gradient-accumulate-every", type=int, default=1, help="micro-steps a step")
    add("--max-train-steps", type=int, default=400)
    add("--learning-rate", type=float, default=2e-5, help="its highest value")
    add("--lr-schedule", choices=["constant", "linear", "cosine"], default="constant", help="after the warm-up")
    add("--min-lr-ratio", type=float, default=0.0, help="of the highest value, at the end of the schedule")
    add("--warmup-steps", type=int, default=0, help="steps of linear warm-up")
    add("--adam-beta2", type=float, default=0.95)
    add("--weight-decay", type=float, default=0.0)
    add("--max-grad-norm", type=float, default=1.0, help="clip the global gradient norm; 0 does not clip")
    add = parser.add_argument_group("parallelism and memory").add_argument
    add("--parallel_mode", choices=available_modes(), default="zigzag_ring_attn", help="how ranks share a sequence")
    add("--seq-parallel-size", type=int, help="ranks that share a sequence; all without it")
    add("--ring_degree", type=int, help="ranks of a ring in usp_attn; chosen without it")
    add(
        "--gradient-checkpointing", choices=["offload", "plain", "none"], default="offload", help="offload: to the host"
    )
    add = parser.add_argument_group("running").add_argument
    add("--checkpointing-steps", type=int, metavar="N", help="write a checkpoint every N steps")
    add("--resume", nargs="?", const="", metavar="DIR", help="from this checkpoint, or the newest complete one")
    add("--wandb", metavar="PROJECT", help="log to Weights & Biases")
    add("--tracker", nargs=2, metavar=("NAME", "DIR"), help="log to a tracker that Accelerate knows, in DIR")
    add(
        "--dry-run", action="store_true", help="check flags, parallel sizes and configuration, print the plan, and stop"
    )
    return parser.parse_args()


def check(args: argparse.Namespace, world_size: int) -> tuple[int, int, int]:
    """The degrees data, ring and Ulysses of `world_size` processes. ValueError for flags that cannot be."""
    for flag in ("seq_length", "batch_size", "gradient_accumulate_every", "max_train_steps", "eval_steps"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1")
    if args.resume is not None and args.overwrite_output_dir:
        raise ValueError("--resume needs what --overwrite-output-dir removes: give one of them")
    if args.parallel_mode == "data_parallel":
        if args.seq_parallel_size not in (None, 1):
            raise ValueError("--parallel_mode data_parallel leaves sequences whole: leave out --seq-parallel-size")
        args.seq_parallel_size = 1
    check_deepspeed_file(step_settings(args))
    sp_size = world_size if args.seq_parallel_size is None else args.seq_parallel_size
    if sp_size < 1 or world_size % sp_size:
        raise ValueError(f"--seq-parallel-size {sp_size} does not divide the {world_size} processes")
    return world_size // sp_size, *split_degrees(sp_size, args.ring_degree)


def step_settings(args: argparse.Namespace) -> StepSettings:
    return StepSettings(args.batch_size, args.gradient_accumulate_every, args.max_grad_norm, bf16=args.dtype == "bf16")


def plan(args: argparse.Namespace, degrees: tuple[int, int, int], config) -> str:
    """What is going to run, in words."""
    data, ring, ulysses = degrees
    sequences = args.batch_size * args.gradient_accumulate_every * data
    model = "not on this machine" if config is None else f"{config.model_type}, {config.rope_parameters}"
    return (
        f"model      {args.model} ({model})\n"
        f"parallel   {args.parallel_mode}: {data} groups of {ring * ulysses} (ring {ring} x Ulysses {ulysses})\n"
        f"step       {sequences} sequences x {args.seq_length:,} = {sequences * args.seq_length:,} tokens, {args.dtype}\n"
        f"schedule   {args.max_train_steps} steps, {args.lr_schedule} from {args.learning_rate:g}, "
        f"{args.warmup_steps} of warm-up\n"
        f"output     {args.output_dir}"
    )


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Of step 0, 1, ...: a pure function, so nothing of it has to be saved."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_train_steps - args.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[args.lr_schedule]
    return args.learning_rate * (args.min_lr_ratio + (1 - args.min_lr_ratio) * shape)


def build_model(args: argparse.Namespace, config, deepspeed: bool) -> CausalLMWithLoss:
    """The model, patched for the mode, in float32 except where masters are kept elsewhere or it is frozen."""
    ec.apply_seq_parallel_monkey_patch(args.parallel_mode, config.model_type)
    dtype = DTYPES[args.dtype] if deepspeed or args.lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, config=config, dtype=dtype)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    if args.gradient_checkpointing == "offload":
        ec.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    if args.gradient_checkpointing != "none":
        model.gradient_checkpointing_enable()
    return CausalLMWithLoss(model)


def claim_output_dir(args: argparse.Namespace, accelerator) -> None:
    used = args.output_dir.is_dir() and any(args.output_dir.iterdir())
    [used] = broadcast_object_list([used])
    if used and args.resume is None and not args.overwrite_output_dir:
        raise ValueError(f"--output-dir {args.output_dir} is in use: --resume, --overwrite-output-dir, or another one")
    if accelerator.is_main_process:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        if args.overwrite_output_dir:
            shutil.rmtree(args.output_dir / "checkpoints", ignore_errors=True)


def load_inputs(args: argparse.Namespace):
    """Configuration, tokenizer, sequences to train on, and sequences to validate with or None."""
    config = AutoConfig.from_pretrained(args.model)
    if args.rope_theta is not None:
        set_rope(config, theta=args.rope_theta)
    if config.rope_parameters.get("rope_type") in ("default", "llama3"):  # the others compute with it
        config.max_position_embeddings = max(config.max_position_embeddings, args.seq_length)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = load_tokenized(args.dataset, tokenizer=tokenizer, seq_length=args.seq_length)
    held_out = args.eval_dataset and load_tokenized(args.eval_dataset, tokenizer=tokenizer, seq_length=args.seq_length)
    return config, tokenizer, rows, held_out


def micro_batches(loader, consumed: int):
    """Batches for ever, epoch by epoch, without the first `consumed`."""
    epoch, skip = divmod(consumed, len(loader))
    while True:
        loader.set_epoch(epoch)
        yield from skip_first_batches(loader, skip) if skip else loader
        epoch, skip = epoch + 1, 0


def shard(batch: dict, args: argparse.Namespace, accelerator) -> dict:
    """This rank's share of a batch, as keyword arguments of the model."""
    place = accelerator.process_index, accelerator.num_processes, accelerator.device
    local = ec.prepare_seq_parallel_inputs(args.parallel_mode, batch["input_ids"], None, batch["target_ids"], *place)
    return {name.removeprefix("local_"): tensor for name, tensor in local.items()}


@torch.no_grad()
def evaluate(model, loader, args: argparse.Namespace, accelerator) -> float:
    """Mean loss over all target tokens of the held-out sequences."""
    model.eval()
    mesh, total, count = current_mesh(), 0.0, 0
    for index, batch in enumerate(loader):
        row = (index * mesh.data_size + mesh.data_rank) * args.batch_size
        batch["target_ids"][max(0, len(loader.dataset) - row) :] = -100  # rows repeated to fill up the last batches
        inputs = shard(batch, args, accelerator)
        total += float(model(**inputs, num_items=1)[1])
        count += int(global_num_items(inputs["target_ids"]))
    model.train()
    return total / max(1, count)


def train_step(model, optimizer, batches: list[dict], step: int, args: argparse.Namespace, accelerator) -> dict:
    """One optimizer step: the token mean over all micro-batches and ranks, and the gradient norm before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args)
    batches = [shard(batch, args, accelerator) for batch in batches]
    num_items = global_num_items(batch["target_ids"] for batch in batches)
    loss = 0.0
    for inputs in batches:
        with accelerator.accumulate(model):
            scaled, reported = model(**inputs, num_items=num_items)
            accelerator.backward(scaled * len(batches))  # which divides by their number
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
        loss += float(reported)
    if not math.isfinite(loss + float(norm)):
        raise ValueError(f"step {step + 1}: loss {loss}, gradient norm {float(norm)}: lower --learning-rate")
    return {"step": step + 1, "loss": loss, "grad_norm": float(norm), "lr": learning_rate(step, args)}


def main() -> None:
    args = parse_args()
    degrees = check(args, int(os.environ.get("WORLD_SIZE", 1)))
    if args.dry_run:
        config = AutoConfig.from_pretrained(args.model) if Path(args.model).is_dir() else None
        return print(plan(args, degrees, config))

    trackers = [args.tracker[0]] if args.tracker else ["wandb"] if args.wandb else []
    tracker_dir = args.tracker[1] if args.tracker else str(args.output_dir)
    accelerator = make_accelerator(step_settings(args), seed=args.seed, trackers=trackers, tracker_dir=tracker_dir)
    mesh = ec.init_seq_parallel(args.seq_parallel_size, args.ring_degree)
    claim_output_dir(args, accelerator)
    set_seed(args.seed)
    config, tokenizer, rows, held_out = load_in_turns(accelerator, lambda: load_inputs(args))
    accelerator.print(plan(args, degrees, config))

    if len(rows) < args.batch_size * mesh.data_size:
        raise ValueError(f"--dataset has {len(rows)} sequences, fewer than --batch-size x {mesh.data_size} groups")
    options = {"batch_size": args.batch_size, "collate_fn": collate, "num_workers": args.num_workers}
    loader = DataLoader(rows, shuffle=True, drop_last=True, **options)
    loader = ec.prepare_dataloader(args.parallel_mode, loader, accelerator)
    if held_out is not None:
        held_out = ec.prepare_dataloader(args.parallel_mode, DataLoader(held_out, **options), accelerator)

    model = build_model(args, config, deepspeed=accelerator.state.deepspeed_plugin is not None)
    flops = flops_per_token(model, args.seq_length)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    betas = (0.9, args.adam_beta2)
    optimizer = torch.optim.AdamW(weights, lr=args.learning_rate, betas=betas, weight_decay=args.weight_decay)
    model, optimizer = accelerator.prepare(model, optimizer)

    # what a resumed run has to share with this one, for the same data in the same order
    same = {"--seq-length": args.seq_length, "--batch-size": args.batch_size, "--seed": args.seed, "--lora": args.lora}
    same |= {"--gradient-accumulate-every": args.gradient_accumulate_every, "sequences in --dataset": len(rows)}
    same |= {"data-parallel groups": mesh.data_size, "engine": accelerator.distributed_type.value}
    checkpoints, start = args.output_dir / "checkpoints", 0
    if args.resume is not None:
        found, start = find_checkpoint(args.resume, checkpoints, accelerator, same)
        accelerator.load_state(str(found))
        accelerator.print(f"resumed from {found}")
    if trackers:
        accelerator.init_trackers(args.wandb or "easy_context", config=vars(args))
    file = MetricsFile(args.output_dir / "metrics.jsonl", start) if accelerator.is_main_process else None
    bar = tqdm(total=args.max_train_steps, initial=start, unit="step", disable=not accelerator.is_main_process)

    tokens = args.batch_size * args.gradient_accumulate_every * mesh.data_size * args.seq_length
    peak = peak_flops(accelerator.device)
    batches = micro_batches(loader, start * args.gradient_accumulate_every)
    model.train()
    for step in range(start, args.max_train_steps):
        began = time.perf_counter()
        step_batches = list(islice(batches, args.gradient_accumulate_every))
        record = train_step(model, optimizer, step_batches, step, args, accelerator)
        seconds = time.perf_counter() - began
        record |= {"tokens_per_second": tokens / seconds, "seconds": seconds}
        record["mfu"] = peak and flops * tokens / seconds / (peak * accelerator.num_processes)
        record["peak_memory_gib"] = max(gather_object([peak_memory_gib(accelerator.device)]))
        last = step + 1 == args.max_train_steps
        if held_out is not None and (last or (step + 1) % args.eval_steps == 0):
            record["eval_loss"] = evaluate(model, held_out, args, accelerator)
        if file is not None:
            file.append(record)
        accelerator.log({name: value for name, value in record.items() if value is not None}, step=step + 1)
        bar.set_postfix_str(progress_line(record), refresh=False)
        bar.update()
        if args.checkpointing_steps and (step + 1) % args.checkpointing_steps == 0:
            save_checkpoint(accelerator, checkpoints, step + 1, same)
    bar.close()
    save_model(accelerator, model, config, tokenizer, args.output_dir, DTYPES[args.dtype])
    accelerator.print(f"saved the model to {args.output_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
