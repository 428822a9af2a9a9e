"""FlashAttention on the CPU, as built into torch: what `scaled_dot_product_attention` runs there.

Reads and writes strided views, so `[B, S, H, D]` is passed as a transposed view and comes back as one. Fewer
KV heads and S_q != S_k are taken as they are. lse is a view too: `[B, H, S]` over memory in the order `[B, S,
H]`.
"""

import torch

from .base import HALVES, Kernel, heads_first

aten = torch.ops.aten


class CpuFlash(Kernel):
    name = "cpu_flash"
    dtypes = (torch.float64, torch.float32, *HALVES)
    head_sizes = "any"
    deterministic = True

    def unfit(self, device):
        return None if device.type == "cpu" else f"runs on the CPU, not on {device.type}"

    def compute(self, q, k, v, *, causal, scale):
        q, k, v = heads_first(q, k, v)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse

    def compute_backward(self, dout, q, k, v, out, lse, *, causal, scale):
        dout, q, k, v, out = heads_first(dout, q, k, v, out)
        return heads_first(
            *aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, causal, scale=scale
            )
        )
