"""Needle prompts: exact lengths, whole needles, sentence ends, under tokenizers of every kind."""

from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import eval_needle
from easy_context.evaluation.haystack import haystack_sentences, split_sentences
from easy_context.evaluation.needle import build_prompt, depth_grid, tokenize_pieces
from easy_context.evaluation.runtime import leading_tokens

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


def test_sentences_of_other_scripts_are_found():
    assert split_sentences("यह एक वाक्य है। यह दूसरा। نعم؟ لا۔") == ["यह एक वाक्य है।", "यह दूसरा।", "نعم؟", "لا۔"]


@pytest.mark.parametrize("text", ["A log line without an end " * 100, "วันนี้อากาศดีมาก" * 200])
def test_text_without_sentence_ends_is_cut(tmp_path, text):
    """In one sentence as long as the text a needle would stand at its start or its end, at every depth."""
    (tmp_path / "a.txt").write_text(f"Short one. {text}", encoding="utf-8-sig")
    first, *others = haystack_sentences(str(tmp_path))
    assert first == "Short one." and len(others) > 5 and max(map(len, others)) <= 400
    joint = " " if " " in text else ""
    assert joint.join(others) == text.strip()


def test_a_haystack_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "latin.txt").write_bytes("Grüße.".encode("latin-1"))
    with pytest.raises(ValueError, match="--haystack_dir: .*latin.txt is no UTF-8 text"):
        haystack_sentences(str(tmp_path))
    (tmp_path / "latin.txt").write_text("你好。", encoding="utf-8")

    def drops_what_it_does_not_know(texts, **_):
        return {"input_ids": [7] if isinstance(texts, str) else [[7]] * len(texts)}

    monkeypatch.setattr(eval_needle, "load_in_turns", lambda accelerator, load: load())
    args = SimpleNamespace(haystack_dir=str(tmp_path), max_context_length=600)
    with pytest.raises(ValueError, match="--haystack_dir .*no tokens for its text"):
        eval_needle.load_haystack(args, drops_what_it_does_not_know, None)
