"""An unmodified decoder layer in two halves, with attention between them left out.

    project   x -> q, k, v       input norm, projections, whatever the family does to heads, rotation
    finish    x, a -> y          output projection of the attention output a, residuals, norms, MLP

Both work row by row, so they can be computed in tiles of rows, and `project` for a group of heads at a time. Neither
is written here: they are the family's own `forward`s, run on twins of its modules. A twin shares every submodule and
parameter of the original but for one child: the attention module's output projection becomes the identity and its
attention function returns what it is given, q, k and v, as attention weights, which modules pass on as they are; the
layer's attention module becomes one that projects a given attention output. When a layer is first called,
`check_structure` compares it with its halves and a trivial attention between them, to within rounding, on a few rows of
the real input.

Weights go in as arguments (`torch.func.functional_call`), so a group of heads is a slice of rows of q, k and v's.
`vjp` pulls a gradient back through a half. Compiled, recomputation and backward are one graph, in which elementwise
work is fused and products whose result no backward needs (the MLP's last one) are not computed again.
"""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..refusals import refuse_layer, refusing_random_numbers

GIVEN = "easy_context_given"  # an attention function that returns its q, k and v as attention weights
FIRST = "easy_context_first"  # one that returns its q, and notes in `module.told` what else it was given
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_HEADWISE = {"q_norm", "k_norm"}
UNKNOWN = "{} is built in a way that a memory plan does not know: leave it out, and use gradient checkpointing instead"


class Projections(nn.Module):
    """`project`: x `[1, T, E]`, cos and sin `[1, T, D_rotary]`, positions `[1, T]` -> q, k, v
    `[1, T, heads of the group, D]`."""

    def __init__(self, layer: nn.Module, groups: int):
        super().__init__()
        attention = layer.self_attn
        self.attention = twin(attention, config=_with(attention.config, GIVEN, _given), o_proj=nn.Identity())
        self.norm = getattr(layer, "input_layernorm", None) or nn.Identity()
        self.head_size = attention.head_dim
        self.heads = attention.config.num_attention_heads // groups
        self.kv_heads = max(1, attention.config.num_key_value_heads // groups)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        given = {"position_embeddings": (cos, sin), "position_ids": positions, "attention_mask": None}
        _, qkv = type(self.attention).forward(self.attention, self.norm(x), **given)
        if not isinstance(qkv, tuple):
            raise ValueError(UNKNOWN.format(type(self.attention).__name__))
        return qkv


class Finish(nn.Module):
    """`finish`: x `[1, T, E]`, attention output `[1, T, H * D]` -> y `[1, T, E]`."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = twin(layer, gradient_checkpointing=False, self_attn=GivenAttention(layer.self_attn.o_proj))

    def forward(self, x: Tensor, attention_output: Tensor) -> Tensor:
        given = {"position_embeddings": None, "attention_mask": None, "attention_output": attention_output}
        y = type(self.layer).forward(self.layer, x, **given)
        return y if isinstance(y, Tensor) else y[0]


class GivenAttention(nn.Module):
    """Stands where a layer's attention module was: projects an attention output that exists already."""

    def __init__(self, o_proj: nn.Module):
        super().__init__()
        self.o_proj = o_proj

    def forward(self, hidden_states: Tensor, *, attention_output: Tensor | None = None, **_) -> tuple[Tensor, None]:
        if attention_output is None:
            raise ValueError(UNKNOWN.format("a layer that hands its attention module no further arguments"))
        return self.o_proj(attention_output), None


def twin(module: nn.Module, **changes) -> nn.Module:
    """A module of the same class, attributes, children and parameters, without hooks, but for `changes`."""
    made = object.__new__(type(module))  # FSDP2 gives its classes a `__new__` that calls `__init__`
    nn.Module.__init__(made)
    hooks = {name for name in vars(made) if "hook" in name}
    vars(made).update({n: v for n, v in vars(module).items() if n not in hooks and n not in ("forward", "_modules")})
    made._modules = {**module._modules}
    for name, value in changes.items():
        if isinstance(value, nn.Module):
            made._modules[name] = value
        else:
            vars(made)[name] = value
    return made


def _with(config, name: str, function):
    """The configuration with another attention function, which transformers learns by name; the original stays."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, function)
    changed = copy.copy(config)
    changed._attn_implementation_internal = name
    return changed


def _given(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **_):
    kind = value.dtype  # under autocast rotation has made queries and keys float32
    q, k, v = (tensor.to(kind).transpose(1, 2) for tensor in (query, key, value))
    return q, (q, k, v)


def _first(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs):
    refuse_layer(module, query, key, value, attention_mask, kwargs)
    module.told.update({**kwargs, "position_ids": None}, attention_mask=attention_mask)
    return query.to(value.dtype).transpose(1, 2), None


def why_not(layer: nn.Module, groups: int) -> str | None:
    """Why a layer cannot be split in halves and `groups` of heads, or None."""
    attention = getattr(layer, "self_attn", None)
    children = {name for name, _ in attention.named_children()} if attention is not None else set()
    fused = "qkv_proj" in children
    needed = {"o_proj", *(["qkv_proj"] if fused else PROJECTIONS)}
    if not needed <= children or not hasattr(attention, "head_dim"):
        return f"{type(layer).__name__} has no self_attn with {', '.join(sorted(needed))} and head_dim"
    if unknown := children - needed - _HEADWISE - {"rotary_emb"}:
        return f"{type(attention).__name__} has unknown parts: {', '.join(sorted(unknown))}"
    if groups == 1:
        return None
    heads, kv_heads = attention.config.num_attention_heads, attention.config.num_key_value_heads
    if heads % groups or (kv_heads % groups and groups % kv_heads):
        return f"head_groups={groups} does not divide {heads} query heads over {kv_heads} KV heads"
    if fused:
        return f"{type(attention).__name__} projects q, k and v in one piece: head_groups=1"
    rows = dict(zip(PROJECTIONS, (heads, kv_heads, kv_heads), strict=True))
    for name, weight in attention.named_parameters():
        whole = rows.get(name.partition(".")[0], 0) * attention.head_dim
        if whole and ".lora_A." not in name and getattr(weight, "ds_shape", weight.shape)[0] != whole:
            return f"{type(attention).__name__}'s {name} does not have a row for each of {whole} outputs: head_groups=1"
    norms = [getattr(attention, name, None) for name in _HEADWISE]
    weights = [weight for norm in norms if norm is not None for weight in norm.parameters()]
    sizes = {getattr(weight, "ds_numel", weight.numel()) for weight in weights}  # ZeRO-3 leaves none in place
    if sizes - {attention.head_dim}:
        return f"{type(attention).__name__} normalizes over all heads: head_groups=1"
    return None


def check_structure(
    layer: nn.Module, mask, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None
) -> tuple[dict, bool]:
    """Compare halves and layer on rows x `[1, T, E]` under the layer's mask; returns what the layer tells its
    attention function, and whether it returns y as the only item of a tuple.

    Raises:
        ValueError: a layer that is not what the halves make of it, that asks of attention what cannot be had, or that
            draws random numbers.
    """
    attention = twin(layer.self_attn, config=_with(layer.self_attn.config, FIRST, _first), told={})
    whole = twin(layer, gradient_checkpointing=False, self_attn=attention)
    given = {"position_embeddings": (cos, sin), "position_ids": positions, "attention_mask": mask}
    with refusing_random_numbers(layer, x.device):
        truth = type(layer).forward(whole, x, **given)
    in_tuple = isinstance(truth, tuple) and len(truth) == 1
    truth = truth[0] if in_tuple else truth
    q, _, _ = Projections(layer, 1)(x, cos, sin, positions)
    made = Finish(layer)(x, q.flatten(2))
    if not isinstance(truth, Tensor) or not (truth - made).norm() <= 1e-2 * (truth - x).norm():
        raise ValueError(UNKNOWN.format(type(layer).__name__))
    return attention.told, in_tuple


def call(half: nn.Module, rows: tuple, extras: tuple, weights: dict):
    """`half(*rows, *extras)` with `weights`, by name, in place of its own."""
    return functional_call(half, weights, (*rows, *extras))


def vjp(half: nn.Module, rows: tuple, extras: tuple, weights: dict, frozen: dict, gradient) -> tuple[tuple, dict]:
    """The gradients by `rows` and by `weights` that belong to `gradient`, that of the result."""

    def run(rows, weights):
        return call(half, rows, extras, {**frozen, **weights})

    return torch.func.vjp(run, rows, weights)[1](gradient)
