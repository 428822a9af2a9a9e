"""Rows of exactly `seq_length` tokens, from nearly anything: tokenized or text, on disk or from the hub.

Nothing is lost in silence: what is too short, or a tail, or no text, is counted in a warning, and where nothing is left
that is an error. Everything is cached by `datasets` and memory-mapped, so ranks of a node share it.
"""

import logging
from codecs import getincrementaldecoder
from pathlib import Path

logger = logging.getLogger(__name__)

_TABLES = {".parquet": "parquet", ".jsonl": "json", ".arrow": "arrow", ".json": "json"}
PACKINGS = ("across", "separate")


def load_tokenized(
    path_or_name: str, *, seq_length: int, tokenizer=None, split: str = "train", packing: str | None = None
):
    """Rows of exactly `seq_length` tokens from nearly anything.

    Args:
        path_or_name: a dataset saved to disk; a parquet, json, jsonl or arrow file, or a directory of them;
            any UTF-8 text file, or a directory of such (searched in depth, in the order of their names; the
            other files of it are counted and left out); else the name of a hub dataset.
        seq_length: tokens a row.
        tokenizer: needed where the rows have `text` instead of `input_ids`. Documents are tokenized without
            special tokens, concatenated with the end-of-sequence token after each, and cut.
        split: of a dataset that has several.
        packing: None cuts each tokenized row by itself. "across" concatenates rows to full sequences and lets
            attention reach across them, as pretraining does: every token has a full context, if an unrelated
            one. "separate" concatenates them too, but each row attends to itself only: adds `position_ids` that
            restart with each row, for short samples that must not see each other (instruction tuning). Text is
            always concatenated, "across" unless told otherwise.

    Returns a `datasets.Dataset` of torch tensors with `input_ids` and, where the source had it, `labels` or
    `loss_mask`. Longer rows are cut into pieces from their start; what remains, and rows that are too short,
    are dropped (unless packed), and a warning says how much that was. Other columns are left out.

    Raises ValueError where there is neither `input_ids` nor `text`, where a row's `labels` or `loss_mask`
    differs from it in length, or nothing is long enough; FileNotFoundError where there is nothing at all.
    """
    rows = open_rows(path_or_name, split)
    if "input_ids" in rows.column_names:
        rows = _tokenized_columns(rows, path_or_name)
        cut = _pack(rows, path_or_name, seq_length, packing) if packing else _cut_rows(rows, path_or_name, seq_length)
        return cut.with_format("torch")
    if "text" in rows.column_names:
        documents = _tokenize(rows, path_or_name, tokenizer)
        return _pack(documents, path_or_name, seq_length, packing or "across").with_format("torch")
    raise ValueError(
        f"dataset {path_or_name!r} has neither a column 'input_ids' nor 'text', only {rows.column_names}: "
        "tokenize it, or rename its column"
    )


def open_rows(path_or_name: str, split: str, subset: str | None = None):
    """The dataset behind a path or a hub name, as it is."""
    from datasets import Dataset, load_dataset, load_from_disk

    path = Path(path_or_name).expanduser()
    if not path.exists():
        if path.is_absolute() or str(path_or_name).startswith((".", "~")) or path.suffix in _TABLES:
            raise FileNotFoundError(f"dataset {path_or_name!r}: there is no such file or directory")
        try:
            return load_dataset(path_or_name, subset, split=split)
        except (FileNotFoundError, ConnectionError) as error:
            reason = str(error).splitlines()[0]
            raise FileNotFoundError(
                f"dataset {path_or_name!r} is neither a local path nor a hub dataset within reach ({reason})"
            ) from error
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        saved = load_from_disk(str(path))
        if isinstance(saved, Dataset):
            return saved
        if split not in saved:
            raise ValueError(f"dataset {path_or_name!r} has no split {split!r}, only {sorted(saved)}")
        return saved[split]

    files = [path] if path.is_file() else _visible_files(path)
    tables = [f for f in files if f.suffix in _TABLES]
    if any(f.suffix != ".json" for f in tables) or len(tables) == len(files) > 0:
        kinds = sorted({_TABLES[f.suffix] for f in tables})
        if len(kinds) > 1:
            raise ValueError(f"dataset {path_or_name!r} mixes {kinds} files: name one of them")
        return _read(kinds[0], tables, path_or_name)
    texts = [f for f in files if _is_text(f)]
    if not texts:
        raise FileNotFoundError(f"dataset {path_or_name!r} holds no table and no UTF-8 text")
    if len(texts) < len(files):
        logger.warning("%s: left out %d files that are empty or no text", path_or_name, len(files) - len(texts))
    return load_dataset("text", data_files=[str(f) for f in texts], sample_by="document", split="train")


def _read(kind: str, files: list[Path], name: str):
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    if not any(f.stat().st_size for f in files):
        raise ValueError(f"dataset {name!r} is empty: its {kind} files hold nothing")
    try:
        return load_dataset(kind, data_files=[str(f) for f in files], split="train")
    except (DatasetGenerationError, OSError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"dataset {name!r} cannot be read as {kind}: {reason}") from error


def _visible_files(root: Path) -> list[Path]:
    files = (f for f in sorted(root.rglob("*")) if f.is_file())
    return [f for f in files if not any(part.startswith(".") for part in f.relative_to(root).parts)]


def _is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        start = opened.read(1 << 16)
    try:
        return bool(start) and "\0" not in getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False


def _lengths(rows, column: str):
    """Tokens in every row of a column of lists, as a numpy array, read from Arrow's offsets alone."""
    import pyarrow.compute as pc

    return pc.list_value_length(rows.with_format("arrow")[:][column]).to_numpy()


def _tokenized_columns(rows, name: str):
    """The rows with their labels or mask, checked, without other columns."""
    columns = ["input_ids", *({"labels", "loss_mask"} & set(rows.column_names))]
    if len(columns) > 2:
        raise ValueError(f"dataset {name!r} has both 'labels' and 'loss_mask': keep the one that is meant")
    for column in columns[:1] + [c for c in columns if c == "labels"]:
        kind = getattr(getattr(rows.features[column], "feature", None), "dtype", None)
        if not str(kind).startswith(("int", "uint")):
            raise ValueError(f"dataset {name!r}: {column!r} must hold lists of integers, not {rows.features[column]}")
    lengths = _lengths(rows, "input_ids")
    for column in columns[1:]:
        wrong = (_lengths(rows, column) != lengths).nonzero()[0]
        if len(wrong):
            raise ValueError(f"dataset {name!r}: {column!r} of row {wrong[0]} is not as long as its 'input_ids'")
    return rows.select_columns(columns)


def _cut_rows(rows, name: str, seq_length: int):
    """Each row to pieces of `seq_length`."""
    from datasets import Dataset

    lengths = _lengths(rows, "input_ids")
    if not len(lengths) or lengths.max() < seq_length:
        longest = lengths.max() if len(lengths) else 0
        raise ValueError(
            f"dataset {name!r}: none of its {len(lengths)} rows has --seq-length {seq_length} tokens, the "
            f"longest has {longest}: take a shorter --seq-length, longer rows, or --packing"
        )
    if (lengths == seq_length).all():
        return rows
    lost, short = (lengths % seq_length).sum(), (lengths < seq_length).sum()
    if lost:
        logger.warning(
            "%s: %d of %d tokens dropped: --seq-length is %d; %d of %d rows are shorter, others have tails",
            *(name, lost, lengths.sum(), seq_length, short, len(lengths)),
        )

    # a generator's rows go to the datasets cache, those of `map` into the user's own directory
    return Dataset.from_generator(_pieces, gen_kwargs={"rows": rows, "seq_length": seq_length})


def _pieces(rows, seq_length: int):
    for row in rows.with_format("numpy"):
        for start in range(0, len(row["input_ids"]) - seq_length + 1, seq_length):
            yield {column: values[start : start + seq_length] for column, values in row.items()}


def _tokenize(rows, name: str, tokenizer):
    """Documents of text to rows of tokens, each with the end-of-sequence token at its end."""
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None:
        raise ValueError(f"dataset {name!r} is text: it takes a tokenizer with an end-of-sequence token")

    def tokenize(batch):
        documents = tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [[*ids, eos] for ids in documents]}

    return rows.map(tokenize, batched=True, batch_size=16, remove_columns=rows.column_names, desc="tokenizing")


def _pack(documents, name: str, seq_length: int, packing: str):
    """Documents to one stream of tokens, cut into pieces of `seq_length`; the end of the stream is dropped."""
    from datasets import Dataset

    if packing not in PACKINGS:
        raise ValueError(f"--packing is one of {PACKINGS}, not {packing!r}")
    tokens = _lengths(documents, "input_ids").sum()
    if tokens < seq_length:
        raise ValueError(f"dataset {name!r} holds {tokens} tokens, fewer than --seq-length {seq_length}: add text")
    logger.info("%s: %d documents, %d tokens, the last %d dropped", name, len(documents), tokens, tokens % seq_length)
    settings = {"documents": documents, "seq_length": seq_length, "separate": packing == "separate"}
    return Dataset.from_generator(_stream, gen_kwargs=settings)


def _stream(documents, seq_length: int, separate: bool):
    import numpy as np

    held: dict[str, np.ndarray] = {}
    for row in documents.with_format("numpy"):
        if separate:
            row["position_ids"] = np.arange(len(row["input_ids"]))
        held = {column: np.concatenate([held.get(column, values[:0]), values]) for column, values in row.items()}
        whole = len(held["input_ids"]) // seq_length * seq_length
        for start in range(0, whole, seq_length):
            piece = {column: values[start : start + seq_length] for column, values in held.items()}
            if separate:
                piece["position_ids"] = _from_zero(piece["position_ids"])
            yield piece
        held = {column: values[whole:] for column, values in held.items()}


def _from_zero(positions):
    """A document that begins in the piece before counts from the start of this one."""
    restart = (positions == 0).argmax() if (positions == 0).any() else len(positions)
    positions = positions.copy()
    positions[:restart] -= positions[0]
    return positions
