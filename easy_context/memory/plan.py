"""What a step keeps between forward and backward, where, and what it computes again: said once, for the whole model.

A plan is plain data. It is written by hand, made by the planner (`easy_context.plan`), or read from train.py's flags;
`layer.apply_memory_plan` makes a model follow it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

KEEPS = ("everything", "attention", "input")
TIERS = ("gpu", "host", "disk")


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer.

    Attributes:
        keep: "everything": what autograd saves, without what elementwise passes can make again (`fused.py`).
            "attention": the layer's input, the attention output and its log-sum-exp; projections, norms and MLP are
            computed again, attention is not (DistFlashAttn's checkpoint, https://arxiv.org/abs/2310.03294). "input":
            that alone; all is computed again.
        tier: where it waits for the backward: "gpu", "host" (pinned memory) or "disk".
    """

    keep: str = "attention"
    tier: str = "host"

    def __post_init__(self):
        if self.keep not in KEEPS or self.tier not in TIERS:
            raise ValueError(f"keep is one of {KEEPS} and tier one of {TIERS}, not {self.keep!r} and {self.tier!r}")
        if self.keep == "everything" and self.tier != "gpu":
            raise ValueError('keep="everything" stays where it is: tier="gpu"')


@dataclass(frozen=True)
class MemoryPlan:
    """A model's plan. With sequence parallelism all ranks follow the same one.

    Attributes:
        layers: one `LayerPlan` per decoder layer.
        head_groups: attention computes this many groups of heads one after the other; its queries, keys, values and
            their gradients take that many times less memory.
        tile_size: rows (tokens times batch) that norms and MLP compute at a time.
        prefetch: kept tensors come back one layer ahead, at the price of their memory; without, they come tile by
            tile while the layer that needs them is at work, and only its first tile waits.
        compress: "int8" keeps inputs and attention outputs in 8 bits with a scale per block; not exact.
        disk: directory of the tier "disk".
        host_memory: bytes this process may page-lock; None asks the machine, of which some show less than they have.
        compile: let torch.compile fuse elementwise work and drop products that a backward does not need; None does
            so on CUDA.
    """

    layers: tuple[LayerPlan, ...]
    head_groups: int = 1
    tile_size: int = 16384
    prefetch: bool = False
    compress: str | None = None
    disk: str | None = None
    host_memory: int | None = None
    compile: bool | None = None

    def __post_init__(self):
        if self.head_groups < 1 or self.tile_size < 1:
            raise ValueError(f"head_groups and tile_size are at least 1, not {self.head_groups} and {self.tile_size}")
        if self.compress not in (None, "int8"):
            raise ValueError(f'compress is None or "int8", not {self.compress!r}')
        if self.disk is None and any(layer.tier == "disk" for layer in self.layers):
            raise ValueError('tier="disk" needs disk=, a directory')

    @classmethod
    def uniform(cls, num_layers: int, keep: str = "attention", tier: str = "host", **settings) -> "MemoryPlan":
        """The same for every layer; `settings` are the other attributes."""
        return cls((LayerPlan(keep, tier),) * num_layers, **settings)

    @property
    def projection_rows(self) -> int:
        """Rows that the input norm and a group's projections compute at a time: more than `tile_size` where that is
        small, for they have no MLP's width to hold, and a product of 4096 rows and one head leaves a GPU half idle."""
        return max(self.tile_size, min(4 * self.tile_size, 16384))

    def with_layers(self, layers: Sequence[LayerPlan]) -> "MemoryPlan":
        return replace(self, layers=tuple(layers))

    def __str__(self) -> str:
        counts = {layer: self.layers.count(layer) for layer in self.layers}
        kept = ", ".join(f"{count} x {layer.keep} on {layer.tier}" for layer, count in counts.items())
        return f"layers keep {kept}; {self.head_groups} head group(s), tiles of {self.tile_size} rows"
