"""A training step of one system, and what one costs: time, memory, and the figures that show it computes the same."""

import resource
import threading
import time
from argparse import Namespace
from statistics import median

import psutil
import torch
import torch.distributed as dist
from step_systems import System, build

import easy_context as ec
from easy_context.metrics import flops_per_token, peak_flops


class Trainer:
    """A system, its batch, and gradients that are allocated once and added to, as where gradients accumulate."""

    def __init__(self, args: Namespace, system: System, device: torch.device):
        self.system, self.device = system, device
        self.weights = [weight for weight in system.model.parameters() if weight.requires_grad]
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)
        ids, targets = whole_batch(args)
        rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        shards = ec.prepare_seq_parallel_inputs(args.mode, ids, None, targets, rank, self.world, device)
        self.batch = {name.removeprefix("local_"): shard for name, shard in shards.items()}

    def step(self) -> tuple[float, float]:
        """Forward, backward, and the average of the ranks' gradients. Returns the loss and the seconds it took."""
        synchronize(self.device)
        began = time.perf_counter()
        torch._foreach_zero_([weight.grad for weight in self.weights])
        with self.system.around():
            loss, reported = self.system.loss(**self.batch)
            loss.backward()
        if self.world > 1:
            for weight in self.weights:
                dist.all_reduce(weight.grad)
                weight.grad.div_(self.world)
        synchronize(self.device)
        return float(reported), time.perf_counter() - began

    def grad_norm(self) -> float:
        norms = [torch.linalg.vector_norm(weight.grad, dtype=torch.float32) for weight in self.weights]
        return float(torch.stack(norms).norm())


class HostMemory:
    """How much more of the machine's memory is in use than at the start, at the highest; page-locked memory, of which a
    process's own figures know little, included. Sampled by a thread, every 20 ms."""

    def __enter__(self):
        self.start, self.most, self.done = self._used(), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(0.02):
            self.most = max(self.most, self._used() - self.start)

    @staticmethod
    def _used() -> int:
        memory = psutil.virtual_memory()
        return memory.total - memory.available


def whole_batch(args: Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids `[1, S]` and their targets, the same for everyone."""
    ids = torch.randint(args.vocab, (1, args.seq_length), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([ids[:, 1:], ids.new_full((1, 1), -100)], 1)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def measure(args: Namespace, device: torch.device) -> dict:
    """A row of the table. Memory is that of the rank that needs most."""
    system = build(args, device)
    trainer = Trainer(args, system, device)
    with HostMemory() as host:
        for _ in range(args.warmup):
            trainer.step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses, seconds = zip(*(trainer.step() for _ in range(args.repeats)), strict=True)
    row = {"kernel": system.kernel, "setting": system.setting, **system.predicted}
    row |= {"seconds": median(seconds), "samples": seconds, "host_gib": host.most / 2**30, **_memory(device)}
    row |= {"loss": losses[-1], "grad_norm": trainer.grad_norm()}
    row["tokens_per_second"] = args.seq_length / row["seconds"]
    peak, flops = peak_flops(device), flops_per_token(system.model, args.seq_length)
    row["mfu_percent"] = peak and 100 * flops * row["tokens_per_second"] / peak / trainer.world
    row["fixed_gib"] = 2 * sum(weight.numel() * weight.element_size() for weight in trainer.weights) / 2**30
    if "peak_gib" in row:
        tokens = trainer.batch["input_ids"].numel()
        row["kib_per_token"] = (row["peak_gib"] - row["fixed_gib"]) * 2**20 / tokens
    return row


def _memory(device: torch.device) -> dict:
    """GiB at the highest, of the rank that needs most: of the GPU in tensors, and in all that PyTorch reserved; of the
    host what was resident of the process, imports included."""
    figures = {"resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # Linux counts in KiB
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        figures["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    if dist.is_initialized():
        ranks: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, figures)
        figures = {name: max(rank[name] for rank in ranks) for name in figures}
    return figures
