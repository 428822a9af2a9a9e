"""Needle in a haystack: a number hidden at every depth of contexts of every length, and whether it is found.

    python eval_needle.py --model MODEL --min_context_length 2048 --max_context_length 8192 --output-dir needle
    accelerate launch --config_file accelerate_configs/single_node.yaml eval_needle.py --model MODEL ...

Writes needle.png (a heat map), needle.csv (a row a cell) and needle.json (every trial, all settings) to --output-dir.
"""

import argparse
import csv
import json
from functools import partial
from pathlib import Path

from tqdm import tqdm

from easy_context.engine import load_in_turns
from easy_context.evaluation.haystack import haystack_sentences
from easy_context.evaluation.heatmap import draw_heatmap
from easy_context.evaluation.needle import build_prompt, depth_grid, predict_answers, tokenize_pieces
from easy_context.evaluation.runtime import add_model_arguments, context_lengths, load_model, load_tokenizer, start
from easy_context.script import run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="hub name or directory")
    add_model_arguments(parser)
    add("--min_context_length", type=int, default=4096, help="shortest context, prompt and answer, in tokens")
    add("--max_context_length", type=int, default=32768, help="longest context")
    add("--context_interval", type=int, help="from one length to the next; lengths double without it")
    add("--depth_interval", type=float, default=0.25, help="from one depth to the next, between 0 and 1")
    add("--num_samples", type=int, default=1, help="trials a cell")
    add("--rnd_number_digits", type=int, default=7, help="digits of the hidden number")
    add("--num_distractor", type=int, default=0, help="like sentences with other cities and numbers")
    add("--haystack_dir", help="*.txt files to hide it in; prose that comes with Python if not given")
    add("--seed", type=int, default=0, help="of cities, numbers and places in the haystack")
    add("--output-dir", "--output_dir", type=Path, default=Path("needle"), help="for picture, table and trials")
    return parser.parse_args()


def load_haystack(args: argparse.Namespace, tokenizer, accelerator) -> list[list[int]]:
    sentences = load_in_turns(accelerator, lambda: haystack_sentences(args.haystack_dir))
    haystack = tokenize_pieces(tokenizer, [f" {sentence}" for sentence in sentences])
    tokens = sum(map(len, haystack))
    if not tokens:
        raise ValueError(f"--haystack_dir {args.haystack_dir}: the tokenizer of --model has no tokens for its text")
    accelerator.print(f"haystack: {tokens:,} tokens in {len(haystack):,} sentences")
    if tokens < args.max_context_length:
        accelerator.print("longer contexts repeat it: give more text by --haystack_dir to avoid that")
    return haystack


def evaluate(args: argparse.Namespace, lengths: list[int], accelerator) -> list[dict]:
    """One record a trial: length, depth, sample, city, number, where the needle is, what was predicted."""
    tokenizer = load_tokenizer(args.model)
    haystack = load_haystack(args, tokenizer, accelerator)
    cells = [(depth, sample) for depth in depth_grid(args.depth_interval) for sample in range(args.num_samples)]
    prompt = partial(
        build_prompt,
        tokenizer,
        haystack,
        seed=args.seed,
        digits=args.rnd_number_digits,
        distractors=args.num_distractor,
    )
    prompt(length=lengths[0], depth=0.0)  # whatever the settings make impossible shows before the model loads
    model = load_model(
        args.model, accelerator, parallel_mode=args.parallel_mode, rope_theta=args.rope_theta, dtype=args.dtype
    )
    trials = []
    for length in lengths:
        prompts = [prompt(length=length, depth=depth, sample=sample) for depth, sample in cells]
        bar = partial(tqdm, desc=f"{length:,} tokens", unit="prompt", disable=not accelerator.is_main_process)
        answers = predict_answers(model, prompts, seq_algo=args.parallel_mode, accelerator=accelerator, progress=bar)
        trials += [
            {
                "context_length": length,
                "depth": depth,
                "sample": sample,
                "city": p.city,
                "number": p.number,
                "predicted": tokenizer.decode(answer),
                "correct": answer == p.answer,
                "needle_start": p.needle_start,
            }
            for (depth, sample), p, answer in zip(cells, prompts, answers, strict=True)
        ]
        found = sum(trial["correct"] for trial in trials[-len(cells) :])
        accelerator.print(f"{length:,} tokens: {found} of {len(cells)} found")
    return trials


def accuracies(trials: list[dict]) -> dict[tuple[int, float], float]:
    """Accuracy by (context length, depth)."""
    cells: dict[tuple[int, float], list[bool]] = {}
    for trial in trials:
        cells.setdefault((trial["context_length"], trial["depth"]), []).append(trial["correct"])
    return {cell: sum(correct) / len(correct) for cell, correct in cells.items()}


def write(args: argparse.Namespace, trials: list[dict]) -> None:
    cells = accuracies(trials)
    with (args.output_dir / "needle.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["context_length", "depth", "samples", "accuracy"])
        writer.writerows([length, depth, args.num_samples, value] for (length, depth), value in cells.items())
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    mean = sum(trial["correct"] for trial in trials) / len(trials)
    report = {"settings": settings, "accuracy": mean, "trials": trials}
    (args.output_dir / "needle.json").write_text(json.dumps(report, indent=2) + "\n")
    draw_heatmap(cells, f"{Path(args.model).name}: {mean:.0%} of {len(trials)} found", args.output_dir / "needle.png")


def main() -> None:
    args = arguments()
    if args.num_samples < 1:
        raise ValueError(f"--num_samples {args.num_samples}: expected at least 1")
    lengths = context_lengths(args.min_context_length, args.max_context_length, args.context_interval)
    accelerator = start(parallel_mode=args.parallel_mode, ring_degree=args.ring_degree, dtype=args.dtype)
    if accelerator.is_main_process:
        args.output_dir.mkdir(parents=True, exist_ok=True)  # before hours of work, not after
    trials = evaluate(args, lengths, accelerator)
    if accelerator.is_main_process:
        write(args, trials)
        print(f"wrote needle.png, needle.csv and needle.json to {args.output_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
