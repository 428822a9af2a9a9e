"""What the planner reads and shows: sizes, flags, tables, the command; train.py takes what it prints."""

from argparse import ArgumentTypeError
from types import SimpleNamespace

import pytest
import torch
from harness import tiny_model
from transformers import AutoConfig

from easy_context import train_flags
from easy_context.memory.plan import MemoryPlan
from easy_context.planner import plan, settle
from easy_context.planner.cli import main, parser
from easy_context.planner.flags import flags_of, keep_flag, parse_keep, size, tokens
from easy_context.planner.known_models import KNOWN_MODELS

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "wanted"), [("80GB", 80e9), ("64GiB", 64 * GIB), ("1TB", 1e12), ("1.5TiB", 1.5 * 2**40), ("512e9", 512e9)]
)
def test_sizes(text, wanted):
    assert size(text) == wanted


@pytest.mark.parametrize(("text", "wanted"), [("1M", 2**20), ("512K", 2**19), ("131072", 2**17), ("1.5k", 1536)])
def test_tokens(text, wanted):
    assert tokens(text) == wanted


@pytest.mark.parametrize(("read", "text"), [(size, "a lot"), (tokens, "a lot"), (tokens, "1.5"), (size, "1e400")])
def test_unreadable_sizes(read, text):
    with pytest.raises(ArgumentTypeError, match=text):
        read(text)


@pytest.mark.parametrize("text", ["attention:host", "28xattention:host,4xeverything:gpu", "1xinput:disk,1xinput:gpu"])
def test_keep_flag_and_back(text):
    layers = {"attention:host": 7, "1xinput:disk,1xinput:gpu": 2}.get(text, 32)
    assert keep_flag(parse_keep(text, layers)) == text


@pytest.mark.parametrize("text", ["attention", "3xattention:host", "9xinput:gpu,attention:host", "everything:host", ""])
def test_unreadable_keep_flags(text):
    with pytest.raises(ValueError, match="keep"):
        parse_keep(text, 8)


def test_command_prints_tables_flags_and_picture(tmp_path, capsys):
    picture = tmp_path / "memory.png"
    asked = "plan --model llama-3.1-8b --gpus 4 --gpu H100 --gpu-memory 80GB --host-memory 1TB --seq-length 512K"
    assert main([*asked.split(), "--picture", str(picture)]) == 0
    said = capsys.readouterr().out
    for wanted in ("kept for backward", "attention", "optimizer", "tokens/s", "usp_attn", "longest", "--parallel_mode"):
        assert wanted in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_ends_in_one_line_where_nothing_fits(capsys):
    asked = "plan --model llama-3.1-8b --gpu-memory 4GB --seq-length 1M --host-memory 64GB"
    assert main(asked.split()) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("error: 1,048,576 tokens do not fit") and shown.err.count("\n") == 1 and not shown.out


def test_a_picture_that_cannot_be_written_is_named(tmp_path, capsys):
    picture = tmp_path / "nowhere" / "plan.png"
    assert main(f"plan --model llama-3.2-1b --seq-length 4K --picture {picture}".split()) == 1
    assert f"error: --picture {picture}" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "named"), [("root:x:0", "no config.json"), ("[1]", "a list")])
def test_files_that_are_no_configuration_are_named(tmp_path, content, named):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"--model {path}: .*{named}"):
        plan(str(path), seq_length=4096)


@pytest.mark.parametrize(
    "asked",
    [
        "--model llama-3.2-1b --seq-length 32K --engine plain",
        "--model llama-3.2-1b --seq-length 1M --host-memory 125GiB --gpu-memory 139GiB",
        "--model llama-3.1-8b --seq-length 1M --gpus 8 --mode usp_attn --seq-parallel-size 8 --lora 8",
        "--model llama-3.2-1b --seq-length 1M --gpu H100 --host-memory 80GB --disk /scratch",
        "--model llama-3.1-8b --seq-length 256K --gpu H100 --host-memory 1.5TB --compress int8 --gpus 2",
    ],
)
def test_the_printed_flags_are_train_pys(asked, monkeypatch, capsys):
    """They make the planned split and memory plan."""
    asked = asked.split()
    assert main(["plan", *asked]) == 0
    printed = capsys.readouterr().out.splitlines()[-1].split()
    options = vars(parser().parse_args(["plan", *asked]))
    made = plan(**{name: value for name, value in options.items() if name not in ("command", "picture", "measure")})
    assert printed == flags_of(made)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("sys.argv", ["train.py", "--model=m", "--dataset=d", "--output-dir=o", *printed])
    args = train_flags.parse_args("")
    train_flags.check(args, made.setting.gpus)
    config = AutoConfig.for_model(**KNOWN_MODELS[made.setting.shape.name])
    assert settle(args, config, SimpleNamespace(num_processes=made.setting.gpus)) == made.memory_plan
    split = args.parallel_mode, args.seq_parallel_size or made.setting.gpus, args.ring_degree
    assert split == (made.mode, made.seq_parallel_size, made.ring_degree)
    assert (args.seq_length, args.batch_size, args.lora) == (
        made.setting.seq_length,
        made.setting.batch_size,
        made.setting.lora,
    )


def test_what_was_asked_for_is_not_planned_over(monkeypatch):
    """--parallel_mode auto leaves --keep as it is; settings of a plan that is not made are refused."""
    monkeypatch.setattr("sys.argv", ["train.py", "--model=m", "--dataset=d", "--output-dir=o", "--seq-length=512"])
    args, config = train_flags.parse_args(""), tiny_model().config
    args.parallel_mode, args.keep, args.head_groups, args.seq_parallel_size = "auto", "input:gpu", 2, 1
    train_flags.check(args, 1)
    state = SimpleNamespace(deepspeed_plugin=None)
    here = SimpleNamespace(num_processes=1, device=torch.device("cpu"), state=state, print=lambda text: None)
    here.distributed_type = "NO"
    monkeypatch.setattr("easy_context.planner.training.first_rank_decides", lambda choose: choose())
    assert settle(args, config, here) == MemoryPlan.uniform(2, "input", "gpu", head_groups=2)
    args.keep = "auto"
    with pytest.raises(ValueError, match="--head-groups: the planner chooses"):
        train_flags.check(args, 1)
    args.keep, args.parallel_mode = None, "usp_attn"
    with pytest.raises(ValueError, match="--head-groups are settings of a memory plan"):
        train_flags.check(args, 1)
