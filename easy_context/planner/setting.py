"""Everything that an estimate depends on, in one value: model, machine, split, engine, memory plan."""

from dataclasses import dataclass, replace

from ..memory.plan import LayerPlan, MemoryPlan
from .costs import COSTS, Costs
from .hardware import Hardware
from .shape import ModelShape

BF16 = 2
# plain: weights and gradients on the GPU in bf16, no optimizer: forward and backward alone.
# ddp: what train.py does without DeepSpeed: float32 masters (frozen weights in bf16), gradients and AdamW on each GPU.
# zero3_offload: DeepSpeed ZeRO-3; parameters, gradients and optimizer in host memory, split over the ranks.
# zero3: the same split, on the GPUs.
ENGINES = ("plain", "ddp", "zero3_offload", "zero3")


@dataclass(frozen=True)
class Setting:
    """A run to estimate. `sp_size` ranks share a sequence, `ring` of them in each ring; `batch_size` sequences per
    group of them; `gpus` in all, on `nodes` hosts. `memory`: bytes of a GPU, None: those of the table."""

    shape: ModelShape
    hardware: Hardware
    seq_length: int
    plan: MemoryPlan
    gpus: int = 1
    nodes: int = 1
    batch_size: int = 1
    mode: str = "data_parallel"
    sp_size: int = 1
    ring: int = 1
    kernel: str | None = None
    engine: str = "plain"
    lora: int | None = None
    memory: float | None = None
    costs: Costs = COSTS

    @property
    def rows(self) -> int:
        """Of one rank: local tokens times batch, padding included."""
        return -(-self.seq_length // self.sp_size) * self.batch_size

    @property
    def tile(self) -> int:
        return min(self.plan.tile_size, self.rows)

    @property
    def projection_tile(self) -> int:
        return min(self.plan.projection_rows, self.rows)

    @property
    def ulysses(self) -> int:
        return self.sp_size // self.ring

    @property
    def gpus_per_node(self) -> int:
        return -(-self.gpus // self.nodes)

    @property
    def tokens(self) -> int:
        """Of a step, on all GPUs."""
        return self.gpus // self.sp_size * self.batch_size * self.seq_length

    @property
    def trainable(self) -> int:
        """Parameters that have a gradient."""
        return self.shape.parameters if self.lora is None else self.shape.lora_parameters(self.lora)

    @property
    def flops(self) -> float:
        """Of a step, as `easy_context.metrics` counts them for the MFU."""
        linear = self.shape.linear_weights * (6 if self.lora is None else 4)
        linear += 0 if self.lora is None else 6 * self.trainable
        attention = 6 * self.seq_length * self.shape.attention_size * self.shape.layers
        return self.tokens * (linear + attention)

    @property
    def usable(self) -> float:
        """Bytes of a GPU that tensors may take."""
        whole = self.hardware.memory if self.memory is None else self.memory
        return whole * (1 - self.costs.fragmentation) - self.costs.context - self.costs.communicator * (self.gpus > 1)

    def compiled(self, layer: LayerPlan) -> bool:
        """Whether a layer's elementwise work is fused; ZeRO-3's hooks keep layers from it that keep everything."""
        asked = self.hardware.compiles if self.plan.compile is None else self.plan.compile
        return asked and not (layer.keep == "everything" and self.engine.startswith("zero3"))

    def with_plan(self, **changes) -> "Setting":
        return replace(self, plan=replace(self.plan, **changes))
