"""A rank that dies in the middle of a training step ends the whole run within a minute, with a message."""

import os
import re
import subprocess
import sys
import time

import psutil
import pytest
import test_train
import torch
from harness import free_port
from test_train import ROOT, start

material = test_train.material
GPUS = torch.cuda.device_count()
SECONDS = 60
WHAT = ("killed", "raises")
FLAGS = {"--batch-size": 1, "--checkpointing-steps": 99, "--eval-steps": 99}
on_two_gpus = [pytest.mark.cuda, pytest.mark.skipif(GPUS < 2, reason="needs 2 NVIDIA GPUs")]


@pytest.fixture
def fault(tmp_path):
    """The environment of `failing_rank.py`, and a check of how the run ended."""

    def environment(what: str, rank: int) -> dict[str, str]:
        return {"FAULT": what, "FAILING_RANK": str(rank), "FAULT_TIME": str(tmp_path / "time")}

    def check(errors: str) -> None:
        assert (tmp_path / "time").exists(), errors[-4000:]
        assert time.time() - float((tmp_path / "time").read_text()) < SECONDS
        processes = [int(number) for number in re.findall(r"^process (\d+)$", errors, re.MULTILINE)]
        assert len(processes) > 1 and not any(map(psutil.pid_exists, processes))

    return environment, check


@pytest.mark.parametrize(
    ("launcher", "rank", "what"),
    [
        ("torchrun-2", 0, "killed"),
        ("torchrun-2", 0, "raises"),
        pytest.param("zero3", 1, "raises", marks=pytest.mark.slow),
        pytest.param("zero3", 1, "killed", marks=pytest.mark.slow),
        *(pytest.param("torchrun-2", 1, what, marks=on_two_gpus, id=f"torchrun-gpus-{what}") for what in WHAT),
        *(pytest.param("zero3-gpus", 0, what, marks=on_two_gpus) for what in WHAT),
    ],
)
def test_the_launcher_ends_all_ranks_and_names_the_one_that_failed(material, tmp_path, fault, launcher, rank, what):
    environment, check = fault
    settings = {"script": "tests/failing_rank.py", "environment": environment(what, rank)}
    run = start(launcher, material, tmp_path / "output", **settings, **FLAGS)
    check(run.stderr)
    assert run.returncode != 0
    cause = run.stderr.rpartition("Root Cause")[2]
    assert f"(local_rank: {rank})" in cause
    assert ("SIGKILL" if what == "killed" else "RuntimeError: a deliberate fault") in cause


@pytest.mark.slow
@pytest.mark.parametrize("what", WHAT)
def test_ranks_without_a_launcher_notice_over_gloo(material, tmp_path, fault, what):
    """Three processes with nobody to stop them: rank 1 fails, the other two leave by themselves, each with a line."""
    environment, check = fault
    flags = {"--model": material / "model", "--dataset": material / "train", "--output-dir": tmp_path / "output"}
    flags = {**test_train.FLAGS, **flags, **FLAGS, "--seq-length": 32}
    words = [sys.executable, "tests/failing_rank.py", *(str(word) for flag in flags.items() for word in flag)]
    shared = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment(what, 1)}
    ranks = [
        subprocess.Popen(
            words, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **shared, "RANK": r, "LOCAL_RANK": r}
        )
        for r in "012"
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    check("\n".join(errors))
    assert [rank.returncode for rank in ranks] == [1, -9 if what == "killed" else 1, 1]
    for name, text in (("error", errors[0]), ("error on rank 2", errors[2])):
        assert f"{name}: the connection to another rank is lost" in text and "Traceback" not in text
    assert what == "killed" or "error on rank 1: RuntimeError: a deliberate fault" in errors[1]
