"""Checkpoints that are whole or do not count, and the final model.

A run can be cut off at any byte. A checkpoint is therefore written under a temporary name and flushed to
disk; then a list of its files and their sizes is added, as the last one; then it gets its name. What has no
name, no list, or not the files of its list is never loaded. The directory must be one that all nodes share.
Each rank writes its own shards (ZeRO-3: 16 bytes a parameter, divided by the ranks); nothing is gathered.
Loading needs as many processes as saving did.
"""

import json
import logging
import os
import shutil
from pathlib import Path

import torch
from torch.utils.serialization import config as serialization

from .engine import first_rank_decides

logger = logging.getLogger(__name__)

MANIFEST = "complete.json"


def claim_output_dir(directory: Path, accelerator, *, resume: bool, overwrite: bool) -> None:
    """Make the directory; ValueError on every rank where it holds something and neither flag says what to do with it.
    `overwrite` removes the checkpoints of an earlier run."""
    from accelerate.utils import broadcast_object_list

    [used] = broadcast_object_list([directory.is_dir() and any(directory.iterdir())])
    if used and not resume and not overwrite:
        raise ValueError(f"--output-dir {directory} is in use: --resume, --overwrite-output-dir, or take another one")
    if accelerator.is_main_process:
        directory.mkdir(parents=True, exist_ok=True)
        if overwrite:
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)


def save_checkpoint(accelerator, directory: str | Path, step: int, settings: dict) -> Path:
    """Write weights, optimizer and random states to `directory/step_<step>`; every rank calls it.

    `settings` is what a resumed run has to have in common with this one (JSON values). Returns the
    checkpoint's path. Raises ValueError where a rank does not see the directory that rank 0 made.
    """
    final = Path(directory) / f"step_{step}"
    partial, old = final.with_suffix(".partial"), final.with_suffix(".old")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    if not all(_gather(partial.is_dir())):
        raise ValueError(f"--output-dir: not every node sees {partial}: choose a directory that all nodes share")
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        files = sorted(f for f in partial.rglob("*") if f.is_file())
        for file in files:
            _flush(file)
        manifest = {
            "step": step,
            "processes": accelerator.num_processes,
            "settings": settings,
            "files": {str(f.relative_to(partial)): f.stat().st_size for f in files},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _flush(partial / MANIFEST)
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        _flush(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()
    return final


def why_incomplete(checkpoint: str | Path) -> str | None:
    """Why a directory is no complete checkpoint, in words; None where it is one."""
    checkpoint = Path(checkpoint)
    if not checkpoint.is_dir():
        return "there is no such directory"
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except (OSError, ValueError):
        return f"it has no {MANIFEST}, so writing it was cut off"
    for name, size in files.items():
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or cut off"
    return None


def newest_checkpoint(directory: str | Path) -> Path | None:
    """The complete checkpoint of `directory` with the highest step; a warning names each newer one that is not."""
    steps = {int(d.name[5:]): d for d in Path(directory).glob("step_*") if d.name[5:].isdigit()}
    for _, checkpoint in sorted(steps.items(), reverse=True):
        reason = why_incomplete(checkpoint)
        if reason is None:
            return checkpoint
        logger.warning("passing over checkpoint %s: %s", checkpoint, reason)
    return None


def find_checkpoint(asked: str, directory: str | Path, accelerator, settings: dict) -> tuple[Path, int]:
    """The checkpoint to resume from, and its step. Rank 0 looks, and all ranks learn of it.

    Args:
        asked: path of a checkpoint, or empty for the newest complete one in `directory`.
        settings: of this run. A checkpoint of other settings, or of another number of processes, is refused.

    Raises ValueError where there is no such checkpoint, it is cut off, or it does not fit.
    """
    now = {"number of processes": accelerator.num_processes, **settings}
    return first_rank_decides(lambda: _look(asked, directory, now))


def _look(asked: str, directory: str | Path, now: dict) -> tuple[Path, int]:
    checkpoint = Path(asked) if asked else newest_checkpoint(directory)
    if checkpoint is None:
        raise ValueError(
            f"--resume: {directory} has no complete checkpoint: leave --resume out to start from the beginning"
        )
    if reason := why_incomplete(checkpoint):
        raise ValueError(f"--resume: {checkpoint} is no complete checkpoint: {reason}")
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    saved = {"number of processes": manifest["processes"], **manifest["settings"]}
    changed = [f"{key} was {saved.get(key)!r}, is {now[key]!r}" for key in now if saved.get(key) != now[key]]
    if changed:
        raise ValueError(f"--resume: {checkpoint} is of a run with other settings ({'; '.join(changed)})")
    return checkpoint, manifest["step"]


def load_checkpoint(accelerator, checkpoint: str | Path) -> None:
    """Load weights, optimizer and random states; every rank calls it, after `accelerator.prepare`.

    Files are mapped, not read: what is copied out of them stays in the system's cache, which it can take back, and
    Adam's states become the process's own memory page by page as the first step writes them. So a host that was full
    in training suffices to resume it. The files may be deleted or replaced, but not written over, until then.
    """
    with serialization.patch("load.mmap", True):
        accelerator.load_state(str(checkpoint))


def save_model(accelerator, model, config, tokenizer, directory: str | Path, dtype: torch.dtype) -> None:
    """Write the model for `from_pretrained`, or the adapters for peft, with its tokenizer; every rank calls it.

    Args:
        model: what `accelerator.prepare` returned, around a module whose `.model` is the transformers or peft one.
        config: the model's configuration; adapters do not carry it, so it is written beside them.
        dtype: of the saved weights.

    ZeRO-3 shards are gathered layer by layer in rank 0's memory (2 bytes a parameter). Files are written
    aside and then moved, and weights of an earlier model that none of them replaces are removed.
    """
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        final = Path(directory)
        partial = final / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        prefix = "model."
        assert all(name.startswith(prefix) for name in weights)
        # casting tied weights once keeps them tied, and therefore saved once
        cast = {id(w): w.to(dtype) for w in {id(w): w for w in weights.values()}.values()}
        weights = {name.removeprefix(prefix): cast[id(w)] for name, w in weights.items()}
        accelerator.unwrap_model(model).model.save_pretrained(partial, state_dict=weights)
        config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        new = sorted(partial.iterdir())
        for stale in {*final.glob("*.safetensors"), *final.glob("*.safetensors.index.json")}:
            if stale.name not in {file.name for file in new}:
                stale.unlink()
        for file in new:
            _flush(file)
            file.replace(final / file.name)
        partial.rmdir()
    accelerator.wait_for_everyone()


def _gather(value) -> list:
    from accelerate.utils import gather_object

    return gather_object([value])


def _flush(path: Path) -> None:
    """Have the operating system write a file or a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
