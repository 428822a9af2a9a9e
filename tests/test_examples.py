"""examples/custom_loop.py runs as its first lines say, and two processes compute what one does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_custom_loop_learns_and_two_processes_are_one():
    launchers = [], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    runs = [
        subprocess.Popen(
            [sys.executable, *launcher, "examples/custom_loop.py"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for launcher in launchers
    ]
    one, two = (losses(run) for run in runs)
    assert two == pytest.approx(one, abs=2e-3)
    assert one[-1] < one[0] - 1.5


def losses(run: subprocess.Popen) -> list[float]:
    out, err = run.communicate()
    assert run.returncode == 0, err
    assert "2 x attention on host" in out
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", out)]
