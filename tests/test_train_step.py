"""The benchmark of a training step: all systems compute the same, and what it reports is what it says."""

import importlib
import json
import math
import sys
from argparse import Namespace

import psutil
import pytest
import torch
from test_benchmarks import ROOT, run

import easy_context as ec

CPU = torch.device("cpu")
PLAN = {"keep": "attention:host", "head_groups": 1, "tile_size": 24, "prefetch": False}
PLAN |= {"compress": None, "disk": None}


@pytest.fixture
def step(monkeypatch):
    """Imports a module of benchmarks/ as its scripts do; what systems patch is taken back."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(LlamaMLP, "forward", LlamaMLP.forward)
    yield importlib.import_module
    ec.remove_seq_parallel_monkey_patch()
    torch.use_deterministic_algorithms(False)


def settings(step, system: str, **changes) -> Namespace:
    sizes = {**step("train_step").TINY, "rope_theta": 1e4, "dtype": "fp32", "seq_length": 64}
    how = {"repeats": 1, "warmup": 1, "plan": PLAN, "host_memory": None, "processes": 1, "mode": "data_parallel"}
    return Namespace(**{**sizes, **how, "system": system, "steps": 3, "deterministic": True, **changes})


@pytest.mark.parametrize("system", ["lean", "fast", "whole", "auto", "custom", "transformers-flash", "alst"])
def test_all_compute_the_same(step, system):
    if system == "alst":
        pytest.importorskip("deepspeed")
    trainer = step("step_trainer")
    expected = trainer.measure(settings(step, "transformers-flash-whole"), CPU)
    row = trainer.measure(settings(step, system), CPU)
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"])
    assert row["resident_gib"] > 0.1 and row["host_gib"] >= 0 and "peak_gib" not in row


def test_gradients_are_held_against_a_higher_precision(step):
    row = step("step_checks").gradients(settings(step, "lean"), CPU)
    assert row["loss"] == pytest.approx(row["reference_loss"], rel=1e-6)
    assert 0 < row["error"] < 1e-5 and 0 < row["plain_error"] < 1e-5 and row["ratio"] < 10


def test_steps_with_tiers_and_without(step, tmp_path):
    plan = {**PLAN, "keep": "attention:disk", "disk": str(tmp_path)}
    row = step("step_checks").drift(settings(step, "custom", plan=plan), CPU)
    assert row["identical_tiers"] and row["identical_again"] and row["finite"]
    assert row["apart_tiers"] == row["loss_apart_tiers"] == 0
    assert row["last_loss"] < row["first_loss"] and len(row["losses"]) == 3


@pytest.mark.slow
def test_two_processes_and_a_failure(step, tmp_path):
    expected = step("step_trainer").measure(settings(step, "lean"), CPU)
    systems = ["--systems", "lean", "transformers-flash"]
    output = tmp_path / "made" / "table"
    printed = run(
        *["benchmarks/train_step.py", "--tiny", "--gpus", "2", "--seq-length", "64", "--rope-theta", "1e4"],
        *["--repeats", "1", "--tile-size", "24", *systems, "--output", str(output)],
    )
    content = json.loads(output.with_suffix(".json").read_text())
    assert {"Command", "Date", "Device", "Method", "Work", "Versions"} < set(content)
    ours, peer = content["rows"]
    assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert peer["failure"].startswith("ValueError: transformers-flash is compared with on one GPU only")
    assert output.with_suffix(".md").read_text() in printed


DEAF = """
import os, signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 3:
    subprocess.Popen([sys.executable, __file__], start_new_session=True)
Path(__file__ + str(os.getpid())).touch()
time.sleep(600)
"""


def test_a_worker_that_does_not_listen_is_ended_with_its_children(step, tmp_path, monkeypatch):
    train_step = step("train_step")
    (tmp_path / "step_worker.py").write_text(DEAF)
    monkeypatch.setattr(train_step, "__file__", str(tmp_path / "train_step.py"))
    monkeypatch.setattr(train_step, "GRACE_SECONDS", 0.5)
    row = train_step.run({}, Namespace(gpus=1, peers_path=None, timeout=6))  # for two interpreters to start
    assert row == {"failure": "ended with exit code -9 after 6 s"}
    processes = [int(path.name.removeprefix("step_worker.py")) for path in tmp_path.glob("step_worker.py?*")]
    running = [p.pid for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE]
    assert len(processes) == 2 and not set(processes) & set(running)


def test_what_the_clock_is_divided_by(step, monkeypatch):
    """MFU on a device whose peak is known: 6 FLOPs a linear weight and 6 S d a layer, a token."""
    trainer = step("step_trainer")
    monkeypatch.setattr(trainer, "peak_flops", lambda device: 1e9)
    row = trainer.measure(settings(step, "whole"), CPU)
    sizes = step("train_step").TINY
    linear = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * sizes["intermediate"]) + 64 * sizes["vocab"]
    flops = 64 * (6 * linear + 6 * 64 * 64 * 2)
    assert row["mfu_percent"] == pytest.approx(100 * flops / row["seconds"] / 1e9)


def test_random_model_trains(step, tmp_path, monkeypatch):
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = ["--like", "tiny", "--output", str(tmp_path), "--seq-length", "128", "--rows", "2"]
    monkeypatch.setattr(sys, "argv", ["random_model.py", *arguments])
    step("random_model").main()
    rows = load_from_disk(str(tmp_path / "data"))
    assert [len(ids) for ids in rows["input_ids"]] == [128, 128] and max(rows[0]["input_ids"]) < 512
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.tie_word_embeddings and model.dtype == torch.bfloat16
    assert 0.015 < model.lm_head.weight.detach().float().std() < 0.025
    ids = torch.tensor(rows["input_ids"])
    assert abs(float(model(input_ids=ids, labels=ids).loss.detach()) - math.log(512)) < 0.5
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == 1
