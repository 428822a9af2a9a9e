"""The plan for a run of train.py, from the machine that it runs on."""

import logging
import os
from dataclasses import replace

import psutil
import torch

from ..engine import first_rank_decides
from ..kernels import choose
from ..memory.plan import MemoryPlan
from .flags import parse_keep
from .hardware import HARDWARE, Hardware, find_hardware
from .planning import Plan, plan
from .shape import ModelShape

logger = logging.getLogger("easy_context")


def this_machine(device: torch.device) -> Hardware:
    """The table's entry for a device, with the memory that it really has. A GPU that the table lacks is taken for an
    H100, before Hopper for an A100, and a warning says so."""
    if device.type != "cuda":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return replace(HARDWARE["CPU"], memory=psutil.virtual_memory().available / ranks)
    memory = torch.cuda.mem_get_info(device)[1]
    name = torch.cuda.get_device_name(device)
    try:
        known = find_hardware(name)
    except ValueError:
        known = HARDWARE["H100"] if torch.cuda.get_device_capability(device) >= (9, 0) else HARDWARE["A100"]
        logger.warning("the planner has no speeds of a %s and takes those of %s", name, known.name)
    return replace(known, name=name, memory=memory)


def for_training(
    config,
    *,
    world_size: int,
    seq_length: int,
    device: torch.device,
    engine: str = "plain",
    local_world_size: int | None = None,
    host_memory: float | None = None,
    kernel: str | None = None,
    **asked,
) -> Plan:
    """As `plan`, on `device` and its like; `asked` are other arguments of it.

    `config` is a configuration or model; `local_world_size` ranks share a host (None: LOCAL_WORLD_SIZE, else all);
    `host_memory` of a node in bytes (None: what the machine says is available; ask before the model is loaded). The
    kernel defaults to the one that `EASY_CONTEXT_KERNEL` insists on, else to the fastest installed one that can do
    this model.

    Raises:
        ValueError: nothing fits; says what runs out first and what would.
    """
    local = local_world_size or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    hardware = this_machine(device)
    if kernel is None and device.type == "cuda":
        kernel = _installed_kernel(config, device, hardware)
    return plan(
        config,
        gpus=world_size,
        nodes=max(1, world_size // local),
        seq_length=seq_length,
        gpu=hardware,
        host_memory=psutil.virtual_memory().available if host_memory is None else host_memory,
        kernel=kernel,
        engine=engine,
        **asked,
    )


def settle(args, config, accelerator) -> MemoryPlan | None:
    """What train.py's flags (`train_flags.py`) say of mode and memory, with `auto` replaced by the planner's choice.

    Sets `parallel_mode`, `seq_parallel_size` and `ring_degree` of `args`; returns the memory plan, None where the flags
    ask for none. Collective: the first rank plans for all, and all raise what it raises.

    Raises:
        ValueError: nothing fits, or a `--keep` that does not make the model's layers.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    host_memory, told = args.host_memory and int(args.host_memory / local), None
    if args.keep not in (None, "auto"):
        settings = {name: getattr(args, name) for name in ("head_groups", "tile_size", "prefetch", "compress", "disk")}
        layers = parse_keep(args.keep, config.get_text_config().num_hidden_layers)
        told = MemoryPlan(layers, host_memory=host_memory, **settings)
    if args.parallel_mode != "auto" and args.keep != "auto":
        return told

    def planned() -> Plan:
        return for_training(
            config,
            world_size=accelerator.num_processes,
            seq_length=args.seq_length,
            device=accelerator.device,
            batch_size=args.batch_size,
            engine=engine_of(accelerator),
            lora=args.lora,
            local_world_size=local,
            host_memory=args.host_memory,
            disk=args.disk,
            mode=None if args.parallel_mode == "auto" else args.parallel_mode,
            seq_parallel_size=args.seq_parallel_size or accelerator.num_processes,  # who shares is the user's batch
            ring_degree=args.ring_degree,
            compress=args.compress,
        )

    chosen = first_rank_decides(planned)
    args.parallel_mode, args.seq_parallel_size = chosen.mode, chosen.seq_parallel_size
    args.ring_degree = chosen.ring_degree
    accelerator.print(f"planned: {chosen}")
    return told or replace(chosen.memory_plan, host_memory=host_memory)


def engine_of(accelerator) -> str:
    """The engine (`setting.ENGINES`) that an `Accelerator` prepares models for.

    Raises:
        ValueError: DeepSpeed with another stage than 3, or with parameters on GPUs and optimizer on the host.
    """
    plugin = accelerator.state.deepspeed_plugin
    if accelerator.distributed_type == "FSDP":
        raise ValueError("the planner does not know FSDP: give --parallel_mode and --keep by hand, or use DeepSpeed")
    if plugin is None:
        return "ddp"
    zero = plugin.deepspeed_config["zero_optimization"]
    offloaded = {zero.get(name, {}).get("device", "none") for name in ("offload_param", "offload_optimizer")}
    if zero["stage"] != 3 or len(offloaded) != 1:
        raise ValueError("the planner knows DeepSpeed's ZeRO-3, with both offloads to the host or with neither")
    return "zero3" if offloaded == {"none"} else "zero3_offload"


def _installed_kernel(config, device: torch.device, hardware: Hardware) -> str | None:
    """The kernel that a layer of this model gets here; None where the table does not know it."""
    shape = ModelShape.of(config)
    q = torch.empty(1, 128, shape.heads, shape.head_size, dtype=torch.bfloat16, device=device)
    k = torch.empty(1, 128, shape.kv_heads, shape.head_size, dtype=torch.bfloat16, device=device)
    name = choose(q, k, causal=True).name
    return name if name in hardware.kernels or name == "flash_attn_2" else None
