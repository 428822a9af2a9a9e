"""Evaluation of models: needles found, perplexity over tokens; equal for any number of ranks."""

import math
from types import SimpleNamespace

import pytest
import test_haystack
import torch
from harness import spawn, tiny_model
from test_haystack import SENTENCES, byte_level
from torch import nn

from easy_context import apply_seq_parallel_monkey_patch, init_seq_parallel
from easy_context.evaluation.needle import build_prompt, predict_answers, tokenize_pieces
from easy_context.evaluation.perplexity import perplexity, windows
from easy_context.evaluation.runtime import context_lengths, turns
from easy_context.mesh import reset_mesh

haystack = test_haystack.haystack
tokenizer = test_haystack.tokenizer
MODES = ["zigzag_ring_attn", "dist_flash_attn", "usp_attn", "data_parallel"]


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
