"""eval_ppl.py, eval_needle.py and plot.py as users start them."""

import csv
import json
import sys
from pathlib import Path

import pytest
import test_haystack
from accelerate.state import AcceleratorState
from harness import spawn, tiny_model
from test_haystack import SENTENCES, byte_level, metaspace
from transformers import AutoConfig, AutoModelForCausalLM

import eval_needle
import eval_ppl
import plot
from easy_context.evaluation.documents import choose_documents, text_documents, tokenized_documents
from easy_context.evaluation.runtime import leading_tokens, load_tokenizer

HERE = Path(__file__).parent
tokenizer = test_haystack.tokenizer


def test_documents_from_everything(tmp_path):
    tokenizer = metaspace()
    rows = [tokenizer(text)["input_ids"] for text in SENTENCES]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    eval_ppl.save_documents(rows, str(tmp_path / "saved"))
    lead = leading_tokens(tokenizer)
    assert len(lead) == 1
    for source in ("rows.jsonl", "saved"):
        documents = tokenized_documents(str(tmp_path / source), split="test")
        assert choose_documents(documents, lead=lead) == [row[1:] for row in rows]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(SENTENCES):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    documents = list(text_documents(str(tmp_path / "texts"), tokenizer, split="test"))
    assert documents == [row[1:] for row in rows]
    long = choose_documents(documents, min_tokens=30, samples=2)
    assert len(long) == 2 and min(map(len, long)) >= 30
    with pytest.raises(ValueError, match="--dataset-min-tokens"):
        choose_documents(documents, min_tokens=10_000)
    with pytest.raises(ValueError, match="--feature"):
        text_documents(str(tmp_path / "texts"), tokenizer, split="test", feature="body")
    with pytest.raises(ValueError, match="input_ids"):
        tokenized_documents(str(tmp_path / "texts"), split="test")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_level("single")
    tiny_model(vocab_size=len(tokenizer)).float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def run_script(script, *words):
    argv, sys.argv = sys.argv, [script.__name__, *map(str, words)]
    try:
        script.main()
    finally:
        sys.argv = argv
        AcceleratorState._reset_state(reset_partial_state=True)


def test_eval_ppl_writes_and_plot_draws(saved_model, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text(" ".join(SENTENCES * 5))
    common = ["--dataset", text, "--min-tokens", 32, "--max-tokens", 128, "--segments", "0,16,32", "--hide-progress"]
    run_script(eval_ppl, "-m", saved_model, *common, "--dtype", "fp32", "--output-file", tmp_path / "ppl.csv")
    header, row = csv.reader((tmp_path / "ppl.csv").open())
    assert header == ["", "32", "64", "128"] and row[0] == saved_model
    report = json.loads((tmp_path / "ppl.json").read_text())
    records = report["models"][0]["lengths"]
    assert [record["perplexity"] for record in records] == [float(cell) for cell in row[1:]]
    assert len({record["tokens"] for record in records}) == 1
    assert [s["start"] for s in records[0]["segments"]] == [0, 16]
    for name in ("ppl.csv", "ppl.segments.csv"):
        run_script(plot, tmp_path / name, "--ymin", 0)
        assert (tmp_path / name).with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def run_eval_ppl(rank, world, *words):
    run_script(eval_ppl, *words)


@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "data_parallel"])
def test_eval_ppl_is_the_same_on_two_processes(saved_model, tmp_path, mode):
    text = tmp_path / "book.txt"
    text.write_text(" ".join(SENTENCES * 5))
    words = ["-m", saved_model, "--dataset", str(text), "--min-tokens", "50", "--max-tokens", "100", "--dtype", "fp32"]
    run_script(eval_ppl, *words, "--output-file", tmp_path / "one.csv")
    words += ["--parallel_mode", mode, "--output-file", str(tmp_path / "two.csv")]
    spawn(run_eval_ppl, 2, *words)
    one, two = (json.loads((tmp_path / name).read_text())["models"][0]["lengths"] for name in ("one.json", "two.json"))
    for record, other in zip(one, two, strict=True):
        assert record["tokens"] == other["tokens"]
        assert record["nll"] == pytest.approx(other["nll"], rel=1e-6)


def test_adapters_are_evaluated_over_their_model(saved_model, tmp_path):
    """As train.py --lora leaves them: adapters, configuration and tokenizer, without the model's weights."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    lora = get_peft_model(AutoModelForCausalLM.from_pretrained(saved_model), settings)
    lora.save_pretrained(tmp_path / "adapters")
    lora.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("adapters", "merged"):
        byte_level("single").save_pretrained(tmp_path / name)
        config = AutoConfig.from_pretrained(saved_model)
        config.rope_parameters["rope_theta"] = 77.0
        config.save_pretrained(tmp_path / name)
    text = tmp_path / "book.txt"
    text.write_text(" ".join(SENTENCES * 5))
    models = saved_model, tmp_path / "adapters", tmp_path / "merged"
    length = ["--min-tokens", 100, "--max-tokens", 100, "--dtype", "fp32", "--output-file", tmp_path / "ppl.csv"]
    run_script(eval_ppl, "-m", *models, "--dataset", text, *length)
    _, *rows = csv.reader((tmp_path / "ppl.csv").open())
    plain, adapted, merged = (float(row[1]) for row in rows)
    assert adapted == pytest.approx(merged, rel=1e-5)
    assert adapted != pytest.approx(plain, rel=1e-2)
    (tmp_path / "hay.txt").write_text("\n\n".join(SENTENCES))
    lengths = ["--min_context_length", 256, "--max_context_length", 256, "--haystack_dir", tmp_path]
    run_script(eval_needle, "--model", models[1], *lengths, "--output-dir", tmp_path / "out")


def test_where_nothing_can_be_written_nothing_is_measured(saved_model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(eval_ppl, "measure", None)
    monkeypatch.setattr(eval_needle, "evaluate", None)
    with pytest.raises(OSError, match="file"):
        run_script(eval_ppl, "-m", saved_model, "--dataset", "x", "--output-file", tmp_path / "file" / "ppl.csv")
    with pytest.raises(OSError, match="file"):
        run_script(eval_needle, "--model", saved_model, "--output-dir", tmp_path / "file" / "needle")


def test_eval_needle_writes(saved_model, tmp_path):
    (tmp_path / "hay.txt").write_text("\n\n".join(SENTENCES))
    lengths = ["--min_context_length", 256, "--max_context_length", 512, "--context_interval", 256]
    trials = ["--depth_interval", 0.5, "--num_samples", 2, "--num_distractor", 1, "--haystack_dir", tmp_path]
    run_script(eval_needle, "--model", saved_model, *lengths, *trials, "--output-dir", tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "needle.csv").open()))
    assert [(row["context_length"], row["depth"]) for row in rows[:3]] == [
        ("256", "0.0"),
        ("256", "0.5"),
        ("256", "1.0"),
    ]
    report = json.loads((tmp_path / "out" / "needle.json").read_text())
    assert len(report["trials"]) == 2 * 3 * 2 and report["accuracy"] == 0
    assert (tmp_path / "out" / "needle.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("script", "words", "named"),
    [
        (eval_ppl, ["-m", "x", "--dataset", "/no/such.txt", "--max-tokens", 16], "from 256 to 16"),
        (eval_ppl, ["-m", "x", "--dataset", "/no/such.txt", "--parallel_mode", "nonsense"], "nonsense"),
        (eval_ppl, ["-m", "x", "--dataset", "/no/such.txt", "--segments", "5,3"], "--segments"),
        (eval_ppl, ["-m", "x", "--dataset", "/no/such.txt", "--samples", -1], "--samples -1"),
        (eval_needle, ["--model", "x", "--num_samples", 0], "--num_samples 0"),
        (eval_needle, ["--model", "x", "--parallel_mode", "nonsense"], "nonsense"),
        (eval_needle, ["--model", "x", "--context_interval", 0], "steps of 0"),
        (eval_needle, ["--model", "/no/such/model"], "--model /no/such/model"),
        (eval_ppl, ["-m", "x", "--dataset", "y", "--output-file", HERE], "--output-file .*a directory"),
        (plot, [__file__], "not a table"),
        (plot, [HERE.parent / "docs" / "ppl.png"], "ppl.png: not a table"),
    ],
)
def test_wrong_settings_are_named(script, words, named):
    with pytest.raises(ValueError, match=named):
        run_script(script, *words)


def test_a_model_out_of_reach_is_named(monkeypatch):
    def out_of_reach(name):
        raise OSError("no network")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", out_of_reach)
    with pytest.raises(ValueError, match="--model nobody/nothing: .*no network"):
        load_tokenizer("nobody/nothing")


def test_missing_dataset_and_haystack_are_named(saved_model, tmp_path):
    with pytest.raises((ValueError, OSError), match="such.txt"):
        run_script(eval_ppl, "-m", saved_model, "--dataset", tmp_path / "such.txt")
    with pytest.raises(ValueError, match="--haystack_dir"):
        run_script(eval_needle, "--model", saved_model, "--haystack_dir", tmp_path / "hay")
