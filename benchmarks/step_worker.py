"""One system at one length, in processes of its own: nothing that another left behind can disturb it.

python step_worker.py SETTINGS.json RESULT.json      # train_step.py starts it, under torchrun for several GPUs
"""

import json
import os
import sys
import traceback
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from report import device_name
from step_checks import drift, gradients
from step_trainer import measure

TASKS = {"time": measure, "gradients": gradients, "drift": drift}


def main() -> None:
    settings, result = map(Path, sys.argv[1:])
    args = Namespace(**json.loads(settings.read_text()))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if args.processes > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        row = {"device": device_name(device.type), **TASKS[args.task](args, device)}
    except Exception as error:  # whatever it is, it is this system's row
        traceback.print_exc()
        reason = str(error).strip().partition("\n")[0]
        result.write_text(json.dumps({"failure": f"{type(error).__name__}: {reason[:200]}"}))
        sys.stderr.flush()
        os._exit(1)  # an exchange or a copy under way must not hold the process
    if args.processes == 1 or dist.get_rank() == 0:
        result.write_text(json.dumps(row))
    if args.processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
