"""A training loop of one's own: sequences split over all processes, layers under a memory plan.

    pip install -e .
    torchrun --nproc-per-node 2 examples/custom_loop.py      # two GPUs, or two processes on a CPU

A tiny model learns the bytes of a module of the standard library: no download, half a minute on two CPU cores. The
same losses come from one process. For real work replace `tiny_model` by `AutoModelForCausalLM.from_pretrained(...)`
and `load_rows` by data of your own.
"""

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import easy_context as ec

MODE = "zigzag_ring_attn"
SEQ_LENGTH = 4096  # tokens, all processes together


def load_rows() -> list[dict]:
    text = torch.tensor(list(Path(shutil.__file__).read_bytes()))
    rows = text.unfold(0, SEQ_LENGTH + 1, SEQ_LENGTH)  # the last target is the next row's first input
    return [{"input_ids": row[:-1], "target_ids": row[1:]} for row in rows]


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes))


def main() -> None:
    on_gpu = torch.cuda.is_available()
    accelerator = Accelerator(cpu=not on_gpu, mixed_precision="bf16" if on_gpu else "no")
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device

    ec.apply_seq_parallel_monkey_patch(MODE, "llama")
    model = tiny_model()
    plan = ec.MemoryPlan.uniform(model.config.num_hidden_layers, "attention", "host", head_groups=2, tile_size=1024)
    accelerator.print(ec.apply_memory_plan(model, plan))
    model = ec.CausalLMWithLoss(model)  # head and loss in tiles
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    loader = DataLoader(load_rows(), batch_size=1, shuffle=True)
    for step, batch in enumerate(ec.prepare_dataloader(MODE, loader, accelerator), 1):
        whole = batch["input_ids"], None, batch["target_ids"]
        local = ec.prepare_seq_parallel_inputs(MODE, *whole, rank, world, device)
        loss, reported = model(**{name.removeprefix("local_"): tensor for name, tensor in local.items()})
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {reported:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
