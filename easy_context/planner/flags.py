"""Command lines: sizes and lengths as people write them, what each layer keeps, and a plan as flags of train.py.

--keep attention:host                        every layer
--keep 28xattention:host,4xeverything:gpu    from the first layer to the last
"""

import argparse
import math
import re
from itertools import groupby

from ..memory.plan import LayerPlan

_BYTES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_TOKENS = {"": 1, "K": 2**10, "M": 2**20}
_RUN = re.compile(r"(?:(\d+)x)?([a-z]+):([a-z]+)")


def size(text: str) -> float:
    """Bytes: 80GB, 64GiB, 1TB, 512e9."""
    return _number(text, r"([\d.e+]+)\s*([KMGT]?I?)B?", _BYTES, "a size such as 80GB or 64GiB")


def tokens(text: str) -> int:
    """Tokens: 131072, 128K (x 1024), 1M (x 1024 x 1024)."""
    wanted = "a number of tokens such as 131072, 128K or 1M"
    count = _number(text, r"([\d.]+)\s*([KM]?)", _TOKENS, wanted)
    if count != int(count):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return int(count)


def _number(text: str, form: str, units: dict, wanted: str) -> float:
    found = re.fullmatch(form, text.strip().replace(",", ""), re.IGNORECASE)
    try:
        number = float(found[1]) * units[found[2].upper()]
    except (TypeError, ValueError, KeyError):
        number = math.inf
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return number


def _text(bytes_: float) -> str:
    """The inverse of `size`, to a byte."""
    unit = next((unit for unit in ("TI", "GI", "T", "G") if bytes_ % _BYTES[unit] == 0), "")
    return f"{bytes_ / _BYTES[unit]:.0f}{unit.replace('I', 'i')}B"


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


def flags_of(plan) -> list[str]:
    """What train.py has to be told of a `Plan`, beside model, data and optimization."""
    setting, how = plan.setting, plan.memory_plan
    flags = {
        "--seq-length": setting.seq_length,
        "--batch-size": setting.batch_size,
        "--parallel_mode": plan.mode,
        "--seq-parallel-size": plan.seq_parallel_size if setting.gpus > 1 else None,
        "--ring_degree": plan.ring_degree,
        "--lora": setting.lora,
        "--keep": keep_flag(how.layers),
        "--head-groups": how.head_groups,
        "--tile-size": how.tile_size,
        "--compress": how.compress,
        "--disk": how.disk,
        "--host-memory": None if plan.limits.host is None else _text(plan.limits.host),
    }
    told = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
    return told + ["--prefetch"] * how.prefetch
