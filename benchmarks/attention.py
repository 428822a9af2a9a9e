"""Attention of every mode against one call of the same kernel, and against the peers, in one run.

    python benchmarks/attention.py --backend gloo --processes 2 --seq-length 8192 --dtype fp32        # on CPU
    torchrun --nproc-per-node 8 benchmarks/attention.py --seq-length 262144                           # over NCCL
    python benchmarks/attention.py --virtual-ranks 8 --seq-length 262144                              # on one GPU

README.md beside this file says how it measures. Prints a table; `--output PREFIX` writes PREFIX.md and PREFIX.json.
"""

import argparse
import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import Inputs, measure
from peers import PEERS, peers
from report import Row, rows_of, write
from systems import one_call, one_process, our_modes
from timeline import timelines
from workload import Workload

from easy_context.mesh import init_seq_parallel, reset_mesh, split_degrees

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_argument_group("who computes (default: the processes that torchrun started)")
    how.add_argument("--backend", choices=["gloo", "nccl"], help="gloo starts --processes on this CPU, a thread each")
    how.add_argument("--processes", type=int, default=2, metavar="N")
    how.add_argument("--virtual-ranks", type=int, metavar="W", help="play ranks of a world of W on this one device")
    how.add_argument(
        "--ranks", type=int, nargs="+", metavar="R", help="which ones; default: README.md, 'Virtual ranks'"
    )
    what = parser.add_argument_group("what is computed")
    what.add_argument("--seq-length", type=int, default=8192, metavar="S", help="tokens of the whole sequence")
    what.add_argument("--heads", type=int, default=32)
    what.add_argument("--kv-heads", type=int, default=8)
    what.add_argument("--head-size", type=int, default=128)
    what.add_argument("--dtype", choices=DTYPES, default="bf16")
    what.add_argument("--masks", nargs="+", choices=["causal", "documents", "window"], default=["causal"])
    what.add_argument("--ring-degree", type=int, help="of USP; default as in training")
    what.add_argument("--kernels", nargs="+", metavar="NAME", help="of easy_context; default: the one it chooses")
    what.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}")
    what.add_argument("--peers-path", metavar="DIR", help="where the peers are unpacked, if they are not installed")
    out = parser.add_argument_group("how it is reported")
    out.add_argument("--repeats", type=int, default=5, help="samples of each system; medians are reported")
    out.add_argument("--link", type=float, metavar="GB/S", help="of a message, for the limit; default: README.md")
    out.add_argument("--output", metavar="PREFIX")
    out.add_argument("--picture", action="store_true", help="PREFIX.png, too")
    out.add_argument("--profile", action="store_true", help="PREFIX_profile.md: where each system's time goes")
    args = parser.parse_args()
    if (args.picture or args.profile) and not args.output:
        parser.error("--picture and --profile need --output")
    if not (args.virtual_ranks or args.backend == "gloo" or "LOCAL_RANK" in os.environ):
        parser.error("start it with torchrun, or give --backend gloo or --virtual-ranks W")
    return args


def main() -> None:
    args = arguments()
    if args.peers_path:
        sys.path.insert(0, args.peers_path)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [args.peers_path, os.environ.get("PYTHONPATH")]))
    if args.virtual_ranks:
        _virtual(args)
    elif args.backend == "gloo":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(_gloo_process, (args, port), nprocs=args.processes)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", timeout=timedelta(minutes=5))
        _real(args, torch.device("cuda", torch.cuda.current_device()))


def _gloo_process(rank: int, args: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=args.processes, timeout=timedelta(minutes=30))
    _real(args, torch.device("cpu"))


def _real(args: argparse.Namespace, device: torch.device) -> None:
    rows, profiles = [], []
    for mask in args.masks:
        rows += _rank(args, mask, device, profiles)
    if dist.get_rank() == 0:
        write(rows, profiles, args)
    dist.destroy_process_group()


def _virtual(args: argparse.Namespace) -> None:
    from virtual_group import become

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world, rows, profiles = args.virtual_ranks, [], []
    for mask in args.masks:
        for rank in args.ranks or ([0, world - 1] if mask == "causal" else range(world)):
            become(rank, world)
            rows += _rank(args, mask, device, profiles, virtual=True)
            dist.destroy_process_group()
            reset_mesh()
    write(rows, profiles, args)


def _rank(
    args: argparse.Namespace, mask: str, device: torch.device, profiles: list[str], virtual: bool = False
) -> list[Row]:
    """Everything that is measured as one rank of one world; to `profiles` the text that --profile asks for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = args.seq_length, args.heads, args.kv_heads, args.head_size
    work, causal = (Workload(*sizes, DTYPES[args.dtype], m) for m in (mask, "causal"))
    ring, _ = split_degrees(world, args.ring_degree)
    init_seq_parallel(world, ring)
    systems = [system for kernel in args.kernels or [None] for system in our_modes(work, world, device, kernel)]
    if mask == "causal":
        systems += peers(work, world, rank, ring, device, args.peers)
    if device.type == "cpu" and not virtual:
        systems = [one_process(causal, world), *systems]
    else:
        used = dict.fromkeys(system.kernel for system in systems if system.failure is None)
        systems = [*(one_call(kernel, causal, world) for kernel in used), *systems]
    times = measure(systems, work, device, args.repeats, virtual)
    if args.profile:
        spent = timelines(systems, Inputs(work, device), device, rank)
        profiles.append(f"# {mask}, rank {rank} of {world}\n\n{spent}\n")
    return rows_of(systems, times, work, rank, world, ring, args.link, device)


if __name__ == "__main__":
    main()
