"""A training step at the width of a real model: this project's memory plans, transformers' checkpointing, and ALST.

    python benchmarks/train_step.py --seq-length 131072 262144 --systems fast lean transformers-cudnn alst
    python benchmarks/train_step.py --gpus 2 --seq-length 524288 --systems fast
    python benchmarks/train_step.py --tiny --seq-length 512                                         # on CPU

Forward and backward of a Llama with random weights, by default 4 layers of Llama-3.1-8B's width and its vocabulary.
README.md beside this file says how it measures. Prints a table; `--output PREFIX` writes PREFIX.md and PREFIX.json.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
from step_plans import NAMES
from step_report import write
from step_systems import DTYPES, PEERS

SYSTEMS = ("fast", "lean", "transformers-flash", "transformers-cudnn", "transformers-cudnn-offload", "alst")
GRACE_SECONDS = 10  # from SIGTERM to SIGKILL, after --timeout
TINY = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_size": 16, "vocab": 97, "layers": 2}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("what is computed").add_argument
    add("--seq-length", type=int, nargs="+", default=[131072], metavar="S", help="tokens of the whole sequence")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=4096)
    add("--intermediate", type=int, default=14336)
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--head-size", type=int, default=128)
    add("--vocab", type=int, default=128256)
    add("--rope-theta", type=float, default=5e5)
    add("--dtype", choices=DTYPES, default="bf16")
    add("--tiny", action="store_true", help=f"for a CPU: fp32, {', '.join(f'{k} {v}' for k, v in TINY.items())}")
    add = parser.add_argument_group("by whom").add_argument
    add(
        "--systems", nargs="+", choices=(*NAMES, *PEERS), default=SYSTEMS, metavar="NAME", help=", ".join(NAMES + PEERS)
    )
    add("--peers-path", metavar="DIR", help="where the peers are unpacked, if they are not installed")
    add("--gpus", type=int, default=1, metavar="N", help="(without GPUs: processes) that share the sequence")
    add("--mode", help="how; default: zigzag_ring_attn, on one GPU data_parallel")
    add = parser.add_argument_group("the memory plan of the system 'custom'").add_argument
    add("--keep", default="attention:host", metavar="KEEP:TIER", help="as of train.py")
    add("--head-groups", type=int, default=1)
    add("--tile-size", type=int, default=16384, help="of all our plans")
    add("--prefetch", action="store_true")
    add("--compress", choices=["int8"])
    add("--disk", metavar="DIR")
    add("--host-memory", type=float, metavar="GIB", help="that a process may page-lock, of all our plans")
    add = parser.add_argument_group("instead of the clock").add_argument
    add("--check-gradients", action="store_true", help="against the plain model in a higher precision (short lengths)")
    add("--steps-for-drift", type=int, metavar="N", help="N steps with the plan's tiers and N with all on the GPU")
    add("--deterministic", action="store_true", help="of those steps: by deterministic algorithms")
    add = parser.add_argument_group("how it is measured and reported").add_argument
    add("--repeats", type=int, default=3, help="steps; the median is reported")
    add("--warmup", type=int, default=1, help="steps before them")
    add("--timeout", type=int, default=1800, metavar="SECONDS", help="of a system at one length")
    add("--output", metavar="PREFIX")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY, dtype="fp32")
    return args


def main() -> None:
    args = arguments()
    rows = []
    for seq_length in args.seq_length:
        for system in args.systems:
            print(f"{system}, {seq_length} tokens ...", flush=True)
            row = {"system": system, "tokens": seq_length} | run(settings(args, system, seq_length), args)
            rows.append(row)
            write(rows, args, final=False)  # what is measured stays, whatever happens to the next
    write(rows, args, final=True)


def settings(args: argparse.Namespace, system: str, seq_length: int) -> dict:
    """What a worker needs to know."""
    shape = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_size", "vocab", "rope_theta", "dtype")
    plan = ("keep", "head_groups", "tile_size", "prefetch", "compress", "disk")
    task = "gradients" if args.check_gradients else "drift" if args.steps_for_drift else "time"
    return {
        **{name: getattr(args, name) for name in (*shape, "repeats", "warmup", "deterministic")},
        "plan": {name: getattr(args, name) for name in plan},
        "host_memory": args.host_memory and int(args.host_memory * 2**30),
        "system": system,
        "seq_length": seq_length,
        "processes": args.gpus,
        "mode": args.mode or ("zigzag_ring_attn" if args.gpus > 1 else "data_parallel"),
        "task": task,
        "steps": args.steps_for_drift,
    }


def run(settings: dict, args: argparse.Namespace) -> dict:
    """A row, or the reason why there is none."""
    here = Path(__file__).resolve().parent
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"] if args.gpus > 1 else []
    path = [args.peers_path, str(here.parent), os.environ.get("PYTHONPATH")]
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # lets cuBLAS be deterministic; what torch takes on Hopper is larger
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    with tempfile.TemporaryDirectory() as folder:
        described, result = Path(folder, "settings.json"), Path(folder, "result.json")
        described.write_text(json.dumps(settings))
        command = [sys.executable, *launch, str(here / "step_worker.py"), str(described), str(result)]
        with open(Path(folder, "log"), "w+") as log:
            worker = psutil.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                code = worker.wait(args.timeout)
            except psutil.TimeoutExpired:
                stop(worker)
                code = f"{worker.wait()} after {args.timeout} s"
            log.seek(0)
            said = log.read()
        if code != 0:
            print("\n".join(said.splitlines()[-12:]), file=sys.stderr, flush=True)
        return json.loads(result.read_text()) if result.exists() else {"failure": f"ended with exit code {code}"}


def stop(worker: psutil.Popen) -> None:
    """End a worker and all that it has started; torchrun's processes lead sessions of their own."""
    running = [worker, *worker.children(recursive=True)]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in running:
            with suppress(psutil.NoSuchProcess):
                end(process)
        _, running = psutil.wait_procs(running, GRACE_SECONDS)


if __name__ == "__main__":
    main()
