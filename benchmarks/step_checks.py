"""Two checks beside the clock: gradients against a reference, and many steps with tiers against as many without."""

import math
from argparse import Namespace
from dataclasses import replace
from statistics import median

import torch
from step_plans import memory_plan
from step_systems import DTYPES, build, random_llama
from step_trainer import Trainer, whole_batch
from torch import Tensor, nn

import easy_context as ec

STEP = 0.01  # of a weight's norm, against its gradient: in bf16, much smaller steps would be rounded away


def gradients(args: Namespace, device: torch.device) -> dict:
    """Gradients of a system beside those of the plain HuggingFace model in the same precision, both measured against
    the plain model in a higher one: the error of a weight's gradient, over its norm."""
    higher = torch.float32 if DTYPES[args.dtype] == torch.bfloat16 else torch.float64
    system = build(args, device)
    trainer = Trainer(args, system, device)
    loss, _ = trainer.step()
    found = {name: weight.grad.cpu() for name, weight in system.model.named_parameters()}
    del system, trainer
    ec.remove_seq_parallel_monkey_patch()
    plain, plain_loss = _plain(args, device, DTYPES[args.dtype])
    reference, reference_loss = _plain(args, device, higher)

    errors = {name: _distance(found[name], reference[name], device) for name in found}
    plain_errors = {name: _distance(plain[name], reference[name], device) for name in found}
    ratios = {name: errors[name] / max(plain_errors[name], torch.finfo(higher).eps) for name in found}
    worst = max(ratios, key=ratios.get)
    row = {"loss": loss, "plain_loss": plain_loss, "reference_loss": reference_loss, "ratio": ratios[worst]}
    return row | {"worst": worst, "error": max(errors.values()), "plain_error": max(plain_errors.values())}


def _plain(args: Namespace, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss of the HuggingFace model as it is, logits whole."""
    model = random_llama(args, device).to(dtype)
    ids, targets = (part.to(device) for part in whole_batch(args))
    logits = model(input_ids=ids, use_cache=False).logits[0]
    loss = nn.functional.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), targets[0])
    loss.backward()
    return {name: weight.grad.cpu() for name, weight in model.named_parameters()}, float(loss.detach())


def _distance(found: Tensor, reference: Tensor, device: torch.device) -> float:
    found, reference = (tensor.to(device).to(torch.float64) for tensor in (found, reference))  # converted there
    return float((found - reference).norm() / reference.norm())


def drift(args: Namespace, device: torch.device) -> dict:
    """`args.steps` steps of gradient descent on one batch, three times from the same weights: with all that the plan
    keeps on the GPU, twice (how far do equal runs end up apart?), and with the plan's own tiers."""
    torch.use_deterministic_algorithms(args.deterministic)
    system = build(args, device)
    trainer = Trainer(args, system, device)
    plan = memory_plan(args, system.model.config, device)
    near = plan.with_layers(replace(layer, tier="gpu") for layer in plan.layers)
    start = [weight.detach().to("cpu", copy=True) for weight in trainer.weights]
    runs = [_run(trainer, each, start, args.steps) for each in (near, near, plan)]
    first, again, tiers = runs
    row = {"steps": args.steps, "deterministic": args.deterministic, "finite": all(run["finite"] for run in runs)}
    for name, run in (("again", again), ("tiers", tiers)):
        pairs = list(zip(run["end"], first["end"], strict=True))
        row[f"identical_{name}"] = all(torch.equal(a, b) for a, b in pairs)
        row[f"apart_{name}"] = max(_distance(a, b, device) for a, b in pairs)
        row[f"loss_apart_{name}"] = max(abs(a - b) for a, b in zip(run["losses"], first["losses"], strict=True))
    row |= {"first_loss": first["losses"][0], "last_loss": first["losses"][-1], "losses": tiers["losses"]}
    row |= {"seconds_gpu": again["seconds"], "seconds_tiers": tiers["seconds"]}
    return row | {"slower_percent": 100 * (tiers["seconds"] / again["seconds"] - 1), "setting": str(plan)}


def _run(trainer: Trainer, plan, start: list[Tensor], steps: int) -> dict:
    """Losses, seconds a step without the first, and what the last step leaves: weights, which remember every gradient,
    and gradients."""
    ec.apply_memory_plan(trainer.system.model, plan)
    for weight, value in zip(trainer.weights, start, strict=True):
        weight.data.copy_(value)
    losses, seconds = [], []
    for _ in range(steps):
        loss, taken = trainer.step()
        losses.append(loss)
        seconds.append(taken)
        for weight in trainer.weights:
            weight.data.sub_(weight.grad * (STEP * weight.data.norm() / weight.grad.norm()))
    end = [tensor.detach().to("cpu", copy=True) for weight in trainer.weights for tensor in (weight, weight.grad)]
    finite = all(map(math.isfinite, losses)) and all(bool(tensor.isfinite().all()) for tensor in end)
    return {"losses": losses, "seconds": median(seconds[1:] or seconds), "end": end, "finite": finite}
