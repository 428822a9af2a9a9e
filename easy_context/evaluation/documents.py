"""The documents that perplexity is measured on: token ids of whole texts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ..dataset import open_rows


def tokenized_documents(source: str, *, split: str, subset: str | None = None) -> Iterator[list[int]]:
    """The column `input_ids` of whatever `easy_context.dataset` can open; ValueError where it has none."""
    rows = open_rows(source, split, subset)
    if "input_ids" not in rows.column_names:
        raise ValueError(f"--tokenized {source}: no column 'input_ids', only {rows.column_names}")
    return (row["input_ids"] for row in rows)


def text_documents(
    source: str, tokenizer, *, split: str, subset: str | None = None, feature: str = "text"
) -> Iterator[list[int]]:
    """Texts (a file or a row is a document), tokenized without special tokens; `feature` is their column."""
    rows = open_rows(source, split, subset)
    if feature not in rows.column_names:
        raise ValueError(f"--dataset {source}: no column {feature!r}, only {rows.column_names}: see --feature")
    return (tokenizer(row[feature], add_special_tokens=False, verbose=False)["input_ids"] for row in rows)


def choose_documents(
    documents: Iterable[Sequence[int]],
    *,
    min_tokens: int = 2,
    samples: int | None = None,
    lead: Sequence[int] = (),
) -> list[list[int]]:
    """The first `samples` documents of at least `min_tokens` tokens, without the special tokens `lead` where
    they start with them. ValueError where none is left."""
    lead = list(lead)
    bare = (list(ids[len(lead) :] if list(ids[: len(lead)]) == lead else ids) for ids in documents)
    chosen = list(islice((ids for ids in bare if len(ids) >= min_tokens), samples))
    if not chosen:
        raise ValueError(f"no document has {min_tokens} tokens: see --dataset-min-tokens and --samples")
    return chosen
