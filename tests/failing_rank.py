"""train.py, whose rank FAILING_RANK is killed or raises (FAULT) between two exchanges of a backward pass."""

import os
import signal
import sys
import time
from pathlib import Path

import train
from easy_context.kernels.base import Kernel
from easy_context.script import run

CALL = 7  # of the kernel's backward: past the first micro-batch and everything that happens once
own, calls = Kernel.backward, 0


def backward(self, *inputs, **how):
    global calls
    calls += 1
    if calls == CALL and os.environ["RANK"] == os.environ["FAILING_RANK"]:
        Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
        if os.environ["FAULT"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a deliberate fault")
    return own(self, *inputs, **how)


Kernel.backward = backward
print(f"process {os.getpid()}", file=sys.stderr, flush=True)
run(train.main)
