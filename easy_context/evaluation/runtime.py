"""What both evaluation scripts share: common flags, the processes, the model with the seam, whose turn it is.

The ranks of a sequence-parallel group hold one text together; in mode `data_parallel` every rank is a group
of its own and takes other texts. Sums over all ranks then hold for every mode and any number of processes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ..engine import StepSettings, make_accelerator
from ..mesh import init_seq_parallel
from ..modes import get_mode

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Item = TypeVar("Item")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say how a model runs."""
    add = parser.add_argument
    add("--parallel_mode", "--parallel-mode", default="zigzag_ring_attn", help="how the ranks share a text")
    add("--ring_degree", "--ring-degree", type=int, help="ranks of a ring in usp_attn")
    add("--rope_theta", "--rope-theta", type=float, help="rotary base, instead of the model's own")
    add("--dtype", choices=DTYPES, default="bf16", help="of the weights")


def context_lengths(shortest: int, longest: int, step: int | None) -> list[int]:
    """From `shortest` up to `longest` tokens: in steps, or doubling without. ValueError where that is nothing."""
    if not 2 <= shortest <= longest:
        raise ValueError(f"context lengths from {shortest} to {longest}: expected 2 <= shortest <= longest")
    if step is None:
        return [shortest << i for i in range((longest // shortest).bit_length())]
    if step < 1:
        raise ValueError(f"context lengths in steps of {step}: expected at least 1")
    return list(range(shortest, longest + 1, step))


def start(*, parallel_mode: str, ring_degree: int | None, dtype: str):
    """The `Accelerator`; builds the groups: the whole world shares a text, in `data_parallel` nobody does.

    One process started by plain `python`, or many under `accelerate launch` or `torchrun`. ValueError for an
    unknown mode, or degrees that do not divide the processes.
    """
    get_mode(parallel_mode)
    step = StepSettings(batch_size=1, accumulate=1, max_grad_norm=0.0, bf16=dtype == "bf16")
    accelerator = make_accelerator(step, seed=0, tracker=None, tracker_dir=".")
    init_seq_parallel(1 if parallel_mode == "data_parallel" else None, ring_degree)
    return accelerator


def load_tokenizer(name: str):
    """The tokenizer of a model from the hub or a directory; ValueError where there is none."""
    from transformers import AutoTokenizer

    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise ValueError(f"--model {name}: there is no such directory")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {name}: it has no tokenizer within reach ({error})") from error


def load_model(name: str, accelerator, *, parallel_mode: str, rope_theta: float | None, dtype: str):
    """A causal language model from the hub or a directory, in evaluation mode, ready to run on shards. A directory of
    adapters, as train.py --lora writes it, is loaded over the model that these were trained on.

    Under DeepSpeed (`accelerate_configs/deepspeed_inference.yaml`) its parameters stay sharded, in host memory.
    """
    from accelerate.utils import DistributedType
    from transformers import AutoConfig

    from ..monkey_patch import apply_seq_parallel_monkey_patch
    from ..rope import set_rope

    config = AutoConfig.from_pretrained(name)
    if rope_theta is not None:
        set_rope(config, theta=rope_theta)
    model = _weights(name, config, DTYPES[dtype]).eval()
    apply_seq_parallel_monkey_patch(parallel_mode, model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return accelerator.unwrap_model(accelerator.prepare(model))
    return model.to(accelerator.device)


def _weights(name: str, config, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM

    if not (Path(name) / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(name).base_model_name_or_path
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, config=config, dtype=dtype), name)


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def leading_tokens(tokenizer) -> list[int]:
    """The special tokens that `tokenizer` puts before a text: `[BOS]`, or none at all."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    starts = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return full[: next(starts, 0)]


def turns(items: Sequence[Item], rank: int, size: int) -> list[tuple[int, Item, bool]]:
    """Deal `items` to `size` takers: taker `rank`'s `(index, item, counts)`.

    All take equally often, which sharded weights need: who has no item in the last round repeats the round's
    first one, and that one does not count.
    """
    hand = []
    for first in range(0, len(items), size):
        index = first + rank if first + rank < len(items) else first
        hand.append((index, items[index], index == first + rank))
    return hand
