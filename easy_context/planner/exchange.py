"""Seconds of a layer's exchange that computing cannot hide, for each mode of sequence parallelism.

A ring step computes while the next keys and values are on their way: only what takes longer than the computation
shows, and in the backward the last gradients' way home. Ulysses' all-to-alls come before and after attention, so all
of them show. Head groups exchange one after the other, in messages that many times smaller.
"""

from easy_context.modes.dist_flash_attn import schedule

from .setting import BF16, Setting

WIDE = 4  # partial results and gradients of keys and values travel in float32


def seconds(setting: Setting, groups: int, computed: float, *, backward: bool, again: bool) -> float:
    """Of one layer on one rank, forward or backward, where its attention computes `computed` seconds.

    `again`: the backward also brings q, k, v and out back into the arrangement of the mode (`Mode.restore`)."""
    if setting.sp_size == 1:
        return 0.0
    ring, share = setting.ring, computed / groups
    heads = _all_to_all(setting, groups, backward, again) if setting.ulysses > 1 else 0.0
    if setting.mode == "dist_flash_attn":
        return groups * (heads + _scheduled(setting, groups, share, backward))
    return groups * (heads + (_ring(setting, groups, share, backward) if ring > 1 else 0.0))


def _elements(setting: Setting, groups: int) -> tuple[float, float]:
    """Of a group's q, and of its k and v together, that a rank holds of its own tokens."""
    s = setting.shape
    q = setting.rows * s.attention_size / groups
    return q, 2 * setting.rows * s.kv_heads * s.head_size / min(groups, s.kv_heads)


def _ring(setting: Setting, groups: int, computed: float, backward: bool) -> float:
    """A rank of a ring within USP holds `ulysses` times the tokens of as many times fewer heads."""
    pair = _elements(setting, groups)[1] * max(
        1.0, setting.ulysses / setting.shape.kv_heads * min(groups, setting.shape.kv_heads)
    )
    step, ring = computed / setting.ring, setting.ring
    crosses = setting.sp_size > setting.gpus_per_node
    message = {size: setting.hardware.message(size, crosses_nodes=crosses) for size in (pair * BF16, pair * WIDE)}
    keys, grads = message[pair * BF16], message[pair * WIDE]
    if not backward:
        return (ring - 1) * max(0.0, keys - step)
    both = setting.hardware.message(pair * (BF16 + WIDE), crosses_nodes=crosses)
    return max(0.0, keys - step) + (ring - 2) * max(0.0, both - step) + max(0.0, grads - step) + grads


def _all_to_all(setting: Setting, groups: int, backward: bool, again: bool) -> float:
    """q, k, v there and out back; backward dout there and dq, dk, dv back, and before that q, k, v, out again."""
    q, kv = _elements(setting, groups)
    ranks = setting.ulysses
    kv *= max(
        1.0, ranks * min(groups, setting.shape.kv_heads) / setting.shape.kv_heads
    )  # a KV head for each of its users
    leaves = (ranks - 1) / ranks * BF16
    crosses = ranks > setting.gpus_per_node

    def way(elements: float) -> float:
        return setting.hardware.message(elements * leaves, crosses_nodes=crosses)

    return way(q + kv) + way(q) + (way(2 * q + kv) if backward and again else 0.0)


def _scheduled(setting: Setting, groups: int, computed: float, backward: bool) -> float:
    """While a step computes, what the next one needs and what the previous one produced are on their way."""
    q, kv = _elements(setting, groups)
    lse = q / setting.shape.head_size
    world, total = setting.sp_size, 0.0
    crosses = world > setting.gpus_per_node
    fetched, given = [], []
    for step in schedule(world):
        sent, back = [0.0], [0.0]
        for task in step:
            if task.worker == task.supplier:
                continue
            part = 1 if task.half is None else 0.5
            if task.query == task.worker:
                sent.append(kv * BF16)
                back.append(kv * WIDE * backward)
            else:
                sent.append(part * (q * BF16 * (3 if backward else 1) + lse * WIDE * backward))
                back.append(part * (q * WIDE if backward else q * BF16 + lse * WIDE))
        fetched.append(max(sent))
        given.append(max(back))
    for step in range(len(fetched)):
        share = 2 if 0 < step < world / 2 else 1  # the own block is half masked, the last one shared
        travelling = (fetched[step + 1] if step + 1 < len(fetched) else 0) + (given[step - 1] if step else 0)
        total += max(0.0, setting.hardware.message(travelling, crosses_nodes=crosses) - computed * share / world)
    return total + setting.hardware.message(given[-1], crosses_nodes=crosses)
