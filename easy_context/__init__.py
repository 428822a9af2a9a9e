"""easy_context: train ordinary HuggingFace models on sequences split over many processes.

Importing this package changes nothing: no patch, no process group, no CUDA context. The public names below are
resolved on first use, so that `import easy_context` stays cheap.
"""

from importlib import import_module

_HOME = {
    "apply_seq_parallel_monkey_patch": "monkey_patch",
    "remove_seq_parallel_monkey_patch": "monkey_patch",
    "prepare_seq_parallel_inputs": "inputs",
    "unshard_sequence": "inputs",
    "sequence_parallel_attention": "attention",
    "shard_sequence": "attention",
    "prepare_dataloader": "data",
    "init_seq_parallel": "mesh",
    "seq_parallel_loss": "loss",
    "seq_parallel_loss_from_hidden": "loss",
    "CausalLMWithLoss": "loss",
    "global_num_items": "loss",
    "apply_unsloth_offloaded_gradient_checkpoint_monkey_patch": "memory.offload",
    "remove_unsloth_offloaded_gradient_checkpoint_monkey_patch": "memory.offload",
    "MemoryPlan": "memory.plan",
    "LayerPlan": "memory.plan",
    "apply_memory_plan": "memory.layer",
    "remove_memory_plan": "memory.layer",
    "tile_rows": "memory.rows",
    "register_mode": "modes",
    "plan": "planner",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__():
    return sorted([*globals(), *__all__])
