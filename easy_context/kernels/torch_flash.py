"""FlashAttention-2 (https://arxiv.org/abs/2307.08691) as built into torch for CUDA: nothing to install.

Takes `[B, S, H, D]` as it is, lse contiguous. With fewer KV heads its backward writes dk and dv for H heads
each and then adds them up: room to count on. It is deterministic when torch is told to be, at some cost in
speed.
"""

import torch

from .base import HALVES, Kernel, unless_nvidia

aten = torch.ops.aten


class TorchFlash(Kernel):
    name = "torch_flash"
    dtypes = HALVES
    head_sizes = "multiples of 8 up to 256 (192 on consumer GPUs)"
    deterministic = True

    def unfit(self, device):
        return unless_nvidia(device, range(8, 13))

    def missing(self, device):
        return None if torch.backends.cuda.is_flash_attention_available() else "torch was built without it"

    def refuses(self, q, k, *, causal):
        major, minor = torch.cuda.get_device_capability(q.device)
        little_shared_memory = major == 12 or (major == 8 and minor > 0)
        size, largest = q.shape[3], 192 if little_shared_memory else 256
        if size % 8 or size > largest:
            return f"head size {size} is not a multiple of 8 up to {largest}"
        return None

    def compute(self, q, k, v, *, causal, scale):
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out, lse

    def compute_backward(self, dout, q, k, v, out, lse, *, causal, scale):
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
        unused = torch.empty(0, device=q.device)
        return aten._flash_attention_backward(
            *(dout, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal),
            *(rng_state, unused),
            scale=scale,
        )
