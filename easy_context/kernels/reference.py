"""Attention as in the textbook, for any device, dtype, head size and variant: what is left where nothing faster can.

Computes in float32 (float64 for float64 inputs) whatever the input is. Query rows are handled in tiles, so
scores `[S_q, S_k]` never exist whole: those of a tile, `[B, H, rows, S_k]`, have about `TILE` elements. Under
the causal mask a tile stops at its last query's key, which halves the work; under a window it begins at its first's.
"""

import torch

from .base import HALVES, Kernel, lse_dtype
from .variant import row_tiles

TILE = 1 << 24  # scores alive at once; 64 MiB in float32


class Reference(Kernel):
    name = "reference"
    dtypes = (torch.float64, torch.float32, *HALVES)
    head_sizes = "any"
    deterministic = True
    windows = True
    softcaps = True

    def unfit(self, device):
        return None

    def split(self, q, k, variant):
        batch, length, heads, _ = q.shape
        rows = max(1, TILE // (batch * heads * k.shape[1]))
        return None if rows >= length else row_tiles(length, k.shape[1], variant, rows)

    def compute(self, q, k, v, variant, scale):
        scores, _ = _scores(*_precise(q, k), variant, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        out = _per_head(scores.sub_(lse).exp_(), *_precise(v))
        return out.to(q.dtype), lse.flatten(1, 2).squeeze(-1)

    def compute_backward(self, dout, q, k, v, out, lse, variant, scale):
        dtype, kv_heads = q.dtype, k.shape[2]
        dout, q, k, v, out = _precise(dout, q, k, v, out)
        scores, slope = _scores(q, k, variant, scale)
        probs = scores.sub_(lse.to(q.dtype).unflatten(1, (kv_heads, -1)).unsqueeze(-1)).exp_()
        dv = torch.einsum("bhgqk,bqhgd->bkhd", probs, _grouped(dout, kv_heads))
        delta = (dout * out).sum(-1).transpose(1, 2)  # the sum over keys of probs * dprobs
        dprobs = torch.einsum("bqhgd,bkhd->bhgqk", _grouped(dout, kv_heads), v)
        dscores = dprobs.sub_(delta.unflatten(1, (kv_heads, -1)).unsqueeze(-1)).mul_(probs).mul_(slope)
        dk = torch.einsum("bhgqk,bqhgd->bkhd", dscores, _grouped(q, kv_heads))
        return _per_head(dscores, k).to(dtype), dk, dv


def _precise(*tensors):
    return tuple(tensor.to(lse_dtype(tensor)) for tensor in tensors)


def _grouped(x, kv_heads):
    """`[B, S, H, D]` as `[B, S, H_kv, G, D]`: query heads that share a KV head are neighbours."""
    return x.unflatten(2, (kv_heads, -1))


def _scores(q, k, variant, scale):
    """Scores `[B, H_kv, G, S_q, S_k]`, -inf where a query does not see the key, and their slopes by q k^T."""
    scores = torch.einsum("bqhgd,bkhd->bhgqk", _grouped(q, k.shape[2]), k).mul_(scale)
    slope = scale
    if variant.softcap is not None:
        scores.div_(variant.softcap).tanh_()
        slope = (1 - scores.square()).mul_(scale)
        scores.mul_(variant.softcap)
    hidden = variant.hidden(q.shape[1], k.shape[1], q.device)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf), slope


def _per_head(weights, x):
    """Weighted sums of keys' vectors, `[B, S_q, H, D]`."""
    return torch.einsum("bhgqk,bkhd->bqhgd", weights, x).flatten(2, 3)
