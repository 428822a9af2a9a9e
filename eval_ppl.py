"""Perplexity of models at growing context lengths, over tokens, sharded over any number of processes.

    python eval_ppl.py -m MODEL [MODEL ...] --dataset book.txt --output-file ppl.csv
    accelerate launch --config_file accelerate_configs/single_node.yaml eval_ppl.py -m MODEL --tokenized DIR ...

Lengths go from --min-tokens to --max-tokens in steps of --tokens-step, or doubling without it. Writes
--output-file as CSV (a row a model, a column a length; plot.py draws it), the same name with `.json` (everything
measured and all settings), and with --segments a second CSV, `.segments.csv`, with a column a segment.
"""

import argparse
import csv
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tqdm import tqdm

from easy_context.engine import load_in_turns
from easy_context.evaluation.documents import choose_documents, text_documents, tokenized_documents
from easy_context.evaluation.perplexity import perplexity
from easy_context.evaluation.runtime import (
    add_model_arguments,
    context_lengths,
    leading_tokens,
    load_model,
    load_tokenizer,
    start,
)
from easy_context.script import run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", nargs="+", action="extend", required=True, help="models: hub names or directories")
    add_model_arguments(parser)
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--tokenized", help="rows of input_ids: saved data set, .jsonl, .parquet, or a hub name")
    texts.add_argument("-d", "--dataset", help="texts: .txt file or directory of them, or a hub name")
    add("-s", "--subset", help="configuration of a data set on the hub")
    add("-f", "--feature", default="text", help="column of --dataset that holds the text")
    add("--split", default="test", help="of a data set on the hub")
    add("--dataset-min-tokens", type=int, default=2, help="leave out shorter documents")
    add("--samples", type=int, help="read only so many documents")
    add("--save-tokenized", metavar="DIR", help="keep the tokens of --dataset for --tokenized")
    add("--min-tokens", type=int, default=256, help="shortest context length")
    add("--max-tokens", type=int, default=8192, help="longest context length")
    add("--tokens-step", type=int, help="from one length to the next; lengths double without it")
    add("--sliding-window", type=int, default=256, help="tokens by which windows advance over a document")
    add("--truncate", action="store_true", help="read only the first window of each document")
    add("--segments", type=integers, default=[], help="e.g. 0,8192,12288: tokens before and past 8192 apart")
    add("--output-file", type=Path, help="CSV to write")
    add("--aggressive-memory", action="store_true", help="free cached device memory after every window")
    add("--hide-progress", action="store_true", help="no bars")
    return parser.parse_args()


def integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def load_documents(args: argparse.Namespace, tokenizer) -> list[list[int]]:
    if args.tokenized:
        documents = tokenized_documents(args.tokenized, subset=args.subset, split=args.split)
    else:
        documents = text_documents(args.dataset, tokenizer, subset=args.subset, split=args.split, feature=args.feature)
    return choose_documents(
        documents, min_tokens=args.dataset_min_tokens, samples=args.samples, lead=leading_tokens(tokenizer)
    )


def save_documents(documents: list[list[int]], directory: str) -> None:
    from datasets import Dataset

    Dataset.from_dict({"input_ids": documents}).save_to_disk(directory)


def measure(name: str, lengths: list[int], args: argparse.Namespace, accelerator) -> list[dict]:
    """One record a length: tokens of the window, scored tokens, nll, perplexity, and the same of every segment."""
    tokenizer = load_tokenizer(name)
    documents = load_in_turns(accelerator, lambda: load_documents(args, tokenizer))
    if args.save_tokenized and accelerator.is_main_process:
        save_documents(documents, args.save_tokenized)
    model = load_model(
        name, accelerator, parallel_mode=args.parallel_mode, rope_theta=args.rope_theta, dtype=args.dtype
    )
    quiet = args.hide_progress or not accelerator.is_main_process
    records = []
    for length in lengths:
        whole, segments = perplexity(
            model,
            documents,
            length,
            seq_algo=args.parallel_mode,
            accelerator=accelerator,
            stride=args.sliding_window,
            truncate=args.truncate,
            lead=leading_tokens(tokenizer),
            bounds=args.segments,
            progress=partial(tqdm, desc=f"{name} at {length:,}", unit="window", disable=quiet),
            aggressive_memory=args.aggressive_memory,
        )
        records.append({"length": length, **record(whole), "segments": [record(s) for s in segments]})
        short = sum(len(ids) < length for ids in documents)
        note = f"; {short} of {len(documents)} documents are shorter" if short else ""
        accelerator.print(f"{name} at {length:,} tokens: {show(whole)}{note}")
        for segment in segments:
            accelerator.print(f"    tokens {segment.start:,} to {segment.stop:,}: {show(segment)}")
    accelerator.free_memory()
    return records


def record(segment) -> dict:
    return {**asdict(segment), "perplexity": segment.perplexity}


def show(segment) -> str:
    if segment.perplexity is None:
        return "no tokens"
    return f"perplexity {segment.perplexity:.4f} over {segment.tokens:,} tokens"


def write(args: argparse.Namespace, lengths: list[int], results: dict[str, list[dict]]) -> None:
    table = {name: [r["perplexity"] for r in records] for name, records in results.items()}
    write_csv(args.output_file, ["", *lengths], table)
    if args.segments:
        rows = {
            name if len(lengths) == 1 else f"{name} at {r['length']}": [s["perplexity"] for s in r["segments"]]
            for name, records in results.items()
            for r in records
        }
        header = ["place in the context (tokens)", *args.segments[1:]]
        write_csv(args.output_file.with_suffix(".segments.csv"), header, rows)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    report = {"settings": settings, "models": [{"model": n, "lengths": r} for n, r in results.items()]}
    args.output_file.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")


def write_csv(path: Path, header: list, rows: dict[str, list]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows([name, *values] for name, values in rows.items())


def check(args: argparse.Namespace) -> None:
    if args.samples is not None and args.samples < 1:
        raise ValueError(f"--samples {args.samples}: expected at least 1")
    if args.sliding_window < 1:
        raise ValueError(f"--sliding-window {args.sliding_window}: expected at least 1")
    if args.segments and (len(args.segments) < 2 or args.segments != sorted(set(args.segments))):
        raise ValueError("--segments: expected two or more rising borders, e.g. 0,8192,12288")
    if args.output_file and args.output_file.is_dir():
        raise ValueError(f"--output-file {args.output_file}: expected a file, this is a directory")
    if args.save_tokenized and (args.tokenized or len(args.model) > 1):
        raise ValueError("--save-tokenized keeps what --dataset gives one model's tokenizer")


def main() -> None:
    args = arguments()
    check(args)
    lengths = context_lengths(args.min_tokens, args.max_tokens, args.tokens_step)
    accelerator = start(parallel_mode=args.parallel_mode, ring_degree=args.ring_degree, dtype=args.dtype)
    if args.output_file and accelerator.is_main_process:
        args.output_file.parent.mkdir(parents=True, exist_ok=True)  # before hours of work, not after
    results = {name: measure(name, lengths, args, accelerator) for name in args.model}
    if args.output_file and accelerator.is_main_process:
        write(args, lengths, results)
        print(f"wrote {args.output_file} and {args.output_file.with_suffix('.json')}")
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
