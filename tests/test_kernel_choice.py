"""Which attention kernel is taken, what is said about it, and what is refused."""

import logging
import subprocess
import sys

import pytest
import torch

from easy_context import kernels
from easy_context.kernels import KERNELS, choose, describe

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


def test_gpu_kernels_know_their_limits():
    assert BY_NAME["cudnn"].refuses(queries(head_size=128), queries(head_size=128), causal=True) is None
    assert "256" in BY_NAME["cudnn"].refuses(queries(head_size=256), queries(head_size=256), causal=True)
    assert "one token" in BY_NAME["cudnn"].refuses(queries(), queries(length=1), causal=False)
    assert "80" in BY_NAME["flash_attn_4"].refuses(queries(head_size=80), queries(head_size=80), causal=True)


def test_describes_this_machine():
    rows = {row["kernel"]: row for row in describe("cpu")}
    assert list(rows) == [kernel.name for kernel in KERNELS]
    assert rows["cpu_flash"]["on this cpu"] == rows["reference"]["on this cpu"] == "yes"
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
    assert choose(half.float(), half.float(), causal=True).name == "reference"
    assert announcements.records[-1].levelname == "WARNING" and "not float32" in announcements.records[-1].getMessage()


def test_importing_loads_nothing_optional_and_touches_no_gpu():
    code = (
        "import sys, torch, easy_context.kernels\n"
        "assert not {'flash_attn', 'transformers', 'deepspeed'} & set(sys.modules)\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
