"""Extend a model's context: train it on sequences that are split over many processes.

    accelerate launch --config_file accelerate_configs/single_node.yaml train.py --model MODEL --dataset DATA ...
    python train.py ...                                              # one process, with or without a GPU

Batch sizes, learning rate, schedule and clipping are set by the flags alone; a DeepSpeed JSON leaves them out or says
"auto". Writes the model, its tokenizer, metrics.jsonl and checkpoints/step_N to --output-dir.
"""

import functools
import logging
import math
import os
import time
from argparse import Namespace
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import easy_context as ec
from easy_context.checkpoint import claim_output_dir, find_checkpoint, load_checkpoint, save_checkpoint, save_model
from easy_context.data import check_ids, collate, micro_batches
from easy_context.dataset import load_tokenized
from easy_context.engine import load_in_turns, make_accelerator
from easy_context.loss import CausalLMWithLoss, global_num_items
from easy_context.memory.zero_host import exact_pinning, hold_once, let_go
from easy_context.mesh import current_mesh
from easy_context.metrics import Reporter, flops_per_token
from easy_context.planner import settle
from easy_context.rope import set_rope
from easy_context.script import run
from easy_context.train_flags import check, parse_args, step_settings

logger = logging.getLogger("easy_context")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_config(args: Namespace):
    config = AutoConfig.from_pretrained(args.model)
    if args.rope_theta is not None or args.rope_scaling:
        set_rope(config, theta=args.rope_theta, scaling=args.rope_scaling)
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rotation in ("default", "llama3"):  # others compute their frequencies with it
        config.max_position_embeddings = max(config.max_position_embeddings, args.seq_length)
    return config


def load_inputs(args: Namespace):
    """Tokenizer, sequences to train on, and held-out ones or None."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    settings = {"tokenizer": tokenizer, "seq_length": args.seq_length, "packing": args.packing}
    rows = load_tokenized(args.dataset, **settings)
    held_out = args.eval_dataset and load_tokenized(args.eval_dataset, **settings)
    return tokenizer, rows, held_out


def build_model(args: Namespace, config, memory_plan: ec.MemoryPlan | None, deepspeed: bool) -> CausalLMWithLoss:
    """The model, patched for the mode; in float32, except where DeepSpeed keeps masters or the weights are frozen."""
    ec.apply_seq_parallel_monkey_patch(args.parallel_mode, config.model_type)
    dtype = DTYPES[args.dtype] if deepspeed or args.lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, config=config, dtype=dtype)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    if memory_plan is not None:
        ec.apply_memory_plan(model, memory_plan)
        return CausalLMWithLoss(model)
    if args.gradient_checkpointing in (None, "offload"):
        ec.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    if args.gradient_checkpointing != "none":
        enable = getattr(model, "activation_checkpointing_enable", None)  # its name in newer transformers
        (enable or model.gradient_checkpointing_enable)()
    return CausalLMWithLoss(model)


def learning_rate(step: int, args: Namespace) -> float:
    """Of step 0, 1, ...; a pure function, so that nothing of it has to be saved."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_train_steps - args.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[args.lr_schedule]
    return args.learning_rate * (args.min_lr_ratio + (1 - args.min_lr_ratio) * shape)


def shard(batch: dict, args: Namespace, accelerator) -> dict:
    """This rank's share of a batch, as keyword arguments of the model."""
    place = accelerator.process_index, accelerator.num_processes, accelerator.device
    tensors = (batch[name] for name in ("input_ids", "position_ids", "target_ids"))
    local = ec.prepare_seq_parallel_inputs(args.parallel_mode, *tensors, *place)
    return {name.removeprefix("local_"): tensor for name, tensor in local.items()}


@functools.cache
def say_no_targets() -> None:
    logger.warning("a step without a token to predict: all labels are -100, or loss_mask is 0; its loss is 0")


def train_step(model, optimizer, batches: list[dict], step: int, args: Namespace, accelerator) -> dict:
    """One optimizer step: loss is the token mean over all micro-batches and ranks, grad_norm is before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args)
    check_ids(batches, accelerator.unwrap_model(model).config.vocab_size)
    shards = [shard(batch, args, accelerator) for batch in batches]
    num_items = global_num_items(inputs["target_ids"] for inputs in shards)
    loss = 0.0
    for inputs in shards:
        with accelerator.accumulate(model):
            scaled, reported = model(**inputs, num_items=num_items)
            accelerator.backward(scaled * len(shards))  # it divides by their number; num_items has done so
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
        loss += float(reported)
    if not math.isfinite(loss + float(norm)):
        raise ValueError(f"step {step + 1}: loss {loss}, gradient norm {float(norm)}: lower --learning-rate")
    if not num_items:
        say_no_targets()
    return {"step": step + 1, "loss": loss, "grad_norm": float(norm), "lr": learning_rate(step, args)}


@torch.no_grad()
def evaluate(model, loader, args: Namespace, accelerator) -> float:
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


def main() -> None:
    args = parse_args(__doc__.partition("\n")[0])
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    summary = check(args, int(os.environ.get("WORLD_SIZE", 1)))
    if args.dry_run:
        local = Path(args.model).is_dir()
        print(f"{summary}; {load_config(args).rope_parameters if local else f'{args.model} is not a local directory'}")
        return

    tracker, tracker_dir = args.tracker or ("wandb" if args.wandb else None, args.output_dir)
    accelerator = make_accelerator(step_settings(args), seed=args.seed, tracker=tracker, tracker_dir=tracker_dir)
    config = load_in_turns(accelerator, lambda: load_config(args))
    memory_plan = settle(args, config, accelerator)
    mesh = ec.init_seq_parallel(args.seq_parallel_size, args.ring_degree)
    claim_output_dir(args.output_dir, accelerator, resume=args.resume is not None, overwrite=args.overwrite_output_dir)
    set_seed(args.seed, deterministic=args.deterministic)
    tokenizer, rows, held_out = load_in_turns(accelerator, lambda: load_inputs(args))
    if len(rows) < args.batch_size * mesh.data_size:
        raise ValueError(f"--dataset has {len(rows)} sequences, fewer than --batch-size x {mesh.data_size} groups")
    accelerator.print(f"{summary}; {len(rows)} sequences")

    options = {"batch_size": args.batch_size, "collate_fn": collate, "num_workers": args.num_workers}
    loader = DataLoader(rows, shuffle=True, drop_last=True, **options)
    loader = ec.prepare_dataloader(args.parallel_mode, loader, accelerator)
    held_out = held_out and ec.prepare_dataloader(args.parallel_mode, DataLoader(held_out, **options), accelerator)

    with exact_pinning(accelerator.device):
        model = build_model(args, config, memory_plan, deepspeed=accelerator.state.deepspeed_plugin is not None)
        flops = flops_per_token(model, args.seq_length)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        betas = (0.9, args.adam_beta2)
        optimizer = torch.optim.AdamW(weights, lr=args.learning_rate, betas=betas, weight_decay=args.weight_decay)
        model, optimizer = accelerator.prepare(model, optimizer)
    hold_once(model, host_memory=args.host_memory)

    # what a resumed run must share with the one before, so that data and state go on where they were
    flags = ("seq_length", "batch_size", "gradient_accumulate_every", "seed", "lora")
    same = {f"--{flag.replace('_', '-')}": getattr(args, flag) for flag in flags}
    same |= {"sequences": len(rows), "groups": mesh.data_size, "engine": accelerator.distributed_type.value}
    checkpoints, start = args.output_dir / "checkpoints", 0
    if args.resume is not None:
        found, start = find_checkpoint(args.resume, checkpoints, accelerator, same)
        if start > args.max_train_steps:
            raise ValueError(f"--max-train-steps {args.max_train_steps}: {found} is that of step {start}")
        load_checkpoint(accelerator, found)
        accelerator.print(f"resumed from {found}, step {start} of {args.max_train_steps}")
    if tracker:
        accelerator.init_trackers(args.wandb or "easy_context", config={k: str(v) for k, v in vars(args).items()})

    tokens = args.batch_size * args.gradient_accumulate_every * mesh.data_size * args.seq_length
    amount = {"start": start, "steps": args.max_train_steps, "tokens": tokens, "flops": flops * tokens}
    report = Reporter(accelerator, args.output_dir / "metrics.jsonl", **amount)
    batches = micro_batches(loader, consumed=start * args.gradient_accumulate_every)
    model.train()
    for step in range(start, args.max_train_steps):
        began = time.perf_counter()
        taken = list(islice(batches, args.gradient_accumulate_every))
        record = train_step(model, optimizer, taken, step, args, accelerator)
        seconds, done = time.perf_counter() - began, step + 1
        if held_out and (done % args.eval_steps == 0 or done == args.max_train_steps):
            record["eval_loss"] = evaluate(model, held_out, args, accelerator)
        report(record, seconds)
        if args.checkpointing_steps and done % args.checkpointing_steps == 0:
            save_checkpoint(accelerator, checkpoints, done, same)
    report.close()
    let_go(model)
    save_model(accelerator, model, config, tokenizer, args.output_dir, DTYPES[args.dtype])
    accelerator.print(f"saved the model to {args.output_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
