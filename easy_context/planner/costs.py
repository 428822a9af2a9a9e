"""The constants of the model that neither sizes nor data sheets give. One place, a source each; a measurement of the
executor (`benchmarks/train_step.py`) moves them here and nowhere else.
"""

from dataclasses import dataclass

from .hardware import GIB


@dataclass(frozen=True)
class Costs:
    """Counts of elements are per row (token) or per row of a tile, in the computing dtype, where nothing else is said.

    `E` is the hidden size, `M` the MLP's intermediate size.
    """

    # --- time -----------------------------------------------------------------------------------------------------
    # Products of a tile's size against one large product: what steps of 128K and 256K tokens took beyond attention at
    # the kernel's speed and beyond elementwise passes.
    matmul_share: float = 0.88
    # Elements that elementwise work reads and writes, compiled: norms, residuals, rotation (E), activation (M).
    forward_passes: tuple[float, float] = (10, 3)
    backward_passes: tuple[float, float] = (24, 11)  # with what is computed again
    norm_passes: float = 2  # E; of the input norm, which each further group of heads computes anew
    # Seconds that a tile of a group's projections takes beyond its share of all that: small products, short kernels.
    # From what 32 groups and tiles of 4096 rows cost a Llama-2-7B at 497,664 tokens, forward and backward apart.
    forward_call: float = 75e-6
    backward_call: float = 510e-6
    uncompiled: float = 2.5  # times as much where every operation is a kernel of its own
    accumulate_bytes: float = 12  # per weight and tile: read a sum in float32, read what is added, write
    loss_bytes: float = 20  # per logit: the row's products, softmax and gradient
    merge_bytes: float = 10  # per element of out and ring step: read and write in float32, read the partial result
    cpu_adam_passes: float = 1.15  # clipping looks at gradients once more
    gpu_adam_bytes: float = 40  # per parameter: gradients three times, two states and the master there and back

    # --- GPU memory -------------------------------------------------------------------------------------------------
    forward_tile: tuple[float, float] = (4, 3.5)  # (E, M) of the tile at work
    # M: gate, up, their product and the gradients of all three.
    backward_tile: tuple[float, float] = (6, 6)
    projection_tile: float = 6  # E, backward: the tile and its norm, their gradients
    loss_tiles: float = 2  # tiles of bf16 logits: the logits and their gradient
    attention_workspace: float = 4  # bytes per element of q: the kernel's float32 sum of dq
    # What autograd saves of a layer that keeps everything: (E, M, q + k + v + attention output). Compiled: what both
    # norms are given and return, gate and up.
    everything: tuple[float, float, float] = (4, 2, 1)
    everything_uncompiled: tuple[float, float, float] = (8, 4, 1)
    everything_backward: tuple[float, float] = (4, 3)  # (E, M), of all rows at once
    workspace: float = 0.05 * GIB  # cuBLAS's 32 MiB, scalars
    live_parameters: float = 1e9  # stage3_max_live_parameters
    context: float = 0.6 * GIB  # the driver's, not seen by torch
    communicator: float = 1.0 * GIB  # NCCL's buffers
    fragmentation: float = 0.03  # of a GPU's memory, with expandable segments

    # --- host memory ------------------------------------------------------------------------------------------------
    system: float = 2 * GIB  # of a host: what its kernel and the files in use need beside all this


# The executor as it is.
COSTS = Costs()
# transformers' own layers under gradient checkpointing: no fusion; no tiles, hence larger products.
ORDINARY_LAYERS = Costs(matmul_share=0.92)
