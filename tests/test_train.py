"""train.py as users start it: parallel runs follow the serial one, interrupted runs the uninterrupted one."""

import json
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from harness import free_port, tiny_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import train
from easy_context.engine import StepSettings, check_deepspeed_file
from easy_context.metrics import flops_per_token, progress_line
from easy_context.train_flags import check, parse_args

ROOT = Path(__file__).parent.parent
STEPS = 10
LAUNCHERS = {
    "serial": ["train.py"],
    "torchrun-2": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "PORT", "train.py"],
    "torchrun-4": ["-m", "torch.distributed.run", "--nproc_per_node", "4", "--master_port", "PORT", "train.py"],
    "zero3": ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    + ["--main_process_port", "PORT", "train.py"],
    "zero3-gpus": ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/single_node.yaml"]
    + ["--num_processes", "2", "--main_process_port", "PORT", "train.py"],
    "zero3-4": ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    + ["--num_processes", "4", "--main_process_port", "PORT", "train.py"],
}
FLAGS = {
    "--seq-length": 32,
    "--batch-size": 2,
    "--gradient-accumulate-every": 2,
    "--max-train-steps": STEPS,
    "--learning-rate": 1e-3,
    "--lr-schedule": "cosine",
    "--warmup-steps": 2,
    "--weight-decay": 0.01,
    "--rope-theta": 50000,
    "--dtype": "fp32",
    "--eval-steps": 5,
    "--checkpointing-steps": 4,
}


def slow(*values):
    """Parameters of a test that the README's command leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A tiny model with tied weights, and rows of which some have few, many, or no tokens to predict."""
    place = tmp_path_factory.mktemp("material")
    model = tiny_model(dtype=torch.float32, tie_word_embeddings=True, initializer_range=0.1)
    model.save_pretrained(place / "model")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)} | {"</s>": 96}, unk_token="</s>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(place / "model")
    generator = torch.Generator().manual_seed(1)
    for name, count in (("train", 24), ("held_out", 5)):
        ids = torch.randint(0, 97, (count, 32), generator=generator)
        mask = torch.rand(count, 32, generator=generator) < torch.linspace(-0.1, 1, count)[:, None]
        Dataset.from_dict({"input_ids": ids.tolist(), "loss_mask": mask.tolist()}).save_to_disk(place / name)
    return place


def start(launcher: str, material: Path, output: Path, *arguments, script="train.py", environment=None, **flags):
    """Run train.py, or a script around it, to its end."""
    flags = {"--model": material / "model", "--dataset": material / "train", "--output-dir": output, **FLAGS, **flags}
    words = [*LAUNCHERS[launcher], *(str(w) for flag in flags.items() for w in flag), *arguments]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where DeepSpeed finds ninja
    places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": places, **(environment or {})}
    words = [{"PORT": str(free_port()), "train.py": script}.get(word, word) for word in words]
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


def finish(*args, **flags) -> list[dict]:
    """The records of a run that ends well."""
    run = start(*args, **flags)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in (args[2] / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(material, tmp_path_factory):
    """Uninterrupted runs by launcher: the directory and its records."""
    done = {}

    def get(launcher: str):
        if launcher not in done:
            output = tmp_path_factory.mktemp(launcher) / "output"
            done[launcher] = output, finish(launcher, material, output, **{"--eval-dataset": material / "held_out"})
        return done[launcher]

    return get


def assert_follows(records: list[dict], truth: list[dict], tolerance: float):
    assert [record["step"] for record in records] == [record["step"] for record in truth]
    for record, true in zip(records, truth, strict=True):
        for name in {"loss", "grad_norm", "lr", "eval_loss"} & set(true):
            assert record[name] == pytest.approx(true[name], rel=tolerance), (name, true["step"])


def test_one_process_follows_a_plain_loop_over_all_rows(material, tmp_path):
    """Two micro-batches of 12 are the whole dataset in any order, so each step is one on the whole of it."""
    flags = {"--batch-size": 12, "--max-train-steps": 3, "--weight-decay": 0.1, "--checkpointing-steps": 9}
    records = finish("serial", material, tmp_path / "output", **flags)

    config = AutoConfig.from_pretrained(material / "model")
    config.rope_parameters["rope_theta"] = 50000
    model = AutoModelForCausalLM.from_pretrained(material / "model", config=config)
    rows = Dataset.load_from_disk(material / "train").with_format("torch")[:]
    labels = rows["input_ids"].masked_fill(rows["loss_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for record, rate in zip(records, (0.5e-3, 1e-3, 1e-3), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        logits = model(rows["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert_follows([record], [{**record, "loss": loss.item(), "grad_norm": norm.item(), "lr": rate}], 1e-5)


def test_labels_that_leave_nothing_to_predict_are_told_once(material, tmp_path):
    rows = Dataset.load_from_disk(material / "train").remove_columns("loss_mask")
    rows.map(lambda row: {"labels": [-100] * len(row["input_ids"])}).save_to_disk(tmp_path / "rows")
    flags = {"--dataset": tmp_path / "rows", "--max-train-steps": 2}
    run = start("torchrun-2", material, tmp_path / "output", **flags)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("all labels are -100") == 1


def test_zero3_with_offload_follows_one_process(runs):
    output, records = runs("zero3")
    truth = runs("serial")[1]
    assert (
        len(records) == STEPS and max(record["grad_norm"] for record in truth) > 1.5
    )  # unclipped, though clipped at 1
    assert_follows(records, truth, 1e-5)
    assert [record["step"] for record in records if "eval_loss" in record] == [5, 10]
    weights, true = load_file(output / "model.safetensors"), load_file(runs("serial")[0] / "model.safetensors")
    assert weights.keys() == true.keys()
    assert all(torch.allclose(weights[name], true[name], rtol=1e-3, atol=1e-4) for name in true)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 NVIDIA GPUs")
@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "usp_attn"])
def test_zero3_with_offload_on_two_gpus_follows_one_process(runs, material, tmp_path, mode):
    truth = runs("serial")[1]
    flags = {"--eval-dataset": material / "held_out", "--parallel_mode": mode}
    assert_follows(finish("zero3-gpus", material, tmp_path / "output", **flags), truth, 1e-4)
    assert len(truth) == STEPS and max(record["grad_norm"] for record in truth) > 1.5


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        ("torchrun-4", {"--seq-parallel-size": 2, "--batch-size": 1}),
        slow("torchrun-2", {"--parallel_mode": "data_parallel", "--batch-size": 1}),
        slow("torchrun-2", {"--parallel_mode": "dist_flash_attn", "--gradient-checkpointing": "plain"}),
        ("zero3", {"--keep": "attention:host", "--head-groups": 2, "--tile-size": 10}),
        slow("torchrun-2", {"--parallel_mode": "auto", "--keep": "auto"}),
        slow("zero3-4", {"--seq-parallel-size": 2, "--batch-size": 1}),
    ],
    ids=["2 x 2", "data parallel", "dist flash", "memory plan under ZeRO-3", "planned", "2 x 2 under ZeRO-3"],
)
def test_other_splits_follow_one_process(runs, material, tmp_path, launcher, flags):
    records = finish(launcher, material, tmp_path / "output", **{"--eval-dataset": material / "held_out", **flags})
    assert_follows(records, runs("serial")[1], 1e-5)


@pytest.mark.slow
def test_deterministic_runs_are_bit_identical(material, tmp_path):
    flags = {"--max-train-steps": 2, "--checkpointing-steps": 9}
    first, second = (finish("serial", material, tmp_path / name, "--deterministic", **flags) for name in ("a", "b"))
    assert_follows(first, second, 0)
    weights, others = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("launcher", [slow("serial"), "zero3"])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(runs, material, tmp_path, launcher):
    """Interrupted past step 8, whose checkpoint was cut off: the run goes on from step 4, into the second epoch."""
    before, truth = runs(launcher)
    output = tmp_path / "output"
    shutil.copytree(before / "checkpoints", output / "checkpoints")
    shutil.copy(before / "metrics.jsonl", output)
    victim = max((output / "checkpoints" / "step_8").rglob("*"), key=lambda f: f.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    records = finish(launcher, material, output, "--resume", **{"--eval-dataset": material / "held_out"})
    assert_follows(records, truth, 0)
    weights, true = load_file(output / "model.safetensors"), load_file(before / "model.safetensors")
    assert all(torch.equal(weights[name], true[name]) for name in true)


@pytest.mark.parametrize("launcher", ["serial", "zero3"])
def test_the_saved_model_reloads(runs, launcher):
    output, _ = runs(launcher)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 50000
    saved = load_file(output / "model.safetensors")
    state = model.state_dict()
    assert state.keys() - saved.keys() == {"lm_head.weight"} and saved.keys() <= state.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert AutoTokenizer.from_pretrained(output).eos_token == "</s>"
    assert {f.name for f in output.glob("*.safetensors")} == {"model.safetensors"}
    assert not list(output.rglob("*.partial"))


@pytest.mark.parametrize("plan", [slow({}), {"--keep": "attention:host", "--head-groups": 2, "--tile-size": 10}])
def test_lora_trains_adapters_alone_in_bf16_under_zero3(material, tmp_path, plan):
    from peft import PeftModel

    output = tmp_path / "output"
    output.mkdir()
    (output / "model.safetensors").write_text("of an earlier run")
    flags = {"--lora": 4, "--dtype": "bf16", "--max-train-steps": 3, "--learning-rate": 1e-2, "--warmup-steps": 0}
    run = start("zero3", material, output, "--overwrite-output-dir", **flags, **plan)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "left as DeepSpeed made it" not in run.stderr + run.stdout  # `memory/zero_host.py`
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < records[0]["loss"]
    assert {f.name for f in output.glob("*.safetensors")} == {"adapter_model.safetensors"}
    base = AutoModelForCausalLM.from_pretrained(material / "model")
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    model = PeftModel.from_pretrained(base, output)
    adapters = {name: weight for name, weight in model.named_parameters() if "lora_B" in name}
    assert len(adapters) == 2 * 7 and all(weight.abs().max() > 0 for weight in adapters.values())
    assert all(
        torch.equal(before[n.replace("base_layer.", "")], w) for n, w in base.named_parameters() if "lora" not in n
    )


def test_bf16_keeps_float32_masters_without_deepspeed(runs, material, tmp_path):
    output = tmp_path / "output"
    flags = {"--dtype": "bf16", "--max-train-steps": 4}
    records = finish("serial", material, output, **flags)
    assert records[0]["loss"] == pytest.approx(runs("serial")[1][0]["loss"], rel=1e-2)
    assert load_file(output / "checkpoints" / "step_4" / "model.safetensors").popitem()[1].dtype == torch.float32
    assert load_file(output / "model.safetensors").popitem()[1].dtype == torch.bfloat16


def test_a_used_output_directory_is_refused_once_and_by_all(material, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    run = start("torchrun-2", material, tmp_path)
    assert run.returncode != 0
    lines = [line for line in run.stderr.splitlines() if "is in use" in line]
    assert len(lines) == 1 and lines[0].startswith("error: --output-dir")
    assert "train.py" not in run.stderr.replace("train.py FAILED", "")  # no trace
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.txt"]


FAULTS = [
    ({"--dataset": "/nowhere"}, "no such file or directory"),
    ({"--model": "/nowhere"}, "/nowhere"),
    ({"--batch-size": 25}, "24 sequences, fewer than --batch-size"),
    ({"--resume": ""}, "has no complete checkpoint"),
    ({"--keep": "3xattention:host"}, "other than the model's 2 layers"),
    ({"--keep": "attention:host", "--host-memory": "10KB"}, "host memory"),
]


def test_faults_end_in_one_line(material, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(start, "serial", material, tmp_path / str(number), **flags)
            for number, (flags, _) in enumerate(FAULTS)
        ]
    for run, (_, message) in zip([run.result() for run in runs], FAULTS, strict=True):
        lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
        assert run.returncode == 2 and len(lines) == 1 and message in lines[0], run.stderr
        assert "Traceback" not in run.stderr


def test_a_checkpoint_beyond_the_last_step_is_refused(runs, material, tmp_path):
    before, _ = runs("serial")
    shutil.copytree(before / "checkpoints", tmp_path / "output" / "checkpoints")
    run = start("serial", material, tmp_path / "output", "--resume", **{"--max-train-steps": 2})
    assert run.returncode == 2 and "--max-train-steps 2: " in run.stderr and "is that of step" in run.stderr


# --- without starting anything


def test_adapters_are_no_model_to_train(monkeypatch, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds adapters: merge them"):
        check(flags_of(monkeypatch, "--model", str(tmp_path)), 1)


def flags_of(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", "m", "--dataset", "d", "--output-dir", "o", *words])
    return parse_args("")


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (["--seq-parallel-size", "3"], 4, "--seq-parallel-size 3 does not divide the 4 processes"),
        (["--parallel_mode", "usp_attn", "--ring_degree", "3"], 4, "ring_degree=3 does not divide the 4"),
        (["--parallel_mode", "data_parallel", "--seq-parallel-size", "2"], 2, "leaves sequences whole"),
        (["--parallel_mode", "data_parallel", "--seq-parallel-size", "0"], 2, "0 does not divide the 2 processes"),
        (["--batch-size", "0"], 1, "--batch-size must be at least 1"),
        (["--lora", "0"], 1, "--lora must be at least 1, not 0"),
        (["--checkpointing-steps", "0"], 1, "--checkpointing-steps must be at least 1"),
        (["--max-grad-norm", "-1"], 1, "--max-grad-norm must be at least 0, not -1.0"),
        (["--learning-rate", "nan"], 1, "--learning-rate must be at least 0, not nan"),
        (["--warmup-steps", "-3"], 1, "--warmup-steps must be at least 0"),
        (["--min-lr-ratio", "7"], 1, "--min-lr-ratio must be between 0 and 1, not 7.0"),
        (["--resume", "--overwrite-output-dir"], 1, "give one of them"),
        (["--head-groups", "2", "--prefetch"], 1, "--head-groups, --prefetch are settings of a memory plan"),
        (["--keep", "auto", "--tile-size", "64"], 1, "--tile-size: the planner chooses"),
        (["--keep", "input:host", "--gradient-checkpointing", "plain"], 1, "give one of them"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_anything_starts(monkeypatch, words, world, message):
    with pytest.raises(ValueError, match=message):
        check(flags_of(monkeypatch, *words), world)


def test_the_plan_counts_the_tokens_of_a_step(monkeypatch):
    words = "--parallel_mode usp_attn --ring_degree 2 --seq-parallel-size 4 --batch-size 3 --seq-length 1000"
    plan = check(flags_of(monkeypatch, *words.split(), "--gradient-accumulate-every", "5"), 8)
    assert "2 x 4 processes (ring 2 x 2)" in plan and "30,000 tokens" in plan


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "AdamW"}}, "remove the section 'optimizer'"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4, the flags say 2"),
        ({"bf16": {"enabled": False}}, "bf16.enabled is False, the flags say True"),
        ({"bf16": {"enabled": "auto"}, "gradient_clipping": 1.0}, None),
    ],
)
def test_a_deepspeed_file_cannot_contradict_the_flags(monkeypatch, tmp_path, config, message):
    (tmp_path / "ds.json").write_text(json.dumps(config))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    settings = StepSettings(batch_size=1, accumulate=2, max_grad_norm=1.0, bf16=True)
    if message is None:
        check_deepspeed_file(settings)
    else:
        with pytest.raises(ValueError, match=message):
            check_deepspeed_file(settings)


def test_learning_rates(monkeypatch):
    def rates(*words):
        args = flags_of(monkeypatch, "--max-train-steps", "6", "--warmup-steps", "2", "--learning-rate", "1", *words)
        return [train.learning_rate(step, args) for step in range(6)]

    assert rates() == [0.5, 1, 1, 1, 1, 1]
    assert rates("--lr-schedule", "linear", "--min-lr-ratio", "0.2") == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4])
    assert rates("--lr-schedule", "cosine") == pytest.approx([0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, 0.1464466])


def test_flops_are_counted_by_the_book():
    model = tiny_model(dtype=torch.float32)  # hidden 64 = 4 x 16, 2 KV heads, MLP 96, 2 layers, vocabulary 97
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    attention = 2 * 1000 * 64  # 4 S d FLOPs a token and layer, halved
    assert flops_per_token(model, 1000) == 3 * (2 * (2 * layer + 64 * 97) + 2 * attention)
    record = {"loss": 1.5, "mfu": None, "tokens_per_second": 1234.5, "peak_memory_gib": 2.04}
    assert progress_line(record) == "loss 1.5000, 1,234 tok/s, peak 2.0 GiB"
    assert "MFU 45.6%" in progress_line({**record, "mfu": 0.4561})
