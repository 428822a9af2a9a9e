"""The recipes hold together: flags, configurations and paths of every stage, seen without a GPU, weights or a hub.

Each recipe runs for real in bash, over stand-ins for `accelerate` and `python` that write down how they were called;
what was written is then put to Accelerate's own parser and to the scripts' own. One dry run goes without stand-ins.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from transformers import LlamaConfig

from easy_context.planner import ModelShape, plan
from easy_context.train_flags import parse_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import eval_needle  # noqa: E402
import eval_ppl  # noqa: E402
import train  # noqa: E402

STAGES = {"llama2_7b_1m": 7, "llama2_13b_1m": 8, "danube2_256k": 9, "mistral_7b_256k": 4}
SIZES = {"llama2_7b_1m": "llama-2-7b", "llama2_13b_1m": "llama-2-13b", "mistral_7b_256k": "mistral-7b"}
SIZES["danube2_256k"] = ModelShape("danube2", 2560, 6912, layers=24, heads=32, kv_heads=8, head_size=80, vocab=32000)
EVALUATIONS = {"needle": eval_needle, "perplexity": eval_ppl}
TWO_NODES = {"MACHINE_RANK": "1", "MAIN_PROCESS_IP": "10.0.0.1"}

STAND_IN = """#!{python} -IS
import json, os, sys
from pathlib import Path

call = dict(program=Path(sys.argv[0]).name, arguments=sys.argv[1:], world=os.environ.get("WORLD_SIZE"))
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps(call), file=calls)
if "train.py" in sys.argv and "--dry-run" not in sys.argv:
    output = Path(sys.argv[sys.argv.index("--output-dir") + 1])
    output.mkdir(parents=True, exist_ok=True)
    output.joinpath("config.json").write_text(os.environ["CONFIG_JSON"])
elif sys.argv[1] == "-":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def run_recipe(directory: Path, name: str, *arguments: str, **environment: str) -> list[dict]:
    """The calls that a recipe makes when it runs with OUTPUT at `directory / "out"`."""
    programs, calls = directory / "programs", directory / "calls"
    programs.mkdir(exist_ok=True)
    for program in ("accelerate", "python"):
        (programs / program).write_text(STAND_IN.format(python=sys.executable))
        (programs / program).chmod(0o755)
    calls.write_text("")
    given = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "CONFIG_JSON": LlamaConfig(num_hidden_layers=2).to_json_string(),
        "OUTPUT": str(directory / "out"),
    }
    command = ["bash", str(ROOT / "train_scripts" / f"{name}.sh"), *arguments]
    subprocess.run(command, cwd=directory, env={**os.environ, **given, **environment}, check=True)
    return [json.loads(line) for line in calls.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(recipe)`: its output directory, and what Accelerate understands of the calls; run once."""
    known = {}

    def of(recipe: str):
        if recipe not in known:
            directory = tmp_path_factory.mktemp(recipe)
            calls = [call for call in run_recipe(directory, recipe, **TWO_NODES) if call["program"] == "accelerate"]
            known[recipe] = directory / "out", [launch_arguments(call) for call in calls]
        return known[recipe]

    return of


def launch_arguments(call: dict):
    """A call of `accelerate launch` through its own parser and checks, the configuration file merged in."""
    assert call["program"] == "accelerate" and call["arguments"][0] == "launch"
    return _validate_launch_command(launch_command_parser().parse_args(call["arguments"][1:]))[0]


@pytest.mark.parametrize("recipe", STAGES)
def test_stages_fit_together(recipe, trained, monkeypatch, capsys):
    """Each stage passes the dry run in the world and with the configuration that Accelerate would give it."""
    output, launches = trained(recipe)
    assert len(launches) == STAGES[recipe]
    monkeypatch.chdir(ROOT)
    former = None
    for launch in launches:
        assert launch.training_script == "train.py"
        assert launch.use_deepspeed and launch.num_processes == 8 * launch.num_machines
        monkeypatch.setenv("WORLD_SIZE", str(launch.num_processes))
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", launch.deepspeed_config_file)
        monkeypatch.setattr(sys, "argv", ["train.py", *launch.training_script_args, "--dry-run"])
        train.main()
        tokens = int(re.search(r"steps of ([\d,]+) tokens", capsys.readouterr().out)[1].replace(",", ""))
        assert 0.9e6 < tokens < 1.1e6  # a step is about a million tokens in every stage

        flags = parse_args("")
        assert flags.output_dir.parent == output
        if former is not None:
            assert flags.model == str(former.output_dir) and flags.output_dir != former.output_dir
            assert flags.seq_length >= former.seq_length and flags.rope_theta > former.rope_theta
            assert flags.seed != former.seed
        former = flags


@pytest.mark.parametrize("recipe", STAGES)
def test_stages_fit_into_memory(recipe, trained, monkeypatch):
    """On A100 of 80 GB in nodes of 1 TB; `plan` raises where a stage does not fit."""
    for launch in trained(recipe)[1]:
        monkeypatch.setattr(sys, "argv", ["train.py", *launch.training_script_args])
        flags = parse_args("")
        whole = 1 if flags.parallel_mode == "data_parallel" else launch.num_processes
        planned = plan(
            SIZES[recipe],
            gpus=launch.num_processes,
            nodes=launch.num_machines,
            gpu="A100",
            host_memory=1e12,
            seq_length=flags.seq_length,
            batch_size=flags.batch_size,
            mode=flags.parallel_mode,
            seq_parallel_size=flags.seq_parallel_size or whole,
        )
        assert flags.keep == "auto" and planned.longest >= flags.seq_length


def test_unknown_flag_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--model=m", "--dataset=d", "--output-dir=o", "--sequence-length=8"])
    with pytest.raises(SystemExit):
        train.main()
    assert "--sequence-length" in capsys.readouterr().err


def test_two_nodes_know_each_other(trained):
    for launch in trained("llama2_13b_1m")[1]:
        assert (launch.num_machines, launch.machine_rank) == (2, 1)
        assert (launch.main_process_ip, launch.main_process_port) == ("10.0.0.1", 29500)


def test_last_theta_needs_no_training(trained):
    output, launches = trained("llama2_7b_1m")
    last = launches[-1].training_script_args
    config = LlamaConfig.from_pretrained(output / "512K_theta_250M")
    assert str(output / "512K_theta_250M") in last
    assert config.rope_parameters["rope_theta"] == 1e9


@pytest.mark.parametrize("recipe", STAGES)
def test_dry_run_sees_the_flags_that_training_gets(recipe, trained, tmp_path):
    output, launches = trained(recipe)
    dry = run_recipe(tmp_path, recipe, "--dry-run", OUTPUT=str(output))
    assert {call["program"] for call in dry} == {"python"}
    assert [call["arguments"] for call in dry] == [
        [launch.training_script, *launch.training_script_args, "--dry-run"] for launch in launches
    ]
    assert [call["world"] for call in dry] == [str(launch.num_processes) for launch in launches]


def test_dry_run_without_stand_ins(tmp_path):
    program = ["bash", "train_scripts/mistral_7b_256k.sh", "--dry-run"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OUTPUT": str(tmp_path / "out")}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1,024,000 tokens") == STAGES["mistral_7b_256k"]
    assert not (tmp_path / "out").exists()
    wrong = subprocess.run([*program[:2], "--dryrun"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2 and "usage" in wrong.stderr


def test_interrupted_recipe_goes_on_from_there(tmp_path):
    """Finished stages are left alone, one with a checkpoint is resumed, one without starts afresh."""
    run_recipe(tmp_path, "mistral_7b_256k")
    assert run_recipe(tmp_path, "mistral_7b_256k") == []

    with_checkpoint, without = (tmp_path / "out" / name for name in ("128K_theta_10M", "128K_theta_30M"))
    (with_checkpoint / "checkpoints" / "step_50").mkdir(parents=True)
    (with_checkpoint / "finished").unlink()
    (without / "finished").unlink()
    resumed, afresh = (launch_arguments(c).training_script_args for c in run_recipe(tmp_path, "mistral_7b_256k"))
    assert resumed[-1] == "--resume" and str(with_checkpoint) in resumed
    assert afresh[-1] == "--overwrite-output-dir" and str(without) in afresh
    assert (with_checkpoint / "finished").exists() and (without / "finished").exists()


@pytest.mark.parametrize("recipe", EVALUATIONS)
def test_evaluations(recipe, tmp_path, monkeypatch):
    script = EVALUATIONS[recipe]
    call, *plots = run_recipe(tmp_path, recipe, MODEL="some/model")
    launch = launch_arguments(call)
    assert launch.training_script == f"{script.__name__}.py"
    monkeypatch.setattr(sys, "argv", [launch.training_script, *launch.training_script_args])
    assert script.arguments().model in ("some/model", ["some/model"])
    for plot in plots:
        assert plot["arguments"][0] == "plot.py" and plot["arguments"][1] in launch.training_script_args


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")))
def test_accelerate_configurations(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config_from_file(f"accelerate_configs/{name}")
    assert config.distributed_type == "DEEPSPEED" and not config.use_cpu
    engine = json.loads(Path(config.deepspeed_config["deepspeed_config_file"]).read_text())
    assert engine["zero_optimization"]["stage"] == 3
    assert engine["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert not {"optimizer", "scheduler"} & set(engine)  # learning rate and schedule live in train.py's flags
    assert ("offload_optimizer" in engine["zero_optimization"]) == (name != "deepspeed_inference.yaml")
