"""Which attention kernel is taken, what is said about it, and what is refused."""

import logging
import subprocess
import sys

import pytest
import torch
from harness import tiny_model

from easy_context import apply_seq_parallel_monkey_patch, kernels, remove_seq_parallel_monkey_patch
from easy_context.kernels import KERNELS, choose, describe, flash_attn_4
from easy_context.kernels.variant import Variant

BY_NAME = {kernel.name: kernel for kernel in KERNELS}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def announcements(monkeypatch, caplog):
    """What `choose` says, as if it had not spoken before and nobody had set the variable."""
    monkeypatch.setattr(kernels, "_announced", set())
    monkeypatch.delenv("EASY_CONTEXT_KERNEL", raising=False)
    caplog.set_level(logging.INFO, logger="easy_context")
    return caplog


def queries(length=6, heads=4, dtype=torch.float32, head_size=8):
    return torch.zeros(1, length, heads, head_size, dtype=dtype)


def test_chooses_the_fastest_and_says_so_once(announcements):
    for causal in (True, False, True):
        assert choose(queries(), queries(heads=2), causal=causal).name == "cpu_flash"
    assert [(r.levelname, "cpu_flash" in r.getMessage()) for r in announcements.records] == [("INFO", True)]


def test_warns_once_of_a_slower_choice_with_the_reason(announcements, monkeypatch):
    monkeypatch.setattr(BY_NAME["cpu_flash"], "missing", lambda device: "gone on holiday")
    for _ in range(2):
        assert choose(queries(), queries(), causal=True).name == "reference"
    (record,) = announcements.records
    assert record.levelname == "WARNING" and "cpu_flash: gone on holiday" in record.getMessage()
    assert "cudnn" not in record.getMessage()  # no news on a machine without a GPU


def test_override_by_argument_and_environment(announcements, monkeypatch):
    assert choose(queries(), queries(), causal=True, name="reference").name == "reference"
    monkeypatch.setenv("EASY_CONTEXT_KERNEL", "reference")
    assert choose(queries(), queries(), causal=True).name == "reference"
    assert choose(queries(), queries(), causal=True, name="cpu_flash").name == "cpu_flash"
    assert [r.levelname for r in announcements.records] == ["INFO"] * 3
    monkeypatch.setenv("EASY_CONTEXT_KERNEL", "cudnn")
    with pytest.raises(ValueError, match="'cudnn', asked for by EASY_CONTEXT_KERNEL, cannot .* not on cpu"):
        choose(queries(), queries(), causal=True)
    with pytest.raises(ValueError, match="no attention kernel is called 'fastest' .* there are flash_attn_4, cudnn"):
        choose(queries(), queries(), causal=True, name="fastest")


@pytest.mark.parametrize(
    "q, k, reason",
    [
        (queries(heads=6), queries(heads=4), "6 query heads are not a multiple of 4 KV heads"),
        (queries(), queries(length=7), "as many queries as keys, not 6 and 7"),
        (queries(), queries(dtype=torch.float64), "k is torch.float64"),
        (queries(), queries(head_size=16), "are not"),
    ],
)
def test_refuses_inputs_that_make_no_sense(q, k, reason):
    with pytest.raises(ValueError, match=reason):
        choose(q, k, causal=True)


def test_deterministic_mode_passes_over_kernels_that_are_not(announcements, monkeypatch, deterministic):
    monkeypatch.setattr(BY_NAME["cpu_flash"], "deterministic", False)
    assert choose(queries(), queries(), causal=True).name == "reference"
    assert "its backward is not deterministic" in announcements.records[0].getMessage()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert choose(queries(), queries(), causal=True).name == "cpu_flash"


@pytest.mark.parametrize(
    "variant, reason",
    [
        ({"window_left": -1}, "window_left must be at least 0"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"borders": (0, 3)}, "from 0 to the 6 keys"),
        ({"borders": (1, 6)}, "from 0 to the 6 keys"),
        ({"borders": (0, 3, 3, 6)}, "from 0 to the 6 keys"),
        ({"borders": ()}, "from 0 to the 6 keys"),
    ],
)
@pytest.mark.parametrize("name", [None, "reference"])
def test_refuses_variants_that_make_no_sense(variant, reason, name):
    with pytest.raises(ValueError, match=reason):
        choose(queries(), queries(), causal=True, name=name, **variant)


def test_refuses_documents_over_a_rectangle():
    with pytest.raises(ValueError, match="packed documents need as many queries as keys, not 6 and 7"):
        choose(queries(), queries(length=7), causal=False, borders=(0, 7))


def test_says_once_for_all_lengths_that_a_softcap_takes_a_slower_kernel(announcements):
    for length in range(5, 9):
        assert choose(queries(length), queries(length), causal=True, softcap=50.0).name == "reference"
        assert choose(queries(length), queries(length), causal=True, window_left=2).name == "cpu_flash"
        assert choose(queries(length), queries(length), causal=True, borders=(0, 3, length)).name == "cpu_flash"
    warning, info = announcements.records
    assert warning.levelname == "WARNING" and "cpu_flash: has no soft cap" in warning.getMessage()
    assert info.levelname == "INFO" and "cpu_flash" in info.getMessage()
    with pytest.raises(ValueError, match="'cpu_flash', asked for by name, cannot do this: has no soft cap"):
        choose(queries(), queries(), causal=True, softcap=50.0, name="cpu_flash")


def test_cudnn_knows_its_limits(monkeypatch):
    cudnn = BY_NAME["cudnn"]
    monkeypatch.setattr(cudnn, "unfit", lambda device: None)
    monkeypatch.setattr(cudnn, "missing", lambda device: None)

    def why_not(q_length=20, k_length=20, head_size=128, causal=True, **variant):
        sizes = {"dtype": torch.bfloat16, "head_size": head_size}
        return cudnn.why_not(queries(q_length, **sizes), queries(k_length, **sizes), causal=causal, **variant)

    assert why_not() is None
    assert "256" in why_not(head_size=256)
    assert "sequence of one token" in why_not(k_length=1, causal=False)
    assert "no sliding windows" in why_not(window_left=18)
    assert why_not(window_left=19) is None  # hides nothing
    assert "no soft cap" in why_not(softcap=50.0)
    assert why_not(borders=(0, *range(2, 16, 2), 20)) is None
    assert "one by one" in why_not(borders=(0, *range(2, 18, 2), 20))
    assert "document of one token" in why_not(borders=(0, 19, 20))
    assert "no sliding windows" in why_not(borders=(0, 10, 20), window_left=8)
    assert why_not(borders=(0, 10, 20), window_left=9) is None


def test_flash_attn_4_knows_its_limits(monkeypatch):
    def why_not(head_size=128, softcap=None):
        q = queries(head_size=head_size)
        return BY_NAME["flash_attn_4"].refuses(q, q, Variant(True, softcap=softcap))

    assert why_not() is None and "80" in why_not(head_size=80)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "Blackwell" in why_not(softcap=50.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_attn_4, "_differentiates_softcap", lambda: False)
    assert "upgrade flash-attn-4" in why_not(softcap=50.0)
    monkeypatch.setattr(flash_attn_4, "_differentiates_softcap", lambda: True)
    assert why_not(softcap=50.0) is None


def test_torch_flash_knows_its_limits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def why_not(q, borders=None):
        return BY_NAME["torch_flash"].refuses(q, q, Variant(True, borders=borders))

    assert why_not(queries(head_size=256)) is None and "20" in why_not(queries(head_size=20))
    many = torch.zeros((), dtype=torch.bfloat16).expand(2, 40000, 4, 64)
    assert "at most 65535 documents" in why_not(many, borders=tuple(range(40001)))


def test_describes_this_machine():
    rows = {row["kernel"]: row for row in describe("cpu")}
    assert list(rows) == [kernel.name for kernel in KERNELS]
    assert rows["cpu_flash"]["on this cpu"] == rows["reference"]["on this cpu"] == "yes"
    assert rows["reference"]["soft cap"] == "yes" and rows["cpu_flash"]["soft cap"] == "no"
    assert rows["cudnn"]["windows"] == "no" and rows["torch_flash"]["documents"] == "packed"
    assert "NVIDIA" in rows["cudnn"]["on this cpu"] and rows["cudnn"]["deterministic backward"] == "no"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine")
def test_chooses_on_a_gpu(announcements):
    half = queries(head_size=64, dtype=torch.bfloat16).cuda()
    usable = [
        name
        for name in ("flash_attn_4", "cudnn", "torch_flash")
        if BY_NAME[name].why_not(half, half, causal=True) is None
    ]
    assert choose(half, half, causal=True).name == usable[0]
    assert choose(half, half, causal=True, borders=tuple(range(7))).name != "cudnn"
    assert choose(half, half, causal=True, window_left=2).name in ("flash_attn_4", "torch_flash")
    assert choose(half.float(), half.float(), causal=True).name == "reference"
    assert announcements.records[-1].levelname == "WARNING" and "not float32" in announcements.records[-1].getMessage()


def test_a_patched_model_takes_the_kernel_that_it_was_patched_with(announcements):
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama", kernel="reference")
    tiny_model()(torch.ones(1, 4, dtype=torch.long))
    remove_seq_parallel_monkey_patch()
    assert "attention kernel: reference (asked for by name)" in announcements.text


def test_importing_loads_nothing_optional_and_touches_no_gpu():
    code = (
        "import sys, torch, easy_context.kernels\n"
        "assert not {'flash_attn', 'transformers', 'deepspeed'} & set(sys.modules)\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
