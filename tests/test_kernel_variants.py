"""Windows, soft caps and packed documents in every attention kernel, against the dense definition in float64."""

import pytest
import torch
from kernel_cases import (
    CUDA,
    anywhere,
    assert_as_good_as_torch,
    assert_exact,
    blockwise,
    on_cpu,
    on_cuda,
    one_call,
    tensors,
    truth,
)

ONE_TOKEN_EACH = tuple(range(38))
MANY = tuple(sorted({0, 300, *range(3, 150, 7), 151, 152, 153, 280}))
CASES = [  # queries, keys, variant: windows over squares
    *((37, 37, {"causal": True, "window_left": window}) for window in (0, 5, 35, 36, 50)),
    *((37, 37, {"causal": False, "window_left": window}) for window in (0, 5)),
    *((300, 300, {"causal": causal, "window_left": window}) for causal in (True, False) for window in (7, 150)),
    # over rectangles: wider and taller than the window, with keys that nobody sees, rows that see all, few or one
    *((23, 61, {"causal": False, "window_left": window}) for window in (4, 50)),
    *((61, 23, {"causal": False, "window_left": window}) for window in (0, 4, 21)),
    *((q, k, {"causal": False, "window_left": 0}) for q, k in ((1, 40), (40, 2), (2, 2), (24, 23), (25, 23))),
    *((q, k, {"causal": False, "window_left": 100}) for q, k in ((290, 400), (400, 290), (260, 1100))),
    # documents
    *((37, 37, {"causal": causal, "borders": (0, 1, 2, 20, 36, 37)}) for causal in (True, False)),
    *((37, 37, {"causal": causal, "borders": (0, 20, 37)}) for causal in (True, False)),
    *((37, 37, {"causal": causal, "borders": ONE_TOKEN_EACH}) for causal in (True, False)),
    (37, 37, {"causal": True, "borders": (0, 37)}),
    (300, 300, {"causal": True, "borders": MANY}),
    # documents and windows, some shorter than the window
    *((300, 300, {"causal": causal, "borders": MANY, "window_left": 10}) for causal in (True, False)),
    (300, 300, {"causal": True, "borders": (0, 10, 290, 300), "window_left": 30}),
    (37, 37, {"causal": True, "borders": (0, 20, 37), "window_left": 19}),
]
CAPPED = [
    *((37, 37, {"causal": causal, "softcap": 2.0}) for causal in (True, False)),
    (23, 61, {"causal": False, "softcap": 2.0}),
    (61, 23, {"causal": False, "softcap": 2.0, "window_left": 4}),
    (300, 300, {"causal": True, "softcap": 5.0, "window_left": 70}),
    (300, 300, {"causal": True, "softcap": 5.0, "borders": MANY}),
    (300, 300, {"causal": True, "softcap": 5.0, "borders": MANY, "window_left": 10}),
]


def name_of(case):
    q, k, variant = case
    documents = {"borders": f"{len(variant['borders']) - 1}"} if "borders" in variant else {}
    return f"{q}x{k}-" + "-".join(f"{key}={value}" for key, value in (variant | documents).items())


def window_blocks(cuts, window_left):
    """Causal attention under a window in the blocks between `cuts`. Queries that see no key of a block are cut off, as
    they have to be; keys that no query sees are left in."""
    spans = list(zip(cuts, cuts[1:], strict=False))
    for start, end in spans:
        yield slice(start, end), slice(start, end), {"causal": True, "window_left": window_left}
        for first, last in spans:
            stop = min(end, last + window_left)
            if first < start < stop:
                left = window_left - (stop - last)
                yield slice(start, stop), slice(first, last), {"causal": False, "window_left": left}


@pytest.mark.parametrize("case", CASES, ids=name_of)
@on_cpu
def test_float64(name, case):
    q_length, k_length, variant = case
    inputs = tensors(name, q_length, k_length, (4, 2), 16, torch.float64, **variant)
    assert_exact(one_call(name, *inputs, **variant), truth(*inputs, **variant), 1e-12)


@pytest.mark.parametrize("case", CAPPED, ids=name_of)
def test_softcap_in_float64(case):
    q_length, k_length, variant = case
    inputs = tensors("reference", q_length, k_length, (4, 2), 16, torch.float64, **variant)
    assert_exact(one_call("reference", *inputs, **variant), truth(*inputs, **variant), 1e-12)


def test_reference_in_tiles(monkeypatch):
    """Tiles of five rows."""
    monkeypatch.setattr("easy_context.kernels.reference.TILE", 1 << 10)
    for variant in ({}, {"window_left": 9}, {"softcap": 2.0, "borders": (0, 4, 30, 31, 101), "window_left": 9}):
        variant["causal"] = True
        inputs = tensors("reference", 101, 101, (1, 1), 16, torch.float64, **variant)
        assert_exact(one_call("reference", *inputs, **variant), truth(*inputs, **variant), 1e-12)


@pytest.mark.parametrize("window_left", [0, 3, 40, 150, 400])
@pytest.mark.parametrize("cuts", [(0, 90, 180, 270, 360), (0, 20, 30, 200, 360)], ids=["even", "uneven"])
@on_cpu
def test_blocks_add_up_under_a_window(name, cuts, window_left):
    inputs = tensors(name, 360, 360, (4, 2), 16, torch.float64)
    blocks = list(window_blocks(cuts, window_left))
    whole = truth(*inputs, causal=True, window_left=window_left)
    assert_exact(blockwise(name, blocks, *inputs), whole, 1e-11)


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("head_size", [64, pytest.param(128, marks=pytest.mark.cuda)])
@anywhere
def test_half_precision(name, head_size, case):
    q_length, k_length, variant = case
    if name not in CUDA and head_size == 128:
        pytest.skip("64 will do on a CPU")
    inputs = tensors(name, q_length, k_length, (4, 2), head_size, torch.bfloat16, **variant)
    assert_as_good_as_torch(one_call(name, *inputs, **variant), *inputs, **variant)


@pytest.mark.parametrize("case", CAPPED, ids=name_of)
@pytest.mark.parametrize("name", ["reference", pytest.param("flash_attn_4", marks=pytest.mark.cuda)])
def test_softcap_in_half_precision(name, case):
    q_length, k_length, variant = case
    inputs = tensors(name, q_length, k_length, (4, 2), 64, torch.bfloat16, **variant)
    tolerance = 2e-3  # an approximate tanh, relative error 2^-11
    assert_as_good_as_torch(one_call(name, *inputs, **variant), *inputs, lse_tolerance=tolerance, **variant)


@pytest.mark.parametrize("window_left", [0, 60, 350])
@anywhere
def test_blocks_add_up_under_a_window_in_half_precision(name, window_left):
    inputs = tensors(name, 400, 400, (4, 2), 64, torch.bfloat16, causal=True, window_left=window_left)
    blocks = list(window_blocks((0, 50, 60, 200, 400), window_left))
    results = blockwise(name, blocks, *inputs)
    assert_as_good_as_torch(results, *inputs, causal=True, window_left=window_left)


@on_cuda
@pytest.mark.parametrize("variant", [{"window_left": 300}, {"borders": (0, 1, 700, 2048)}], ids=["window", "documents"])
def test_reproducible_where_torch_asks_for_it(name, variant):
    torch.use_deterministic_algorithms(True)
    try:
        inputs = tensors(name, 2048, 2048, (32, 8), 128, torch.bfloat16, causal=True, **variant)
        first = one_call(name, *inputs, causal=True, **variant)
        for _ in range(5):
            again = one_call(name, *inputs, causal=True, **variant)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
