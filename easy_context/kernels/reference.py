"""Attention as in the textbook, for any device, dtype and head size: what is left where nothing faster can.

Computes in float32 (float64 for float64 inputs) whatever the input is. Query rows are handled in tiles, so
scores `[S_q, S_k]` never exist whole: those of a tile, `[B, H, rows, S_k]`, have about `TILE` elements. Under
the causal mask a tile stops at its last query's key, which halves the work.
"""

import torch

from .base import HALVES, Kernel, lse_dtype

TILE = 1 << 24  # scores alive at once; 64 MiB in float32


class Reference(Kernel):
    name = "reference"
    dtypes = (torch.float64, torch.float32, *HALVES)
    head_sizes = "any"
    deterministic = True

    def unfit(self, device):
        return None

    def compute(self, q, k, v, *, causal, scale):
        dtype, (batch, length, heads, _) = lse_dtype(q), q.shape
        out, lse = torch.empty_like(q), q.new_empty((batch, heads, length), dtype=dtype)
        k, v = k.to(dtype), v.to(dtype)
        for rows, keys in _tiles(q, k, causal):
            scores = _scores(q[:, rows].to(dtype), k[:, keys], rows, causal, scale)
            tile_lse = scores.logsumexp(-1, keepdim=True)
            out[:, rows] = _per_head(scores.sub_(tile_lse).exp_(), v[:, keys])
            lse[:, :, rows] = tile_lse.flatten(1, 2).squeeze(-1)
        return out, lse

    def compute_backward(self, dout, q, k, v, out, lse, *, causal, scale):
        dtype, kv_heads = lse_dtype(q), k.shape[2]
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        k, v = k.to(dtype), v.to(dtype)
        for rows, keys in _tiles(q, k, causal):
            q_tile, dout_tile = q[:, rows].to(dtype), dout[:, rows].to(dtype)
            tile_lse = lse[:, :, rows].to(dtype).unflatten(1, (kv_heads, -1)).unsqueeze(-1)
            probs = _scores(q_tile, k[:, keys], rows, causal, scale).sub_(tile_lse).exp_()
            dv[:, keys] += torch.einsum("bhgqk,bqhgd->bkhd", probs, _grouped(dout_tile, kv_heads))
            delta = (dout_tile * out[:, rows]).sum(-1).transpose(1, 2)  # the sum over keys of probs * dprobs
            dprobs = torch.einsum("bqhgd,bkhd->bhgqk", _grouped(dout_tile, kv_heads), v[:, keys])
            dscores = dprobs.sub_(delta.unflatten(1, (kv_heads, -1)).unsqueeze(-1)).mul_(probs).mul_(scale)
            dq[:, rows] = _per_head(dscores, k[:, keys])
            dk[:, keys] += torch.einsum("bhgqk,bqhgd->bkhd", dscores, _grouped(q_tile, kv_heads))
        return dq, dk.to(q.dtype), dv.to(q.dtype)


def _tiles(q, k, causal):
    """Slices of query rows, each with the slice of keys that it may see."""
    batch, length, heads, _ = q.shape
    step = max(1, TILE // (batch * heads * k.shape[1]))
    for start in range(0, length, step):
        end = min(start + step, length)
        yield slice(start, end), slice(0, end if causal else k.shape[1])


def _grouped(x, kv_heads):
    """`[B, S, H, D]` as `[B, S, H_kv, G, D]`: query heads that share a KV head are neighbours."""
    return x.unflatten(2, (kv_heads, -1))


def _scores(q, k, rows, causal, scale):
    """`[B, H_kv, G, rows, keys]`, -inf where a key lies after its query."""
    scores = torch.einsum("bqhgd,bkhd->bhgqk", _grouped(q, k.shape[2]), k).mul_(scale)
    if causal:
        positions = torch.arange(k.shape[1], device=q.device)
        scores.masked_fill_(positions > positions[rows, None], -torch.inf)
    return scores


def _per_head(weights, x):
    """Weighted sums of keys' vectors, `[B, rows, H, D]`."""
    return torch.einsum("bhgqk,bkhd->bqhgd", weights, x).flatten(2, 3)
