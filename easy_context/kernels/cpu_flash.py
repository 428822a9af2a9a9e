"""FlashAttention on the CPU, as built into torch: what `scaled_dot_product_attention` runs there.

Reads and writes strided views, so `[B, S, H, D]` is passed as a transposed view and comes back as one. Fewer
KV heads and S_q != S_k are taken as they are. lse is a view too: `[B, H, S]` over memory in the order `[B, S,
H]`.

It knows no windows, but an additive mask. A window is therefore computed in tiles of query rows, each over the keys
that its rows see, under a mask of the tile's size; what a tile computes in vain is about `ROWS` keys a row.
"""

import torch

from .base import HALVES, Kernel, heads_first, lse_dtype
from .variant import row_tiles

aten = torch.ops.aten
ROWS = 256  # queries that the kernel handles at once, when there are enough


class CpuFlash(Kernel):
    name = "cpu_flash"
    dtypes = (torch.float64, torch.float32, *HALVES)
    head_sizes = "any"
    deterministic = True
    windows = True

    def unfit(self, device):
        return None if device.type == "cpu" else f"runs on the CPU, not on {device.type}"

    def split(self, q, k, variant):
        return None if variant.window_left is None else row_tiles(q.shape[1], k.shape[1], variant, ROWS)

    def compute(self, q, k, v, variant, scale):
        causal, mask = _masks(q, k, variant)
        q, k, v = heads_first(q, k, v)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out.transpose(1, 2), lse

    def compute_backward(self, dout, q, k, v, out, lse, variant, scale):
        causal, mask = _masks(q, k, variant)
        # Rows of one head that lie 32 heads of 128 apart made it 5 to 15% slower at 8K tokens.
        dout, q, k, v, out = (t.contiguous() for t in heads_first(dout, q, k, v, out))
        return heads_first(
            *aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
            )
        )


def _masks(q, k, variant):
    """`(is_causal, attn_mask)`: the kernel's own causal mask is for squares only."""
    q_length, k_length = q.shape[1], k.shape[1]
    if variant.window_left is None and (not variant.causal or q_length == k_length):
        return variant.causal, None
    mask = torch.zeros(q_length, k_length, dtype=lse_dtype(q))
    return False, mask.masked_fill_(variant.hidden(q_length, k_length, q.device), -torch.inf)
