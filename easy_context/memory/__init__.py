"""What a long sequence fills memory with, and how it is made to take less.

Plans: `plan` says what layers keep, where, and in what portions; `layer` makes a model follow it, by its two halves
(`phases`), a tile of `rows` at a time, with `gradients` summed and overwritten in place, `checkpoints` of what is kept,
and the marks that DeepSpeed needs (`leaf`). Layers that keep everything have their norms and MLP compiled (`fused`).

Tiers: `tiers` moves what is kept between GPU, `host_pool` and `disk` (whose slots are a `pool`'s), as `compress` turns
rows into bytes, on the copy streams of `lanes`.

Without a plan: `tiled_loss` (logits), `offload` (gradient checkpoints) and `zero_host` (DeepSpeed's host memory).
"""
