"""`merge.merge` on CUDA in one pass: the one kernel of this package that is written here, in Triton.

A program merges `ROWS` tokens of one head. Heads are the fastest axis of the grid, so that neighbouring programs read
neighbouring memory of `[B, S, H, D]`. Offsets are 64-bit: a shard of a million tokens has more than 2 ** 31 elements.
"""

import torch
import triton
import triton.language as tl

ROWS = 32


def merge_in_one_pass(out, lse, block_out, block_lse, into) -> None:
    """As `merge.merge`, for CUDA tensors; `into` may be `out`."""
    batch, length, heads, head_size = out.shape
    if out.numel() == 0:
        return
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _merge[(heads * triton.cdiv(length, ROWS), batch)](  # only the first axis goes past 65,535
            *(out, lse, block_out, block_lse, into, length, heads, head_size),
            *(*out.stride(), *lse.stride(), *block_out.stride(), *block_lse.stride(), *into.stride()),
            rows=ROWS,
            columns=triton.next_power_of_2(head_size),
        )


@triton.jit
def _merge(
    out, lse, block_out, block_lse, into, length, heads, head_size,
    out_b, out_s, out_h, out_d, lse_b, lse_h, lse_s,
    block_out_b, block_out_s, block_out_h, block_out_d, block_lse_b, block_lse_h, block_lse_s,
    into_b, into_s, into_h, into_d,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    head, batch = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // heads).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    inside = row < length

    lse_at = lse + batch * lse_b + head * lse_h + row * lse_s
    old = tl.load(lse_at, mask=inside, other=0.0)
    new = tl.load(block_lse + batch * block_lse_b + head * block_lse_h + row * block_lse_s, mask=inside, other=0.0)
    larger = tl.maximum(old, new)
    larger = tl.where(larger == float("-inf"), 0.0, larger)  # both sides without keys: exp(-inf) below, not nan
    old, new = tl.exp(old - larger), tl.exp(new - larger)
    total = old + new
    tl.debug_barrier()  # the warps of a program load the same lse: all have, before one overwrites it
    tl.store(lse_at, larger + tl.log(total), mask=inside)
    weight = new / tl.where(total == 0.0, 1.0, total)

    inside = inside[:, None] & (column < head_size)[None, :]
    out_at = out + batch * out_b + head * out_h + row[:, None] * out_s + column[None, :] * out_d
    block_at = block_out + batch * block_out_b + head * block_out_h
    block_at += row[:, None] * block_out_s + column[None, :] * block_out_d
    into_at = into + batch * into_b + head * into_h + row[:, None] * into_s + column[None, :] * into_d
    before = tl.load(out_at, mask=inside, other=0.0).to(weight.dtype)
    block = tl.load(block_at, mask=inside, other=0.0).to(weight.dtype)
    tl.store(into_at, before + weight[:, None] * (block - before), mask=inside)
