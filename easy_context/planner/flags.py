"""A plan as flags of train.py, and the flag that says what each layer keeps.

--keep attention:host                        every layer
--keep 28xattention:host,4xeverything:gpu    from the first layer to the last
"""

import re
from itertools import groupby

from easy_context.memory.plan import LayerPlan, MemoryPlan

_RUN = re.compile(r"(?:(\d+)x)?([a-z]+):([a-z]+)")


def keep_flag(layers: tuple[LayerPlan, ...]) -> str:
    """The inverse of `parse_keep`."""
    runs = [(layer, len(list(run))) for layer, run in groupby(layers)]
    if len(runs) == 1:
        return f"{layers[0].keep}:{layers[0].tier}"
    return ",".join(f"{count}x{layer.keep}:{layer.tier}" for layer, count in runs)


def parse_keep(text: str, num_layers: int) -> tuple[LayerPlan, ...]:
    """One `LayerPlan` per layer. A run without a number takes the layers that the others leave.

    Raises:
        ValueError: text of another form, or runs that do not make `num_layers`.
    """
    runs = [_RUN.fullmatch(part) for part in text.split(",")]
    if not all(runs) or sum(run[1] is None for run in runs) > 1:
        raise ValueError(f"--keep {text}: write it as attention:host, or 28xattention:host,4xeverything:gpu")
    rest = num_layers - sum(int(run[1] or 0) for run in runs)
    layers = [LayerPlan(run[2], run[3]) for run in runs for _ in range(rest if run[1] is None else int(run[1]))]
    if rest < 0 or len(layers) != num_layers:
        raise ValueError(f"--keep {text}: makes other than the model's {num_layers} layers")
    return tuple(layers)


def memory_flags(plan: MemoryPlan) -> list[str]:
    flags = ["--keep", keep_flag(plan.layers), "--head-groups", str(plan.head_groups)]
    flags += ["--tile-size", str(plan.tile_size)]
    flags += ["--prefetch"] if plan.prefetch else []
    flags += ["--compress", plan.compress] if plan.compress else []
    flags += ["--disk", plan.disk] if plan.disk and any(layer.tier == "disk" for layer in plan.layers) else []
    return flags


def train_flags(plan) -> list[str]:
    """Of a `Plan`; what train.py has to be told beside model, data and optimization."""
    setting = plan.setting
    flags = ["--seq-length", str(setting.seq_length), "--batch-size", str(setting.batch_size)]
    flags += ["--parallel_mode", plan.mode]
    flags += ["--seq-parallel-size", str(plan.seq_parallel_size)] if setting.gpus > 1 else []
    flags += ["--ring_degree", str(plan.ring_degree)] if plan.ring_degree else []
    flags += ["--lora", str(setting.lora)] if setting.lora else []
    return flags + memory_flags(plan.memory_plan)
