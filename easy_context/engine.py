"""The `Accelerator` of a training run, alike with DeepSpeed and without.

Batch sizes, clipping and precision come from the script. Accelerate takes DeepSpeed's from a JSON file: what
is "auto" or absent there is filled in, what contradicts the script is refused. Learning rate and schedule are
the script's own; an optimizer in the JSON would be a second place for them.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

Loaded, Decided = TypeVar("Loaded"), TypeVar("Decided")


@dataclass(frozen=True)
class StepSettings:
    """What the engine has to know of a step: sequences per micro-step and sequence-parallel group,
    micro-steps, the norm to clip at (0 does not), and whether to compute in bfloat16."""

    batch_size: int
    accumulate: int
    max_grad_norm: float
    bf16: bool

    def deepspeed(self) -> dict:
        return {
            "train_micro_batch_size_per_gpu": self.batch_size,
            "gradient_accumulation_steps": self.accumulate,
            "gradient_clipping": self.max_grad_norm,
        }


def check_deepspeed_file(settings: StepSettings) -> None:
    """ValueError where the DeepSpeed JSON that `accelerate launch` names contradicts the settings. Uses no device."""
    name = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if name is None:
        return
    config = json.loads(Path(name).read_text())
    for section in ("optimizer", "scheduler"):
        if section in config:
            raise ValueError(f"{name}: remove the section {section!r}; the flags set learning rate and schedule")
    wanted = {**settings.deepspeed(), "bf16.enabled": settings.bf16, "fp16.enabled": False}
    for key, value in wanted.items():
        section, _, entry = key.rpartition(".")
        said = (config.get(section, {}) if section else config).get(entry, "auto")
        if said not in ("auto", value):
            raise ValueError(f'{name}: {key} is {said}, the flags say {value}: set it to "auto"')


def make_accelerator(settings: StepSettings, *, seed: int, tracker: str | None, tracker_dir: Path | str):
    """An `Accelerator` over NCCL, or over gloo on machines without an accelerator.

    `seed` orders the data; `tracker` is a name that Accelerate knows. Gradients are accumulated by count
    alone, across the ends of epochs. Raises ValueError for a tracker that is unknown or not installed.
    """
    import datasets
    import transformers
    from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
    from accelerate.utils import GradientAccumulationPlugin

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    for chatty in ("DeepSpeed", "torch.distributed", "accelerate.utils.other"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    # without an accelerator Accelerate sees one process, unless told of the CPU; being told hides DeepSpeed from it
    cpu = not torch.accelerator.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    accelerator = Accelerator(
        cpu=cpu and not deepspeed,
        mixed_precision="bf16" if settings.bf16 else "no",
        dataloader_config=DataLoaderConfiguration(data_seed=seed, dispatch_batches=False),
        gradient_accumulation_plugin=GradientAccumulationPlugin(settings.accumulate, sync_with_dataloader=False),
        log_with=tracker,
        project_dir=str(tracker_dir),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if cpu and deepspeed else [],
    )
    if tracker and not accelerator.log_with:
        raise ValueError(f"tracker {tracker!r} is not installed: pip install it, or leave it out")
    if accelerator.state.deepspeed_plugin is not None:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config.update(settings.deepspeed())
        if config["zero_optimization"]["stage"] == 3:
            config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
            config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")  # or bf16: sums round each time
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
        logging.getLogger("easy_context").setLevel(logging.ERROR)
    return accelerator


def load_in_turns(accelerator, load: Callable[[], Loaded]) -> Loaded:
    """`load()` on every rank: first on one of each node, which downloads and fills caches, then on the others.

    A ValueError or OSError on any rank is raised on all, as a ValueError."""
    from accelerate.utils import gather_object

    loaded = None
    for first in (True, False):
        fault = None
        if accelerator.is_local_main_process == first:
            try:
                loaded = load()
            except (ValueError, OSError) as error:
                fault = str(error)
        faults = [f for f in gather_object([fault]) if f is not None]
        if faults:
            raise ValueError(faults[0])
    return loaded


def first_rank_decides(decide: Callable[[], Decided]) -> Decided:
    """What `decide()` returns on rank 0, which alone calls it, on every rank; a ValueError of its is raised on all."""
    from accelerate.utils import broadcast_object_list

    decided, fault = None, None
    if int(os.environ.get("RANK", 0)) == 0:
        try:
            decided = decide()
        except ValueError as error:
            fault = str(error)
    decided, fault = broadcast_object_list([decided, fault])
    if fault is not None:
        raise ValueError(fault)
    return decided
