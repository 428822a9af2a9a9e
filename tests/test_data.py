"""Rows from anything, and loaders under which a group's ranks agree and groups do not overlap."""

import json
import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset, DatasetDict
from harness import spawn, tiny_model
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as MapDataset

from easy_context import (
    apply_seq_parallel_monkey_patch,
    init_seq_parallel,
    prepare_dataloader,
    remove_seq_parallel_monkey_patch,
)
from easy_context.data import collate, micro_batches
from easy_context.dataset import load_tokenized

ROWS = {"input_ids": [list(range(20)), list(range(30, 37)), list(range(40, 48))]}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


class Letters:
    """A tokenizer: a letter is a token, its place in the alphabet."""

    eos_token_id = 0

    def __call__(self, texts, **_):
        return {"input_ids": [[ord(letter) - 96 for letter in text] for text in texts]}


def saved(path, kind):
    data = Dataset.from_dict(ROWS)
    if kind == "saved":
        data.save_to_disk(path)
    elif kind == "splits":
        DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(path)
    elif kind == "parquet":
        data.to_parquet(path / "part" / "0.parquet")
        (path / "README.md").write_text("not data")
    else:
        data.to_json(path / f"rows.{kind}")
    return str(path)


@pytest.mark.parametrize("kind", ["saved", "splits", "parquet", "jsonl", "json"])
def test_tokenized_rows_are_cut_and_losses_reported(tmp_path, kind, caplog):
    rows = load_tokenized(saved(tmp_path / "data", kind), seq_length=8)
    assert [row["input_ids"].tolist() for row in rows] == [[*range(8)], [*range(8, 16)], [*range(40, 48)]]
    assert "11 of 35 tokens dropped" in caplog.text and "1 of 3 rows are shorter" in caplog.text


def test_rows_of_the_right_length_are_taken_as_they_are(tmp_path, caplog):
    Dataset.from_dict({"input_ids": [[1, 2, 3]] * 2, "other": ["a", "b"]}).save_to_disk(tmp_path / "data")
    rows = load_tokenized(str(tmp_path / "data"), seq_length=3)
    assert rows.column_names == ["input_ids"] and len(rows) == 2 and not caplog.text


def test_text_is_one_stream_with_an_end_after_every_document(tmp_path, caplog):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "deep" / "b.py").write_text("defgh")
    (tmp_path / "deep" / "config.json").write_text("z")
    (tmp_path / "picture.png").write_bytes(b"\x89\xff\0")
    (tmp_path / ".hidden").write_text("zzzz")
    rows = load_tokenized(str(tmp_path), seq_length=5, tokenizer=Letters())
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2, 3, 0, 4], [5, 6, 7, 8, 0]]
    assert "left out 1 files" in caplog.text
    (tmp_path / "a.txt").write_text("xyz")  # a changed file is not answered from a cache
    assert load_tokenized(str(tmp_path), seq_length=5, tokenizer=Letters())[0]["input_ids"].tolist()[:3] == [24, 25, 26]


def test_labels_and_masks_are_cut_along_and_shifted_once():
    ids = torch.arange(1, 9).view(2, 4)
    plain = collate([{"input_ids": row} for row in ids])
    assert plain["target_ids"].tolist() == [[2, 3, 4, -100], [6, 7, 8, -100]]
    masked = collate([{"input_ids": row, "loss_mask": [True, False, True, True]} for row in ids.tolist()])
    assert masked["target_ids"].tolist() == [[-100, 3, 4, -100], [-100, 7, 8, -100]]
    labelled = collate([{"input_ids": row, "labels": [-100, 50, -100, 60]} for row in ids.tolist()])
    assert labelled["target_ids"].tolist() == [[50, -100, 60, -100]] * 2
    assert torch.equal(labelled["input_ids"], ids)


def test_a_mask_is_cut_with_its_row(tmp_path):
    Dataset.from_dict({"input_ids": [[1, 2, 3, 4, 5]], "loss_mask": [[0, 1, 1, 0, 1]]}).save_to_disk(tmp_path / "data")
    rows = load_tokenized(str(tmp_path / "data"), seq_length=2)
    assert [row["loss_mask"].tolist() for row in rows] == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ({}, "no table and no UTF-8 text"),
        ({"rows.jsonl": json.dumps({"tokens": [1, 2]})}, "neither a column 'input_ids' nor 'text'"),
        ({"rows.jsonl": json.dumps({"input_ids": [1, 2]})}, "none of its 1 rows has --seq-length 4 tokens"),
        ({"rows.jsonl": json.dumps({"input_ids": [1] * 4, "labels": [1] * 3})}, "'labels' of row 0 is not as long"),
        ({"rows.jsonl": json.dumps({k: [1] * 4 for k in ("input_ids", "labels", "loss_mask")})}, "has both"),
        ({"short.txt": "ab"}, "holds 3 tokens, fewer than --seq-length 4"),
        ({"a.jsonl": "{}", "b.parquet": ""}, "mixes"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path, content, message):
    for name, text in (content or {}).items():
        (tmp_path / name).write_text(text)
    place = tmp_path if content is not None else tmp_path / "missing"
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_tokenized(str(place), seq_length=4, tokenizer=Letters())


def test_a_missing_split_or_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="no split 'validation'"):
        load_tokenized(saved(tmp_path / "data", "splits"), seq_length=4, split="validation")
    (tmp_path / "long.txt").write_text("a" * 20)
    with pytest.raises(ValueError, match="takes a tokenizer"):
        load_tokenized(str(tmp_path / "long.txt"), seq_length=4)


# --- loaders

COUNT = 24


class Noisy(MapDataset):
    """Samples that are augmented at random, in the loader's workers."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"index": index, "noise": torch.rand(())}


class Stream(IterableDataset):
    """A stream in an order drawn from its own generator."""

    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        yield from ({"index": i} for i in torch.randperm(COUNT, generator=self.generator).tolist())


def fresh_accelerator(rank: int) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(100 + rank)  # left to themselves, ranks would draw differently
    return Accelerator(cpu=True)


def read_epochs(rank: int, world: int, mode: str, sp_size: int, kind: str):
    """Two epochs of batches, the second again without its first two, and the noise of the first."""
    multiprocessing.current_process()._config["daemon"] = False  # lets the loader start a worker of its own
    accelerator = fresh_accelerator(rank)
    init_seq_parallel(sp_size)
    dataset = Stream() if kind == "stream" else Noisy()
    worker = {"num_workers": 1, "multiprocessing_context": "fork"} if kind == "augmented" else {}
    options = {} if kind == "stream" else {"shuffle": kind != "in order", **worker}
    if kind == "sharded":  # into 5, 5, 5, 5 and 4 rows, by `datasets`
        dataset = Dataset.from_dict({"index": range(COUNT)}).to_iterable_dataset(5).shuffle(0).with_format("torch")
        options = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = prepare_dataloader(mode, DataLoader(dataset, batch_size=2, **options), accelerator)
    epochs = [list(loader), list(loader)]
    loader.set_epoch(1)
    resumed = list(skip_first_batches(loader, 2))
    indices = [[batch["index"].tolist() for batch in epoch] for epoch in (*epochs, resumed)]
    return indices, [batch["noise"].tolist() for batch in epochs[0]] if kind == "augmented" else None


@pytest.mark.parametrize(
    ("mode", "sp_size", "kind"),
    [
        ("zigzag_ring_attn", 2, "augmented"),
        ("usp_attn", 2, "in order"),
        ("ulysses_attn", 2, "stream"),
        ("dist_flash_attn", 4, "stream"),
        ("data_parallel", 1, "shuffled"),
        ("usp_attn", 2, "sharded"),
    ],
)
def test_a_group_sees_the_same_batches_and_groups_share_nothing(mode, sp_size, kind):
    ranks = spawn(read_epochs, 4, mode, sp_size, kind)
    groups = [ranks[start : start + sp_size] for start in range(0, 4, sp_size)]
    assert all(rank == group[0] for group in groups for rank in group)
    for epoch in range(2):
        seen = [i for group in groups for batch in group[0][0][epoch] for i in batch]
        assert sorted(seen) == list(range(COUNT))
        assert len({len(group[0][0][epoch]) for group in groups}) == 1  # or the others wait for who ends first
    for (first, second, resumed), _ in ranks:
        assert resumed == second[2:]
        assert (first == second) == (kind == "in order")


def test_resuming_reads_what_an_uninterrupted_run_would_have_read():
    accelerator = fresh_accelerator(0)
    loader = prepare_dataloader("zigzag_ring_attn", DataLoader(Noisy(), batch_size=4, shuffle=True), accelerator)
    batches = micro_batches(loader, 0)
    whole = [next(batches)["index"].tolist() for _ in range(15)]
    for consumed in (0, 5, 6, 8, 13):
        batches = micro_batches(loader, consumed)
        assert [next(batches)["index"].tolist() for _ in range(15 - consumed)] == whole[consumed:]


def test_deepspeed_learns_the_batch_size_and_unknown_modes_are_refused():
    filled = {}
    plugin = SimpleNamespace(fill_match=lambda key, must_match, **values: filled.update(values))
    accelerator = fresh_accelerator(0)
    stand_in = SimpleNamespace(**{name: getattr(accelerator, name) for name in ("device", "even_batches")})
    stand_in.dataloader_config, stand_in.non_blocking = accelerator.dataloader_config, False
    stand_in.state = SimpleNamespace(deepspeed_plugin=plugin)
    prepare_dataloader("zigzag_ring_attn", DataLoader(Noisy(), batch_size=3), stand_in)
    assert filled == {"train_micro_batch_size_per_gpu": 3}
    with pytest.raises(ValueError, match="unknown mode 'nonsense'"):
        prepare_dataloader("nonsense", DataLoader(Noisy()), accelerator)


@pytest.mark.parametrize("options", [{"batch_size": None}, {"num_workers": 1, "persistent_workers": True}])
def test_loaders_that_cannot_be_divided_or_resumed_are_refused(options):
    stand_in = SimpleNamespace(process_index=0, num_processes=2)
    with pytest.raises(ValueError, match="batch_size=None|persistent_workers=True"):
        prepare_dataloader("data_parallel", DataLoader(Noisy(), **options), stand_in)


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["across", "separate"])
def test_packing_loses_nothing_but_the_end(tmp_path, packing):
    rows = load_tokenized(saved(tmp_path / "data", "saved"), seq_length=8, packing=packing)
    stream = torch.cat([row["input_ids"] for row in rows])
    assert stream.tolist() == sum(ROWS["input_ids"], [])[:32]
    batch = collate(list(rows))
    if packing == "across":
        assert batch["position_ids"] is None
        assert batch["target_ids"][2, 3] == 30  # the next row's first token
        return
    expected = [[*range(8)], [*range(8)], [0, 1, 2, 3, *range(4)], [0, 1, 2, *range(5)]]
    assert batch["position_ids"].tolist() == expected  # rows of 20, 7 and 8 tokens, cut every 8
    assert batch["target_ids"][2].tolist() == [17, 18, 19, -100, 31, 32, 33, -100]


def test_packed_rows_train_as_if_each_were_alone(tmp_path):
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, 97, (length,), generator=generator) for length in (5, 9, 1, 17)]
    Dataset.from_dict({"input_ids": [d.tolist() for d in documents]}).save_to_disk(tmp_path / "data")
    (row,) = load_tokenized(str(tmp_path / "data"), seq_length=32, packing="separate")
    batch = collate([row])
    apply_seq_parallel_monkey_patch("data_parallel", "llama")
    model = tiny_model()
    logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    packed = torch.nn.functional.cross_entropy(logits[0], batch["target_ids"][0], reduction="sum")
    remove_seq_parallel_monkey_patch()
    alone = sum(
        torch.nn.functional.cross_entropy(model(d[None]).logits[0, :-1], d[1:], reduction="sum")
        for d in documents
        if len(d) > 1
    )
    assert abs(packed.item() - alone.item()) < 1e-9 * alone.item()


def test_text_is_packed_separately_when_asked(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("defgh")
    rows = load_tokenized(str(tmp_path), seq_length=5, tokenizer=Letters(), packing="separate")
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2, 3, 0, 4], [5, 6, 7, 8, 0]]
    assert [row["position_ids"].tolist() for row in rows] == [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4]]


def test_an_unknown_packing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--packing is one of"):
        load_tokenized(saved(tmp_path / "data", "saved"), seq_length=8, packing="tight")


@pytest.mark.parametrize(
    "content, text",
    [
        ("", "is empty"),
        ('{"input_ids": [1.5]}', "lists of integers"),
        ('{"input_ids": [1]}\n{bad', "cannot be read as json"),
    ],
)
def test_files_that_hold_no_token_ids_end_in_one_line(tmp_path, content, text):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(ValueError, match=text):
        load_tokenized(str(tmp_path / "rows.jsonl"), seq_length=1)
