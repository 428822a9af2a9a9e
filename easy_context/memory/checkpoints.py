"""What planned layers keep: one `Checkpoint` per layer and forward, and what a model's layers share to make them."""

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .compress import stored_bytes
from .plan import TIERS, MemoryPlan
from .tiers import Kept, Store

if TYPE_CHECKING:
    from .layer import PlannedLayer


class PlannedModel:
    """What the planned layers of a model have in common."""

    def __init__(self, plan: MemoryPlan):
        self.plan = plan
        self.layers: list[PlannedLayer] = []
        self.newest: weakref.ref[Checkpoint] | None = None  # made last
        self.stores: dict[torch.device, Store] = {}

    def __getstate__(self) -> dict:
        """A copied or pickled model follows the plan with stores of its own."""
        return {**vars(self), "newest": None, "stores": {}}

    def store(self, device: torch.device) -> Store:
        if device not in self.stores:
            settings = {"host_memory": self.plan.host_memory, "disk": self.plan.disk, "compress": self.plan.compress}
            self.stores[device] = Store(device, **settings)
        return self.stores[device]

    def require(self, x: Tensor, heads: int, head_size: int) -> None:
        """Before the first layer of a forward: does what will be kept on host and disk fit there?"""
        mixed = torch.is_autocast_enabled(x.device.type)
        kind = torch.get_autocast_dtype(x.device.type) if mixed else x.dtype
        attention = stored_bytes((len(x), heads * head_size), kind, self.plan.compress)
        attention += len(x) * heads * torch.promote_types(kind, torch.float32).itemsize  # the log-sum-exp
        needed = dict.fromkeys(TIERS, 0)
        for layer in self.layers:
            needed[layer.how.tier] += stored_bytes(x.shape, x.dtype, self.plan.compress)
            needed[layer.how.tier] += attention if layer.how.keep == "attention" else 0
        self.store(x.device).require(needed["host"], needed["disk"])


class Checkpoint:
    """What a planned layer keeps from its forward to its backward, in the tier of its plan."""

    def __init__(self, planned: "PlannedLayer", x: Tensor, tile: int):
        self.plan, self.tier, self.tile = planned.plan, planned.how.tier, tile
        self.store = planned.shared.store(x.device)
        self.previous, planned.shared.newest = planned.shared.newest, weakref.ref(self)
        self.kept: list[Kept] = []
        self._keep(x, tile)

    def add_attention(self, a: Tensor, lses: list[Tensor]) -> None:
        self._keep(a[0], self.tile)
        for lse in lses:
            self._keep(lse.contiguous(), len(lse), exact=True)

    def _keep(self, tensor: Tensor, chunk: int, exact: bool = False) -> None:
        self.kept.append(self.store.keep(tensor, self.tier, chunk, exact=exact))

    def fetch(self) -> None:
        """Start the way back; with prefetch, that of the checkpoint before as well."""
        self.store.fetch(*self.kept)
        previous = self.previous and self.previous()
        if self.plan.prefetch and previous is not None:
            self.store.fetch(*previous.kept)

    def x(self, stop: int | None) -> Tensor:
        """`[1, N, E]`, of which rows before `stop` have arrived (None: all)."""
        return self.kept[0].tensor(stop)[None]

    def attention(self, stop: int | None) -> Tensor:
        return self.kept[1].tensor(stop)[None]

    def lses(self) -> list[Tensor]:
        return [kept.tensor() for kept in self.kept[2:]]

    def release(self) -> None:
        for kept in self.kept:
            kept.release()
