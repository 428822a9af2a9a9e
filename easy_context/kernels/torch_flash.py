"""FlashAttention-2 (https://arxiv.org/abs/2307.08691) as built into torch for CUDA: nothing to install.

Takes `[B, S, H, D]` as it is, lse contiguous; packed documents in one call. With fewer KV heads its backward writes
dk and dv for H heads each and then adds them up: room to count on. It is deterministic when torch is told to be, at
some cost in speed.
"""

import torch

from .base import HALVES, Kernel, unless_nvidia
from .packed import Packed
from .variant import Piece

aten = torch.ops.aten
MOST_DOCUMENTS = 65535  # over all batch rows: the second dimension of a CUDA grid


class TorchFlash(Kernel):
    name = "torch_flash"
    dtypes = HALVES
    head_sizes = "multiples of 8 up to 256 (192 on consumer GPUs)"
    deterministic = True
    windows = True
    packs = True

    def unfit(self, device):
        return unless_nvidia(device, range(8, 13))

    def missing(self, device):
        return None if torch.backends.cuda.is_flash_attention_available() else "torch was built without it"

    def refuses(self, q, k, variant):
        size, largest = q.shape[3], self.head_size_limit(q.device)
        if size % 8 or size > largest:
            return f"head size {size} is not a multiple of 8 up to {largest}"
        if variant.borders is not None and q.shape[0] * (len(variant.borders) - 1) > MOST_DOCUMENTS:
            return f"takes at most {MOST_DOCUMENTS} documents"
        return None

    def head_size_limit(self, device):
        major, minor = torch.cuda.get_device_capability(device)
        little_shared_memory = major == 12 or (major == 8 and minor > 0)
        return 192 if little_shared_memory else 256

    def split(self, q, k, variant):
        """The kernel takes a window without a right limit for one of S_k keys to the right. Where there are more rows
        than keys, that does not reach from the first rows to the last key. These rows see every key: they are computed
        without a window."""
        rows, keys = q.shape[1], k.shape[1]
        if variant.window_left is None or rows <= keys + 1:
            return None
        full = rows - keys + 1 + variant.window_left
        unlimited = variant._replace(window_left=None)
        return [Piece(slice(0, full), slice(0, keys), unlimited), Piece(slice(full, rows), slice(0, keys), variant)]

    def compute(self, q, k, v, variant, scale):
        packed = Packed.of(q, k, variant.borders)
        out, lse, *_ = aten._flash_attention_forward(
            *(*packed.fold(q, k, v), packed.offsets, packed.offsets, packed.q_longest, packed.k_longest),
            *(0.0, variant.causal, False),
            scale=scale,
            window_size_left=variant.window_left,
        )
        return *packed.unfold(out), packed.unfold_lse(lse)

    def compute_backward(self, dout, q, k, v, out, lse, variant, scale):
        packed = Packed.of(q, k, variant.borders)
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
        unused = torch.empty(0, device=q.device)
        grads = aten._flash_attention_backward(
            *(*packed.fold(dout, q, k, v, out), packed.fold_lse(lse)),
            *(packed.offsets, packed.offsets, packed.q_longest, packed.k_longest),
            *(0.0, variant.causal, rng_state, unused),
            scale=scale,
            window_size_left=variant.window_left,
        )
        return packed.unfold(*grads)
