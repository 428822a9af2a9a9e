"""Statements that a text makes early and repeats late, so that a short training run learns to look far back.

Most tokens of any text can be predicted from the last few thousand; a model that is trained on text alone for minutes
has little reason to use more. A made-up fact ("The locker of Ada Brandt opens with 48127.") whose number is due again
later ("Recall: the locker of Ada Brandt opens with ") cannot be predicted from anywhere but its first mention. Half of
the pairs span nearly the whole sequence, with the first mention near its very beginning, the place that extended
models lose first; the others span anything.
"""

import random
from collections.abc import Callable, Collection, Sequence

FACTS = [
    "the locker of {name} opens with {number}.",
    "to reach {name}, dial {number}.",
    "the parcel for {name} weighs {number} grams.",
    "{name} signed in at desk {number}.",
    "the library card of {name} ends in {number}.",
]
FIRST_NAMES = """
Ada Bruno Clara Dario Edda Felix Greta Hugo Ines Jonas Karla Leo Mira Nils Olga Pavel Rosa Stefan Tilda Ugo Vera Wanda
Xaver Yara Zeno Amir Bela Chidi Deepa Emre Farah Goran Hana Ivo Jamila Kofi Lena Marek Noor Oskar
"""
LAST_NAMES = """
Brandt Okafor Lindqvist Moreau Tanaka Novak Silva Haddad Kowalski Fischer Petrov Rossi Nguyen Larsen Adeyemi Castro
Weber Yilmaz Horvat Dubois Singh Eriksen Barros Keller Mensah Takeda Vogel Aziz Bergman Costa Demir Engel Farouk Grimm
Holm Ito Jansen Kaplan Lopez Meyer
"""


def insert_recall(
    ids: Sequence[int],
    encode: Callable[[str], list[int]],
    *,
    share: float,
    line_ends: Collection[int],
    dice: random.Random,
) -> list[int]:
    """`ids` with statements and their recalls between its lines, cut to its old length.

    Args:
        ids: a text's tokens.
        encode: text to tokens, without special tokens.
        share: of the result's tokens that statements and recalls may take, 0 to 1.
        line_ends: ids of the tokens that end a line; only after one of these, or at the start, is anything inserted.
        dice: the source of all randomness.
    """
    size, spent, inserts = len(ids), 0, []
    names = [f"{first} {last}" for first in FIRST_NAMES.split() for last in LAST_NAMES.split()]
    dice.shuffle(names)
    for name in names:
        digits = dice.randint(5, 8)
        number = dice.randrange(10 ** (digits - 1), 10**digits)
        fact = dice.choice(FACTS).format(name=name, number=number)
        statement, recall = encode(f"{fact[0].upper()}{fact[1:]}\n"), encode(f"Recall: {fact}\n")
        spent += len(statement) + len(recall)
        if spent > share * size:
            break
        inserts += zip(_places(size - int(share * size), dice), (statement, recall), strict=True)

    result, done = [], 0
    for place, tokens in sorted(inserts, key=lambda insert: insert[0]):
        place = max(done, _line_start(ids, place, line_ends))
        result += [*ids[done:place], *tokens]
        done = place
    return [*result, *ids[done:]][:size]


def _places(room: int, dice: random.Random) -> list[int]:
    """Where in a text of `room` tokens a statement and its recall go, in this order."""
    if dice.random() < 0.5:  # distances from the two ends are log-uniform: many are close to them
        return [int(room * 10 ** dice.uniform(-5, -1)), int(room * (1 - 10 ** dice.uniform(-4, -1)))]
    return sorted(dice.randrange(room) for _ in range(2))


def _line_start(ids: Sequence[int], place: int, line_ends: Collection[int]) -> int:
    """The last start of a line at or before `place`."""
    while place > 0 and ids[place - 1] not in line_ends:
        place -= 1
    return place
