"""Attention over a sharded sequence as a plain function, for models that are not from transformers.

The same modes, layouts and kernels as behind the monkey patch, for encoders, diffusion transformers over video, or any
module with q, k and v of its own. Shard the sequence with `shard_sequence`, call `sequence_parallel_attention` in every
layer, gather with `unshard_sequence`. Bytes moved per call are those of the mode (see its file).
"""

from dataclasses import dataclass
from operator import index
from weakref import WeakKeyDictionary

import torch

from .blocks import Block, Documents
from .layout import Layout, Span
from .mesh import SeqParallelMesh, current_mesh
from .modes import AttentionContext, Mode, get_mode
from .modes.base import groups_of

SEQUENCES = 16  # whose plans are held
_plans: WeakKeyDictionary[SeqParallelMesh, dict[tuple, dict]] = WeakKeyDictionary()


def shard_sequence(seq_algo: str, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """This rank's part of a tensor that every rank of the group holds whole, any dtype, `S` entries along `dim`.

    A length that does not divide is padded at the end with copies of the last entry; tell the true length to
    `sequence_parallel_attention` and `unshard_sequence`. Differentiable. ValueError for an empty sequence."""
    mesh = current_mesh()
    layout = _layout(get_mode(seq_algo), mesh)
    rank = mesh.sp_rank if layout.world > 1 else 0
    length = whole.shape[dim]
    if length == 0:
        raise ValueError("an empty sequence cannot be sharded")
    own = layout.indices(layout.padded_length(length), rank).clamp(max=length - 1)
    return whole.index_select(dim, own.to(whole.device))


def sequence_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seq_algo: str = "zigzag_ring_attn",
    causal: bool = True,
    length: int | None = None,
    context: str = "self",
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: Documents | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries over the whole sequence, differentiable.

    Args:
        q: `[B, S_local, H, D]`, this rank's shard.
        k, v: `[B, S_local, H_kv, D]`, H a multiple of H_kv. Cross-attention: `context="sharded"` where they are shards
            of another sequence, `context="replicated"` where every rank holds that one whole.
        seq_algo: name of the mode that sharded; `data_parallel` attends locally.
        causal: only for `context="self"`.
        length: true length in tokens of what k and v are shards of; None says that nothing was padded. Padding is
            seen by nobody.
        scale: of the scores; None is D ** -0.5.
        window: sliding window w (with `causal`): a query at i sees keys i - w < k <= i.
        softcap: scores become `softcap * tanh(score / softcap)`.
        documents: for each row of the batch, or once for all, the borders 0 < ... < length of packed documents, each
            attending to itself only.
        kernel: name of the kernel; None takes the fastest that can.

    Returns `[B, S_local, H, D]` in q's dtype. The rows of padded queries hold finite values without meaning.
    Gradients of a replicated context are this rank's share: sum them over the group.
    Raises ValueError, before any communication, for arguments that do not fit together.
    """
    _check_shapes(q, k, v)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"a soft cap is positive, not {softcap}")
    if context not in ("self", "sharded", "replicated"):
        raise ValueError(f"context must be 'self', 'sharded' or 'replicated', not {context!r}")
    if context != "self" and (causal or window or documents):
        raise ValueError("cross-attention (context=...) has neither causal mask, window nor documents")
    if window is not None and (window < 1 or not causal):
        raise ValueError("a window is at least 1 and needs causal=True")
    if context == "self" and q.shape[1] != k.shape[1]:
        raise ValueError(f"{q.shape[1]} queries, {k.shape[1]} keys: attention over another sequence needs context=...")
    if documents is not None and len(documents) not in (1, len(q)):
        raise ValueError(f"documents of {len(documents)} rows, q of {len(q)}: give one tuple a row, or one for all")
    mode = get_mode(seq_algo)
    if context == "replicated":
        mode = get_mode("data_parallel")
    mesh = current_mesh()
    layout = _layout(mode, mesh)
    padded = k.shape[1] * layout.world
    length = padded if length is None else _whole("length", length)
    if not 0 < length <= padded:
        raise ValueError(f"length={length}, but k and v hold {padded} tokens over {layout.world} ranks")
    settings = {
        "layout": layout,
        "seq_len": padded,
        "causal": causal,
        "window": None if window is None else _whole("window", window),
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "softcap": softcap,
        "kernel": kernel,
        **groups_of(mesh),
    }
    if context == "self":
        documents = _with_padding(documents, length, padded, causal)
        plans = _plans_of(mesh, mode.name, layout, padded, documents)
        ctx = AttentionContext(documents=documents, _plans=plans, **settings)
    else:
        ctx = CrossContext(length=length, **settings)
    mode.validate(ctx, q.shape[2], k.shape[2])
    return mode.attention(q, k, v, ctx)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.dim() == k.dim() == 4) or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"{shapes} are not [B, S_local, H, D] and twice [B, S_local, H_kv, D]")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{shapes}: {q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads")
    if len({(t.dtype, t.device) for t in (q, k, v)}) > 1:
        raise ValueError(f"q, k and v differ in dtype or device: {[(t.dtype, t.device) for t in (q, k, v)]}")


def _layout(mode: Mode, mesh: SeqParallelMesh) -> Layout:
    return mode.layout(mesh.sp_size, mesh.ring_size)


def _whole(name: str, tokens) -> int:
    """Of any integer type: 4.0 would find the plans of 4, and 4 those of 4.0, with slices that nobody can use."""
    try:
        return index(tokens)
    except TypeError as error:
        raise ValueError(f"{name} counts tokens, so it takes int, not {tokens!r}") from error


def _plans_of(mesh: SeqParallelMesh, *sequence) -> dict:
    """What earlier calls found out about a sequence: a model's layers all ask for the same one."""
    known = _plans.setdefault(mesh, {})
    if sequence not in known and len(known) >= SEQUENCES:
        known.clear()
    return known.setdefault(sequence, {})


def _with_padding(documents: Documents | None, length: int, padded: int, causal: bool) -> Documents | None:
    """The documents, and the padding as one more where a real token could see it.

    Raises ValueError for borders that do not ascend from 0 to `length`."""
    if documents is None:
        return None if causal or length == padded else ((0, length, padded),)
    documents = tuple(tuple(_whole("documents", border) for border in row) for row in documents)
    if any((*row[:1], *row[-1:]) != (0, length) or row != tuple(sorted(set(row))) for row in documents):
        raise ValueError(f"documents must ascend from 0 to length={length} in every row, not {documents}")
    return documents if length == padded else tuple((*row, padded) for row in documents)


@dataclass(frozen=True)
class CrossContext(AttentionContext):
    """Keys of another sequence than the queries': everybody sees all of its `length` tokens."""

    length: int = 0

    def blocks(self, q_spans: list[Span], k_spans: list[Span]) -> list[Block]:
        blocks, at = [], 0
        for start, end in k_spans:
            stop = at + min(end, self.length) - start
            if stop > at:
                blocks.append(Block(slice(None), slice(None), slice(at, stop), False))
            at += end - start
        return blocks
