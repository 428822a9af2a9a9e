"""cuDNN's fused attention, reached through torch: nothing to install; 1.7 times FlashAttention-2 on an H200.

Takes strided `[B, H, S, D]` views of q, k, v and answers in their layout. In the backward, several torch
releases find the compiled cuDNN graph by the layout of q, k and v alone, though the graph has the strides of
out, dout and lse built in: a later call with, say, slices of longer tensors would silently be computed with
the first call's strides. Hence out, dout and lse are always made contiguous here (no copy where they are).
"""

import torch

from .base import HALVES, Kernel, heads_first, unless_nvidia
from .variant import document_lengths

aten = torch.ops.aten
LARGEST_HEAD = 128  # on every GPU; some go to 256
MOST_DOCUMENTS = 8  # one call each: with more of them, FlashAttention-2 is faster in one call for all


class CuDNN(Kernel):
    name = "cudnn"
    dtypes = HALVES
    head_sizes = f"multiples of 8 up to {LARGEST_HEAD}"
    deterministic = False  # torch itself never picks it where determinism is asked for

    def unfit(self, device):
        return unless_nvidia(device, range(9, 13))  # before Hopper torch itself prefers FlashAttention-2

    def missing(self, device):
        if not torch.backends.cudnn.is_available() or torch.backends.cudnn.version() < 90500:
            return "needs a torch built with cuDNN 9.5 or newer"
        return None

    def refuses(self, q, k, variant):
        if q.shape[3] % 8 or q.shape[3] > LARGEST_HEAD:
            return f"head size {q.shape[3]} is not a multiple of 8 up to {LARGEST_HEAD}"
        if min(q.shape[1], k.shape[1]) < 2:
            return "does not take a sequence of one token"
        if variant.borders is not None and len(variant.borders) - 1 > MOST_DOCUMENTS:
            return f"takes documents one by one, which is slow for more than {MOST_DOCUMENTS}"
        if variant.borders is not None and document_lengths(variant.borders)[0] < 2:
            return "does not take a document of one token"
        return None

    def compute(self, q, k, v, variant, scale):
        q, k, v = heads_first(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, variant.causal, False, scale=scale
        )
        return out.transpose(1, 2), lse.squeeze(-1)

    def compute_backward(self, dout, q, k, v, out, lse, variant, scale):
        lengths = q.shape[1], k.shape[1]
        dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous().unsqueeze(-1)
        dout, q, k, v, out = heads_first(dout, q, k, v, out)
        seed = offset = torch.empty((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
        bias = cumulative_q = cumulative_k = None
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *(dout, q, k, v, out, lse, seed, offset, bias, cumulative_q, cumulative_k),
            *(*lengths, 0.0, variant.causal),
            scale=scale,
        )
        return heads_first(*grads)
