"""Evaluation: needles whole under every tokenizer, perplexity over tokens and equal for any number of ranks."""

import csv
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from harness import spawn, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import eval_needle
import eval_ppl
import plot
from easy_context import apply_seq_parallel_monkey_patch, init_seq_parallel
from easy_context.evaluation.documents import choose_documents, text_documents, tokenized_documents
from easy_context.evaluation.haystack import haystack_sentences, split_sentences
from easy_context.evaluation.needle import build_prompt, depth_grid, predict_answers, tokenize_pieces
from easy_context.evaluation.perplexity import perplexity, windows
from easy_context.evaluation.runtime import context_lengths, leading_tokens, load_tokenizer, turns
from easy_context.mesh import reset_mesh

HERE = Path(__file__).parent
SENTENCES = [
    "A list is a sequence of values that may be changed in place.",
    "Names refer to objects, and the same object may have many names.",
    "The value 3.5 is a number; 1024 is another one, and so are 77 and 900100.",
    '"Quoted" words are kept as they stand (brackets too).',
    "Each call returns a new iterator over the 12 items that were there when it was made!",
    "Does the order of evaluation matter?",
]
CORPUS = [*SENTENCES, *(f"The magic number of Paris is {7919 * i}." for i in range(1, 400))]
PRINTABLE = [*map(chr, range(32, 127)), "\n"]
MODES = ["zigzag_ring_attn", "dist_flash_attn", "usp_attn", "data_parallel"]


def byte_level(digits):
    """GPT-2's habits: no BOS, a word with its space; `digits`: one by one, or merged as they come."""
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True)] if digits == "single" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace():
    """SentencePiece's habits: BOS, a space before every text, here with digits in threes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    threes = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), threes])
    tokenizer.decoder = decoders.Metaspace()
    special = {"special_tokens": ["<unk>", "<s>"], "initial_alphabet": PRINTABLE}
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, **special))
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def merges_across_sentences():
    """No pre-tokenizer at all: the end of one sentence and the start of the next can be one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Fuse()
    text = [" ".join(CORPUS[i : i + 40]) for i in range(0, len(CORPUS), 40)]
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=300, initial_alphabet=PRINTABLE))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "no BOS, digits merged": lambda: byte_level("merged"),
    "no BOS, single digits": lambda: byte_level("single"),
    "BOS, metaspace, digits in threes": metaspace,
    "merges across sentences": merges_across_sentences,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    tokenizer = TOKENIZERS[request.param]()
    tokenizer.name_or_path = request.param
    return tokenizer


@pytest.fixture(scope="module")
def haystack(tokenizer):
    return tokenize_pieces(tokenizer, [f" {sentence}" for sentence in SENTENCES])


@pytest.mark.parametrize("distractors", [0, 3])
@pytest.mark.parametrize("length", [600, 1001])
def test_prompt_is_exact_and_its_needle_whole(tokenizer, haystack, length, distractors):
    starts = []
    for depth in depth_grid(0.1):
        prompt = build_prompt(tokenizer, haystack, length=length, depth=depth, distractors=distractors)
        text = tokenizer.decode(prompt.ids)
        needle = tokenizer.decode(prompt.ids[prompt.needle_start : prompt.needle_end])
        assert len(prompt.ids) == length
        assert f"The magic number of {prompt.city} is {prompt.number}." in needle
        answer = tokenizer.decode(prompt.answer)
        if tokenizer.name_or_path == "merges across sentences":  # and across words, even within the answer's line
            assert answer.endswith(prompt.number) and len(answer) < 16
        else:
            assert answer.strip() == prompt.number
        assert text.count(f"The magic number of {prompt.city} is") == 2  # the needle, and where the answer is due
        assert text.count("The magic number of ") == 2 + distractors
        assert text.count(prompt.number) == 2
        assert prompt.ids[: len(leading_tokens(tokenizer))] == leading_tokens(tokenizer)
        starts.append(prompt.needle_start)
    assert starts == sorted(starts)
    assert starts[0] < 0.2 * length and starts[-1] > 0.7 * length and len(set(starts)) >= 8


def test_prompt_is_what_the_tokenizer_makes_of_its_text():
    """No merge crosses a seam: retokenizing the text gives the same tokens."""
    for name in ("no BOS, digits merged", "no BOS, single digits"):
        tokenizer = TOKENIZERS[name]()
        haystack = tokenize_pieces(tokenizer, [f" {sentence}" for sentence in SENTENCES])
        whole = sum(map(len, haystack))
        empty = build_prompt(tokenizer, haystack, length=100_000, depth=0.5, distractors=2)
        spare = (100_000 - len(empty.ids)) % whole
        prompt = build_prompt(tokenizer, haystack, length=100_000 - spare, depth=0.5, distractors=2)
        text = tokenizer.decode(prompt.ids)
        assert tokenizer(text)["input_ids"][30:] == prompt.ids[30:]


def test_prompts_are_deterministic_and_samples_differ(tokenizer, haystack):
    def make(**changes):
        return build_prompt(tokenizer, haystack, **{"length": 700, "depth": 0.3, "distractors": 2, **changes})

    assert make() == make()
    others = [make(sample=1), make(seed=1), make(depth=0.4), make(length=701)]
    assert len({prompt.number for prompt in [make(), *others]}) == 5


def test_depths_stay_apart():
    assert depth_grid(0.25) == [0, 0.25, 0.5, 0.75, 1]
    assert len(set(depth_grid(0.001))) == 1001 and depth_grid(0.001)[-1] == 1
    assert depth_grid(0.3) == pytest.approx([0, 0.3, 0.6, 0.9])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"length": 40}, "context of 40 tokens"),
        ({"distractors": 1000}, "--num_distractor"),
        ({"digits": 0}, "--rnd_number_digits"),
        ({"digits": 1, "distractors": 9}, "--rnd_number_digits"),
    ],
)
def test_impossible_prompts_are_refused(tokenizer, haystack, changes, named):
    with pytest.raises(ValueError, match=named):
        build_prompt(tokenizer, haystack, **{"length": 600, "depth": 0.5, **changes})


def test_sentences_are_found_in_text():
    text = 'He said "Go." Then, e.g. this: 3.5 units! Why?\nNo line ends a sentence.\n\nA new paragraph does\n\n"So."'
    assert split_sentences(text) == [
        'He said "Go."',
        "Then, e.g. this: 3.5 units!",
        "Why?",
        "No line ends a sentence.",
        "A new paragraph does",
        '"So."',
    ]
    assert split_sentences("一句。两句！") == ["一句。", "两句！"]


def test_default_haystack_is_prose():
    sentences = haystack_sentences()
    assert len(sentences) > 2000 and len(set(sentences)) == len(sentences)
    assert all(sentence[-1] in ".!?" and sentence[0].isupper() for sentence in sentences)


def test_own_haystack(tmp_path):
    (tmp_path / "b.txt").write_text("Third. Fourth.")
    (tmp_path / "a.txt").write_text("First. Second.")
    assert haystack_sentences(str(tmp_path)) == ["First.", "Second.", "Third.", "Fourth."]
    with pytest.raises(ValueError, match="--haystack_dir"):
        haystack_sentences(str(tmp_path / "missing"))


# --- models -------------------------------------------------------------------------------------------------------


def ranks(rank=0, world=1):
    """What evaluation needs of an Accelerator."""
    return SimpleNamespace(process_index=rank, num_processes=world, device=torch.device("cpu"))


class Oracle(nn.Module):
    """Predicts the next token of a text it knows, plus `shift`."""

    def __init__(self, vocabulary, shift=0):
        super().__init__()
        self.vocabulary, self.shift = vocabulary, shift

    def forward(self, input_ids, position_ids, logits_to_keep):
        following = (input_ids.roll(-1, dims=1)[:, logits_to_keep] + self.shift) % self.vocabulary
        return SimpleNamespace(logits=nn.functional.one_hot(following, self.vocabulary).float())


@pytest.mark.parametrize("shift", [0, 1])
def test_oracle_finds_every_needle_and_a_wrong_model_none(tokenizer, haystack, shift):
    prompts = [build_prompt(tokenizer, haystack, length=500, depth=depth) for depth in (0.0, 0.5, 1.0)]
    answers = predict_answers(Oracle(len(tokenizer), shift), prompts, seq_algo="zigzag_ring_attn", accelerator=ranks())
    assert [answer == prompt.answer for answer, prompt in zip(answers, prompts, strict=True)] == [shift == 0] * 3


def random_documents(count=5):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 97, (23 * i + 20,), generator=generator).tolist() for i in range(count)]


def direct_perplexity(model, documents, size, stride, lead):
    """The definition, a token at a time from whole logits: `(tokens, nll by place in the window)`."""
    places = {}
    for ids in documents:
        done = 0 if lead else 1
        begin = 0
        while True:
            window = [*lead, *ids[begin : begin + size - len(lead)]]
            logp = model(torch.tensor([window]), use_cache=False).logits[0].log_softmax(-1)
            for i in range(1, len(window)):
                token = begin + i - len(lead)
                if token >= done:
                    places.setdefault(i, []).append(-logp[i - 1, window[i]].item())
            done = max(done, begin + size - len(lead))
            if done >= len(ids):
                break
            begin += min(stride, size - len(lead) - (not lead))
    return places


def measure(rank, world, mode, case):
    reset_mesh()
    init_seq_parallel(1 if mode == "data_parallel" else None)
    model = tiny_model()
    apply_seq_parallel_monkey_patch(mode, model)
    return perplexity(model, random_documents(), seq_algo=mode, accelerator=ranks(rank, world), **case)


def expect(case):
    settings = {"stride": 256, "lead": (), **case}
    documents = random_documents()
    if settings.pop("truncate", False):
        documents = [ids[: case["size"] - len(settings["lead"])] for ids in documents]
    bounds = settings.pop("bounds", [0, 10**9])
    with torch.no_grad():
        places = direct_perplexity(tiny_model(), documents, **settings)
    spans = [(0, 10**9), *zip(bounds, bounds[1:], strict=False)]
    for start, stop in spans:
        nll = [value for place, values in places.items() if start <= place < stop for value in values]
        yield len(nll), sum(nll)


CASES = [
    {"size": 32, "stride": 16, "bounds": [0, 8, 20, 32]},
    {"size": 33, "stride": 7, "lead": (1,)},
    {"size": 64, "truncate": True, "lead": (1,), "bounds": [16, 64]},
    {"size": 500},
]


@pytest.mark.parametrize("case", CASES)
def test_perplexity_is_the_direct_one(case):
    compare(measure(0, 1, "zigzag_ring_attn", case), case)


def compare(measured, case):
    whole, segments = measured
    expected = list(expect(case))
    for segment, (tokens, nll) in zip([whole, *segments], expected, strict=False):
        assert segment.tokens == tokens
        assert segment.nll == pytest.approx(nll, rel=1e-9)
        assert segment.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [2, 3])
def test_perplexity_is_equal_for_any_number_of_ranks(mode, world):
    case = CASES[0]
    results = spawn(measure, world, mode, case)
    assert all(result == results[0] for result in results)
    compare(results[0], case)


def answer_everywhere(rank, world, mode):
    reset_mesh()
    init_seq_parallel(1 if mode == "data_parallel" else None)
    tokenizer = byte_level("single")
    haystack = tokenize_pieces(tokenizer, [f" {sentence}" for sentence in SENTENCES])
    prompts = [build_prompt(tokenizer, haystack, length=301, depth=depth) for depth in (0.0, 0.5, 1.0)]
    model = tiny_model(vocab_size=len(tokenizer))
    apply_seq_parallel_monkey_patch(mode, model)
    return predict_answers(model, prompts, seq_algo=mode, accelerator=ranks(rank, world)), prompts


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_equal_for_any_number_of_ranks(mode):
    answers, prompts = answer_everywhere(0, 1, "zigzag_ring_attn")
    with torch.no_grad():
        for answer, prompt in zip(answers, prompts, strict=True):
            model = tiny_model(vocab_size=len(byte_level("single")))
            logits = model(torch.tensor([prompt.ids]), use_cache=False).logits[0]
            assert answer == logits[prompt.answer_start - 1 : -1].argmax(-1).tolist()
    for result in spawn(answer_everywhere, 2, mode):
        assert result == (answers, prompts)


def test_every_token_is_scored_once():
    for length in range(1, 40):
        for size in (1, 5, 12):
            for stride in {1, 3, 5} & {*range(size + 1)}:
                plan = list(windows(length, size, stride))
                scored = [i for window in plan for i in range(window.scored, window.end)]
                assert scored == list(range(length))
                assert all(w.begin <= w.scored < w.end <= w.begin + size for w in plan)


def test_context_lengths():
    assert context_lengths(256, 2048, None) == [256, 512, 1024, 2048]
    assert context_lengths(3, 23, None) == [3, 6, 12]
    assert context_lengths(4, 10, 3) == [4, 7, 10]


def test_turns_are_equally_many():
    hands = [turns("abcde", rank, 3) for rank in range(3)]
    assert [len(hand) for hand in hands] == [2, 2, 2]
    assert sorted(item for hand in hands for _, item, counts in hand if counts) == list("abcde")


# --- documents and scripts ----------------------------------------------------------------------------------------


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
