"""From rows of training steps to a markdown table and a JSON file."""

import argparse
import json
import shlex
import sys
from datetime import date
from pathlib import Path

from report import package_version

PACKAGES = ("easy_context", "torch", "triton", "transformers", "flash-attn-4", "deepspeed")
COLUMNS = {  # title, key, format
    "time": [
        ("system", "system", ""),
        ("tokens", "tokens", "d"),
        ("seconds", "seconds", ".2f"),
        ("predicted", "predicted_seconds", ".2f"),
        ("tokens/s", "tokens_per_second", ",.0f"),
        ("causal MFU %", "mfu_percent", ".1f"),
        ("peak GPU GiB", "peak_gib", ".1f"),
        ("predicted", "predicted_gib", ".1f"),
        ("reserved GiB", "reserved_gib", ".1f"),
        ("KiB a token", "kib_per_token", ".1f"),
        ("host GiB", "host_gib", ".1f"),
        ("resident GiB", "resident_gib", ".1f"),
        ("loss", "loss", ".5f"),
        ("gradient norm", "grad_norm", ".4f"),
        ("attention", "kernel", ""),
        ("setting", "setting", ""),
    ],
    "gradients": [
        ("system", "system", ""),
        ("tokens", "tokens", "d"),
        ("loss", "loss", ".7f"),
        ("plain model", "plain_loss", ".7f"),
        ("reference", "reference_loss", ".7f"),
        ("largest error", "error", ".2e"),
        ("of the plain model", "plain_error", ".2e"),
        ("largest ratio of both", "ratio", ".2f"),
        ("at", "worst", ""),
    ],
    "drift": [
        ("system", "system", ""),
        ("tokens", "tokens", "d"),
        ("steps", "steps", "d"),
        ("deterministic", "deterministic", ""),
        ("all finite", "finite", ""),
        ("first loss", "first_loss", ".5f"),
        ("last loss", "last_loss", ".5f"),
        ("tiers bit-identical", "identical_tiers", ""),
        ("equal runs bit-identical", "identical_again", ""),
        ("tiers apart", "apart_tiers", ".1e"),
        ("equal runs apart", "apart_again", ".1e"),
        ("seconds on the GPU", "seconds_gpu", ".3f"),
        ("with tiers", "seconds_tiers", ".3f"),
        ("slower %", "slower_percent", ".1f"),
        ("setting", "setting", ""),
    ],
}
METHOD = {
    "time": (
        "forward, backward and the average of gradients over the GPUs, without an optimizer; median of {repeats} steps "
        "after {warmup}; causal MFU counts 3 x (halved attention + linear) over the data sheet's peak; KiB a token: "
        "peak GPU memory beyond weights and gradients, which exist throughout; expandable_segments:True for all; "
        "predicted: by the planner"
    ),
    "gradients": (
        "error of a weight's gradient over its norm, against the plain model in a higher precision; the plain model "
        "keeps its logits whole and calls scaled_dot_product_attention"
    ),
    "drift": (
        "gradient descent on one batch, three times from the same weights; apart: the largest distance of a weight or "
        "gradient after the last step to that of the first run, over its norm"
    ),
}


def write(rows: list[dict], args: argparse.Namespace, final: bool) -> None:
    """Write the files that `args` asks for; print the newest row or, at the end, the table."""
    task = "gradients" if args.check_gradients else "drift" if args.steps_for_drift else "time"
    device = next((row["device"] for row in rows if "device" in row), "")
    about = _about(args, device, METHOD[task].format(**vars(args)))
    table = _markdown(rows, COLUMNS[task])
    text = "\n".join([*(f"{name}: {value}  " for name, value in about.items()), "", *table, ""])
    print(text if final else table[-1], flush=True)
    if args.output:
        output = Path(args.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_name(output.name + ".md").write_text(text)
        output.with_name(output.name + ".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def _about(args: argparse.Namespace, device: str, method: str) -> dict[str, str]:
    heads = f"{args.heads} query and {args.kv_heads} KV heads of {args.head_size}"
    work = f"{args.layers} layers, hidden {args.hidden}, intermediate {args.intermediate}, {heads}"
    return {
        "Command": shlex.join(["python", *sys.argv]),
        "Date": date.today().isoformat(),
        "Device": f"{args.gpus} x {device}" if args.gpus > 1 else device,
        "Method": method,
        "Work": f"Llama with random weights, {work}, vocabulary {args.vocab}, {args.dtype}",
        "Versions": ", ".join(f"{name} {found}" for name in PACKAGES if (found := package_version(name))),
    }


def _markdown(rows: list[dict], columns: list[tuple[str, str, str]]) -> list[str]:
    lines = [[title for title, _, _ in columns], ["---:" if form else "---" for _, _, form in columns]]
    for row in rows:
        if "failure" in row:
            failed = f"does not run here: {row['failure']}".replace("|", "/")
            lines.append([row["system"], str(row["tokens"]), failed, *[""] * (len(columns) - 3)])
        else:
            lines.append([_cell(row.get(key), form) for _, key, form in columns])
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _cell(value, form: str) -> str:
    if value is None:
        return ""
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:{form}}"
