"""What a training step achieved: model FLOPs against the device's peak (MFU), tokens per second, peak memory; and
the seconds of a call.

MFU counts the FLOPs that the model needs, not those that a run spends: no recomputation, half of the
attention matrix under the causal mask, nothing for elementwise work. Forward, per token: 2 per weight of a
matrix product, and 2 S d a layer for attention over S tokens, d = heads x head size
(https://arxiv.org/abs/2204.02311, appendix B, halved for causality). The backward takes twice as much;
weights that are frozen need no gradient of their own.
"""

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn
from tqdm import tqdm

# Dense bf16 FLOP/s from the vendors' data sheets; the first name that occurs in the device's name counts.
PEAK_BF16 = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX A6000": 155e12,
    "A10G": 70e12,
    "MI300X": 1307e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the device, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_BF16.items() if known in name), None)


def flops_per_token(model: nn.Module, seq_length: int) -> float:
    """FLOPs of forward and backward per token of sequences of `seq_length`.

    Counts every `nn.Linear` once: dense models, LoRA's included; experts of a mixture are not seen. Weights
    that DeepSpeed holds in shards count whole."""
    linear = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights = getattr(module.weight, "ds_numel", module.weight.numel())
            linear += weights * (6 if module.weight.requires_grad else 4)
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return linear + 6 * seq_length * config.num_attention_heads * head_size * config.num_hidden_layers


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the median of 5, after one that warms up. On a GPU until it is done."""
    samples = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - began)
    return median(samples[1:])


def peak_memory_gib(device: torch.device) -> float:
    """The most that this process has held so far: on a GPU in tensors, on the CPU of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


class Reporter:
    """Tells of every step: in `metrics.jsonl`, to the trackers, on a progress bar."""

    def __init__(self, accelerator, path: Path, *, start: int, steps: int, tokens: int, flops: float):
        """Start after step `start` of `steps`, each of `tokens` and `flops` on all devices together. Records of later
        steps in the file are dropped: an earlier run went on beyond the checkpoint from which this one resumes. So is
        a last line that was cut off."""
        self.accelerator, self.path, self.tokens, self.flops = accelerator, path, tokens, flops
        peak = peak_flops(accelerator.device)
        self.peak = peak and peak * accelerator.num_processes
        if accelerator.is_main_process:
            lines = path.read_text().splitlines(keepends=True) if start and path.exists() else []
            whole = (line for line in lines if line.endswith("\n"))
            path.write_text("".join(line for line in whole if json.loads(line)["step"] <= start))
        self.bar = tqdm(total=steps, initial=start, unit="step", disable=not accelerator.is_main_process)

    def __call__(self, record: dict, seconds: float) -> None:
        """Complete and report a step's record (`step`, `loss`, ...); every rank calls it."""
        from accelerate.utils import gather_object

        record["seconds"] = seconds
        record["tokens_per_second"] = self.tokens / seconds
        record["mfu"] = self.peak and self.flops / seconds / self.peak
        record["peak_memory_gib"] = max(gather_object([peak_memory_gib(self.accelerator.device)]))
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        known = {name: value for name, value in record.items() if value is not None}
        self.accelerator.log(known, step=record["step"])
        self.bar.set_postfix_str(progress_line(record), refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def progress_line(record: dict) -> str:
    """A step's record in one line; what is not known is left out."""
    mfu = "" if record["mfu"] is None else f", MFU {record['mfu']:.1%}"
    held_out = f", eval {record['eval_loss']:.4f}" if "eval_loss" in record else ""
    speed = f"{record['tokens_per_second']:,.0f} tok/s{mfu}, peak {record['peak_memory_gib']:.1f} GiB"
    return f"loss {record['loss']:.4f}{held_out}, {speed}"
