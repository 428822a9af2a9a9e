"""Long text that is on every machine with Python: source code, tokenized into rows for training and for evaluation.

Context extension needs documents longer than the context. The sources of one Python package, file after file in the
order of their paths, are such a document: a file uses what its neighbours define, and torch alone has millions of
tokens. Rows are consecutive tokens of one package; no row joins two packages.

One directory is kept out of training altogether and gives the evaluation its rows: its largest files first, joined
where one is not long enough.

    python build_corpus.py --tokenizer model --output corpus --train 32768:384 131072:49 --held-out-rows 131072:6

writes the data sets `train-32768`, `train-131072` (they share no text) and `held-out`, with a column `input_ids`.
"""

import argparse
import random
import site
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from recall import insert_recall
from tqdm import tqdm

LARGEST_FILE = 1_000_000  # bytes; larger ones are tables of data
BATCH = 4_000_000  # bytes of text that are tokenized at once, on all cores


def installed_sources() -> list[Path]:
    """The standard library and every directory of site-packages."""
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    packages = {path for root in map(Path, roots) if root.is_dir() for path in root.iterdir() if path.is_dir()}
    return [Path(sysconfig.get_path("stdlib")), *sorted(packages)]


def find_source(name: str) -> Path:
    """The directory of an installed package ("torch") or of a part of it ("torch/fx"); ValueError if there is none."""
    for path in installed_sources():
        whole = path.parent / name
        if path.name == name.partition("/")[0] and whole.is_dir():
            return whole
    raise ValueError(f"{name}: no such package or directory of one is installed")


def python_files(source: Path, held_out: Path) -> list[Path]:
    """The Python files under `source` by path, without other packages installed there and without `held_out`."""
    return [
        file
        for file in sorted(source.rglob("*.py"))
        if held_out not in file.parents
        and not {"site-packages", "dist-packages"} & set(file.relative_to(source).parts)
        and 0 < file.stat().st_size <= LARGEST_FILE
    ]


def read_files(files: Iterable[Path], source: Path) -> Iterator[str]:
    """The text of each file under a line with its path."""
    for file in files:
        yield f"# {file.relative_to(source.parent)}\n{file.read_text(encoding='utf-8', errors='replace').strip()}\n\n"


def tokenize(texts: Iterable[str], tokenizer) -> Iterator[np.ndarray]:
    """Token ids of each text, int32, without special tokens. A batch at a time: a fast tokenizer uses all cores."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield from _tokenize_batch(batch, tokenizer)
            batch, size = [], 0
    if batch:
        yield from _tokenize_batch(batch, tokenizer)


def _tokenize_batch(batch: list[str], tokenizer) -> Iterator[np.ndarray]:
    encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
    yield from (np.array(ids, dtype=np.int32) for ids in encoded["input_ids"])


def cut(tokens: np.ndarray, length: int) -> list[np.ndarray]:
    """Rows of `length` tokens; a shorter rest is left out."""
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]


def training_rows(documents: Iterable[np.ndarray], counts: dict[int, int], seed: int) -> dict[int, list[np.ndarray]]:
    """`counts[length]` rows of each length, in random order; no token is in two of them.

    The longest rows choose first: pieces of their length are shuffled, and those left over are cut for the next.
    Raises ValueError where the documents do not suffice.
    """
    dice = random.Random(seed)
    pieces, rows = list(documents), {}
    for length in sorted(counts, reverse=True):
        pieces = [row for piece in pieces for row in cut(piece, length)]
        dice.shuffle(pieces)
        rows[length], pieces = pieces[: counts[length]], pieces[counts[length] :]
        if len(rows[length]) < counts[length]:
            raise ValueError(f"only {len(rows[length])} of {counts[length]} rows of {length} tokens: add --sources")
    return rows


def held_out_rows(source: Path, length: int, count: int, tokenizer) -> list[np.ndarray]:
    """`count` rows of `length` tokens, each from the start of a file, the largest file first.

    A file that is too short is continued by the next largest. ValueError where there are too few.
    """
    files = python_files(source, held_out=source / "nothing")
    files.sort(key=lambda file: (-file.stat().st_size, file))
    rows, parts = [], []
    for tokens in tokenize(read_files(files, source), tokenizer):
        parts.append(tokens)
        if sum(map(len, parts)) >= length:
            rows.append(np.concatenate(parts)[:length])
            parts = []
        if len(rows) == count:
            return rows
    raise ValueError(f"{source}: only {len(rows)} of {count} held-out rows of {length} tokens")


def line_ends(tokenizer) -> set[int]:
    """The ids of all tokens whose text ends with the end of a line."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return {token for token, text in enumerate(texts) if text.endswith("\n")}


def save(rows: list[np.ndarray], directory: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"input_ids": rows}).save_to_disk(str(directory))
    print(f"{directory}: {len(rows)} rows of {len(rows[0]):,} tokens, {sum(map(len, rows)):,} in all")


def length_and_count(text: str) -> tuple[int, int]:
    length, count = map(int, text.split(":"))
    return length, count


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--tokenizer", required=True, help="directory of the model or its tokenizer")
    add("--output", type=Path, required=True, help="directory for the data sets")
    add("--train", nargs="+", type=length_and_count, required=True, metavar="LENGTH:ROWS")
    add("--sources", nargs="+", help='packages to train on, or parts ("torch/fx"); all that is installed if not given')
    add("--held-out", default="torch/_inductor", help="package, or part of one, that is not trained on")
    add("--held-out-rows", type=length_and_count, required=True, metavar="LENGTH:ROWS")
    add("--recall-share", type=float, default=0.0, help="of the training tokens: facts stated early and repeated late")
    add("--seed", type=int, default=0)
    args = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    held_out = find_source(args.held_out)
    sources = [find_source(name) for name in args.sources] if args.sources else installed_sources()
    files = {source: python_files(source, held_out) for source in sources}

    def documents() -> Iterator[np.ndarray]:
        total = sum(file.stat().st_size for source in files for file in files[source])
        with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing") as bar:
            for source in sources:
                parts = list(tokenize(read_files(files[source], source), tokenizer))
                bar.update(sum(file.stat().st_size for file in files[source]))
                if parts:
                    yield np.concatenate(parts)

    rows = training_rows(documents(), dict(args.train), args.seed)
    if args.recall_share:
        ends, dice = line_ends(tokenizer), random.Random(args.seed)
        for length in rows:
            rows[length] = [add_recall(row, tokenizer, args.recall_share, ends, dice) for row in rows[length]]
    for length in sorted(rows):
        save(rows[length], args.output / f"train-{length}")
    save(held_out_rows(held_out, *args.held_out_rows, tokenizer), args.output / "held-out")


def add_recall(row: np.ndarray, tokenizer, share: float, ends: set[int], dice: random.Random) -> np.ndarray:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return np.array(insert_recall(row.tolist(), encode, share=share, line_ends=ends, dice=dice), dtype=np.int32)


if __name__ == "__main__":
    main()
