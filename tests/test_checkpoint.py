"""A checkpoint is whole or does not count, and what is resumed from fits the run that resumes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from easy_context.checkpoint import (
    claim_output_dir,
    find_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    why_incomplete,
)
from easy_context.metrics import Reporter

SETTINGS = {"--seq-length": 32, "--seed": 1}


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    yield accelerator
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def saved(accelerator, tmp_path):
    """A directory with the complete checkpoints of steps 9 and 10."""
    for step in (9, 10):
        save_checkpoint(accelerator, tmp_path, step, SETTINGS)
    return tmp_path


def test_the_newest_is_that_of_the_highest_step(saved, accelerator):
    assert newest_checkpoint(saved) == saved / "step_10"
    assert find_checkpoint("", saved, accelerator, SETTINGS) == (saved / "step_10", 10)
    assert find_checkpoint(str(saved / "step_9"), saved, accelerator, SETTINGS) == (saved / "step_9", 9)


def cut(checkpoint):
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.truncate(100)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "model.safetensors is missing or cut off"),
        (lambda checkpoint: (checkpoint / "optimizer.bin").unlink(), "optimizer.bin is missing"),
        (lambda checkpoint: (checkpoint / "complete.json").unlink(), "writing it was cut off"),
        (lambda checkpoint: (checkpoint / "complete.json").write_text('{"step": 10, "fi'), "writing it was cut off"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_refused_by_name(saved, accelerator, damage, reason, caplog):
    damage(saved / "step_10")
    assert reason in why_incomplete(saved / "step_10")
    assert newest_checkpoint(saved) == saved / "step_9"
    assert reason in caplog.text
    with pytest.raises(ValueError, match="step_10 is no complete checkpoint"):
        find_checkpoint(str(saved / "step_10"), saved, accelerator, SETTINGS)


def test_a_crash_while_writing_leaves_nothing_that_loads(saved, accelerator, monkeypatch):
    def crash(directory):
        with open(f"{directory}/model.safetensors", "wb") as file:
            file.write(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(accelerator, "save_state", crash)
    for step in (10, 11):  # in place of an older one, and anew
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(accelerator, saved, step, SETTINGS)
    assert newest_checkpoint(saved) == saved / "step_10"
    monkeypatch.undo()
    save_checkpoint(accelerator, saved, 11, SETTINGS)
    assert newest_checkpoint(saved) == saved / "step_11"
    assert sorted(d.name for d in saved.glob("step_11*")) == ["step_11"]


def test_a_checkpoint_of_another_run_is_refused(saved, accelerator):
    with pytest.raises(ValueError, match="--seq-length was 32, is 64"):
        find_checkpoint("", saved, accelerator, {**SETTINGS, "--seq-length": 64})
    manifest = json.loads((saved / "step_10" / "complete.json").read_text())
    (saved / "step_10" / "complete.json").write_text(json.dumps({**manifest, "processes": 8}))
    with pytest.raises(ValueError, match="number of processes was 8, is 1"):
        find_checkpoint("", saved, accelerator, SETTINGS)
    with pytest.raises(ValueError, match="no complete checkpoint: leave --resume out"):
        find_checkpoint("", saved / "nowhere", accelerator, SETTINGS)


def test_a_checkpoint_is_mapped_and_outlives_its_files(accelerator, tmp_path):
    [model], [optimizer] = accelerator._models, accelerator._optimizers
    x = torch.ones(2, 4)

    def step() -> dict:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    def mapped() -> bool:
        return "step_1/optimizer.bin" in Path("/proc/self/maps").read_text()

    step()
    saved = save_checkpoint(accelerator, tmp_path, 1, SETTINGS)
    truth = [step(), step()]
    assert not mapped()
    load_checkpoint(accelerator, saved)
    assert mapped()
    shutil.rmtree(saved)
    again = [step(), step()]
    for new, old in zip(again, truth, strict=True):
        assert all(torch.equal(new[name], old[name]) for name in old)
    assert not torch.utils.serialization.config.load.mmap


def test_metrics_go_on_after_the_checkpoint_though_their_last_line_was_cut_off(accelerator, tmp_path):
    path, lines = tmp_path / "metrics.jsonl", [json.dumps({"step": step}) for step in (1, 2, 3)]
    amount = {"steps": 9, "tokens": 1, "flops": 1.0}
    for left in ("", '{"step": 4, "lo'):
        path.write_text("\n".join([*lines, left]))
        Reporter(accelerator, path, start=2, **amount).close()
        assert path.read_text().splitlines() == lines[:2]
    Reporter(accelerator, path, start=0, **amount).close()
    assert path.read_text() == ""


def test_a_used_output_directory_is_kept(saved, accelerator):
    output = saved / "output"
    claim_output_dir(output, accelerator, resume=False, overwrite=False)
    (output / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="is in use"):
        claim_output_dir(output, accelerator, resume=False, overwrite=False)
    claim_output_dir(output, accelerator, resume=True, overwrite=False)
    assert (output / "checkpoints").exists()
    claim_output_dir(output, accelerator, resume=False, overwrite=True)
    assert not (output / "checkpoints").exists()
