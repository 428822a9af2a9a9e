"""A number hidden in a long text, and whether the model finds it.

A needle ("The magic number of Paris is 4812077.") stands between two sentences of a haystack, at a depth
from 0 (first) to 1 (last). Distractors give the numbers of other cities; the question comes last, then the
answer. The answer is scored by teacher forcing: one forward of the whole, and every token of the number
must be the argmax where it is due. That needs no cache and no generation, so it runs sharded over ranks as
training does.

Prompts are joined from pieces, each tokenized as it stands in a text, after a full stop and with its own
space. Every seam is one between two sentences, so no tokenizer merges across it. The first sentence of the
haystack is cut at its start, so that prompt and answer together have exactly the length asked for.

Needle in a haystack: https://github.com/gkamradt/LLMTest_NeedleInAHaystack
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from ..inputs import prepare_seq_parallel_inputs
from ..memory.tiled_loss import IGNORE_INDEX
from ..mesh import current_mesh
from .runtime import leading_tokens, sum_over_ranks, turns

HEAD = "One sentence of this text gives the magic number of a city. Remember it. The text begins here."
ANSWER = "The magic number of {city} is"
NEEDLE = f" {ANSWER} {{number}}."
QUESTION = " The text ends here.\n\nQuestion: What is the magic number of {city}?\nAnswer: " + ANSWER
CITY_NAMES = """
Amsterdam Athens Auckland Baghdad Bangkok Barcelona Beijing Berlin Bogota Boston Brussels Bucharest Budapest
Cairo Chicago Copenhagen Dakar Delhi Dublin Edinburgh Geneva Hanoi Havana Helsinki Istanbul Jakarta Kyoto
Lagos Lima Lisbon London Madrid Manila Melbourne Milan Montreal Moscow Mumbai Nairobi Oslo Paris Prague
Quito Rome Santiago Seattle Seoul Shanghai Singapore Stockholm Sydney Tokyo Toronto Tunis Vienna Warsaw
Zurich
"""
CITIES = CITY_NAMES.split()
FULL_STOP = "."


@dataclass(frozen=True)
class Prompt:
    """`ids[:answer_start]` asks, the rest answers; `ids[needle_start:needle_end]` is the needle."""

    ids: list[int]
    answer_start: int
    needle_start: int
    needle_end: int
    city: str
    number: str

    @property
    def answer(self) -> list[int]:
        return self.ids[self.answer_start :]


def tokenize_pieces(tokenizer, pieces: Sequence[str]) -> list[list[int]]:
    """The tokens of each piece as it stands after a full stop, without special tokens.

    A tokenizer that marks words by the space before them, or that puts a space before every text, gives a
    piece that stands alone other tokens than the same piece within a text.
    """
    before = tokenizer(FULL_STOP, add_special_tokens=False)["input_ids"]
    batch = tokenizer([FULL_STOP + piece for piece in pieces], add_special_tokens=False)["input_ids"]
    return [ids[common_prefix(before, ids) :] for ids in batch]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens `a` and `b` share from the start."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def depth_grid(interval: float) -> list[float]:
    """0, interval, 2 * interval, ... up to 1. Neither summed up nor rounded to percents, so all are distinct."""
    if not 0 < interval <= 1:
        raise ValueError(f"--depth_interval {interval}: expected a number above 0 and up to 1")
    return [min(i * interval, 1.0) for i in range(int(1 / interval + 1e-6) + 1)]


def build_prompt(
    tokenizer,
    haystack: Sequence[list[int]],
    *,
    length: int,
    depth: float,
    sample: int = 0,
    seed: int = 0,
    digits: int = 7,
    distractors: int = 0,
) -> Prompt:
    """A prompt and its answer, together exactly `length` tokens; a pure function of its arguments.

    `haystack` is `tokenize_pieces` of its sentences, each with its leading space; it is read in a circle,
    up to a random sentence. Raises ValueError where the settings leave no room or make no sense.
    """
    dice = random.Random(f"{seed} {length} {depth!r} {sample}")
    cities, numbers = _draw(dice, digits, distractors)
    question = QUESTION.format(city=cities[0])
    texts = [NEEDLE.format(city=city, number=number) for city, number in zip(cities, numbers, strict=True)]
    texts = [question, f"{question} {numbers[0]}", *texts]
    asks, answers, needle, *others = tokenize_pieces(tokenizer, texts)
    head = leading_tokens(tokenizer) + tokenizer(HEAD, add_special_tokens=False)["input_ids"]

    room = length - sum(map(len, (head, answers, needle, *others)))
    if room < 0:
        raise ValueError(f"a context of {length} tokens: needles and question alone take {length - room}")
    pieces = _fill(haystack, room, dice.randrange(len(haystack)))
    for other in others:
        pieces.insert(dice.randint(0, len(pieces)), other)
    borders = [0, *accumulate(map(len, pieces))]
    place = _nearest(borders, depth * borders[-1])
    pieces.insert(place, needle)

    ids = list(chain(head, *pieces, answers))
    needle_start = len(head) + borders[place]
    answer_start = len(ids) - len(answers) + common_prefix(asks, answers)
    return Prompt(ids, answer_start, needle_start, needle_start + len(needle), cities[0], numbers[0])


def _draw(dice: random.Random, digits: int, distractors: int) -> tuple[list[str], list[str]]:
    """Different cities and different numbers, for the needle and for each distractor."""
    count = distractors + 1
    if not 1 <= count <= len(CITIES):
        raise ValueError(f"--num_distractor {distractors}: expected 0 to {len(CITIES) - 1}, a city each")
    if digits < 1 or 9 * 10 ** (digits - 1) < count:
        raise ValueError(f"--rnd_number_digits {digits}: there are no {count} different numbers of so many")
    numbers = dice.sample(range(10 ** (digits - 1), 10**digits), count)
    return dice.sample(CITIES, count), [str(number) for number in numbers]


def _fill(haystack: Sequence[list[int]], room: int, last: int) -> list[list[int]]:
    """The sentences up to the one numbered `last`, read in a circle: exactly `room` tokens, so that the first
    one lacks its start."""
    pieces, total = [], 0
    while total < room:
        pieces.append(haystack[(last - len(pieces)) % len(haystack)])
        total += len(pieces[-1])
    if pieces:
        pieces[-1] = pieces[-1][total - room :]
    return pieces[::-1]


def _nearest(borders: list[int], target: float) -> int:
    """The index of the border nearest to `target`; `borders` ascends and ends at or after it."""
    after = bisect_left(borders, target)
    before = max(after - 1, 0)
    return before if target - borders[before] < borders[after] - target else after


@torch.no_grad()
def predict_answers(
    model,
    prompts: Sequence[Prompt],
    *,
    seq_algo: str,
    accelerator,
    progress: Callable[[Sequence], Iterable] = iter,
) -> list[list[int]]:
    """The argmax at every token of every answer: one list a prompt, the same on every rank.

    A prompt is sharded over the ranks of a sequence-parallel group, and each computes the logits of the
    answer's rows that it holds and of no others; data-parallel groups take turns. Besides what attention
    moves, one sum of `prompts x longest answer` integers crosses ranks. `progress` wraps the prompts, to
    show a bar.
    """
    longest = max(len(prompt.answer) for prompt in prompts)
    predicted = torch.zeros(len(prompts), longest, dtype=torch.int64, device=accelerator.device)
    mesh = current_mesh()
    for index, prompt, counts in progress(turns(prompts, mesh.data_rank, mesh.data_size)):
        ids = torch.tensor([prompt.ids])
        targets = torch.full_like(ids, IGNORE_INDEX)
        targets[:, prompt.answer_start - 1 : -1] = ids[:, prompt.answer_start :]
        rank, world = accelerator.process_index, accelerator.num_processes
        shard = prepare_seq_parallel_inputs(seq_algo, ids, None, targets, rank, world, accelerator.device)
        places = shard["local_position_ids"]
        rows = (shard["local_target_ids"][0] != IGNORE_INDEX).nonzero().flatten()
        logits = model(shard["local_input_ids"], position_ids=places, logits_to_keep=rows).logits
        if counts:
            predicted[index, places[0, rows] + 1 - prompt.answer_start] = logits[0].argmax(-1)
    predicted = sum_over_ranks(predicted).tolist()
    return [row[: len(prompt.answer)] for row, prompt in zip(predicted, prompts, strict=True)]
