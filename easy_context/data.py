"""Where batches come from: loaders that know who shares a sequence.

All ranks of one sequence-parallel group must see the same batches, different data-parallel groups disjoint
ones, and a resumed run the batches that the interrupted one had not seen. Everything random therefore follows
from one seed, agreed on by all ranks, and the epoch: the order of the samples and the seeds of the workers.
Nothing is communicated after that; every group reads its own share.
"""

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, Sampler

from .memory.tiled_loss import IGNORE_INDEX
from .mesh import current_mesh
from .modes import get_mode


class _Reseeding:
    """Seeds every generator with `seed + epoch` when an epoch is announced. Without state of its own, so an
    epoch can be entered from anywhere."""

    def __init__(self, seed: int, *generators: torch.Generator):
        self.seed, self.generators = seed, generators
        self(0)

    def __call__(self, epoch: int) -> None:
        for generator in self.generators:
            generator.manual_seed(self.seed + epoch)


class _EpochSampler(Sampler):
    """A sampler that hears of epochs: Accelerate's loaders, skipping ones too, call its `set_epoch`."""

    def __init__(self, sampler: Sampler, reseed: _Reseeding):
        self.sampler, self.reseed = sampler, reseed

    def set_epoch(self, epoch: int) -> None:
        self.reseed(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class _Rows(IterableDataset):
    """The rows of a stream of `datasets`, in whose shards Accelerate sees none to deal out: a group whose shards have
    fewer rows would end its epoch while the others wait for it."""

    def __init__(self, stream: IterableDataset):
        self.stream, self.set_epoch = stream, stream.set_epoch

    def __iter__(self):
        return iter(self.stream)


def prepare_dataloader(seq_algo: str, dataloader: DataLoader, accelerator) -> DataLoader:
    """The loader to train from: equal within a sequence-parallel group, disjoint between data-parallel ones.

    Args:
        seq_algo: mode; under `data_parallel` every rank is a group of its own.
        dataloader: over a map-style or an iterable dataset. Its `batch_size` is that of one group and
            micro-step. The seed is rank 0's: `data_seed` of the Accelerator's `DataLoaderConfiguration`, else
            that of the sampler's generator, else torch's.
        accelerator: the `Accelerator`. Where its DeepSpeed configuration leaves
            `train_micro_batch_size_per_gpu` to "auto", the loader's batch size is filled in.

    Returns Accelerate's own `DataLoaderShard`, with batches on the device. `set_epoch(n)` enters epoch n, and
    `accelerate.skip_first_batches` works on it. Iterating it again goes on to the next epoch.

    With `num_workers=0`, random numbers that a dataset draws while loading come from the process's own
    generators: seed these alike (`accelerate.utils.set_seed`). Iterable datasets that have a `set_epoch`
    shuffle as it tells them.

    Raises ValueError for an unknown `seq_algo`, and for a loader that cannot be divided or entered in the middle:
    without a batch size, or with persistent workers, which keep the random state of earlier epochs.
    """
    import datasets
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import broadcast_object_list

    get_mode(seq_algo)
    if seq_algo == "data_parallel":
        data_rank, data_size = accelerator.process_index, accelerator.num_processes
    else:
        data_rank, data_size = current_mesh().data_rank, current_mesh().data_size

    if dataloader.persistent_workers:
        raise ValueError(
            "persistent_workers=True: workers that outlive an epoch are not seeded by it, so a resumed run would read "
            "other batches. Set it to False"
        )
    if data_size > 1 and dataloader.batch_size is None and getattr(dataloader, "batch_sampler", None) is None:
        raise ValueError(f"batch_size=None: a loader without batches cannot be divided among {data_size} groups")

    iterable = isinstance(dataloader.dataset, IterableDataset)
    source = dataloader.dataset if iterable else getattr(dataloader.batch_sampler, "sampler", None)
    own = getattr(source, "generator", None)
    seed = accelerator.dataloader_config.data_seed
    if seed is None:
        seed = torch.initial_seed() if own is None else own.initial_seed()
    [seed] = broadcast_object_list([seed])

    # one generator seeds the workers and orders the samples; a stream's own one is copied into its workers
    generator = torch.Generator()
    reseed = _Reseeding(seed % 2**62, generator, *([own] if iterable and own is not None else []))
    if iterable and not hasattr(source, "set_epoch"):
        source.set_epoch = reseed
    elif hasattr(source, "generator"):
        source.generator = generator
    if iterable and data_size > 1 and isinstance(source, datasets.IterableDataset):
        dataloader = copy.copy(dataloader)
        vars(dataloader)["dataset"] = _Rows(source)  # torch refuses an assignment
    loader = prepare_data_loader(
        dataloader,
        accelerator.device,
        num_processes=data_size,
        process_index=data_rank,
        put_on_device=True,
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        non_blocking=accelerator.non_blocking,
    )
    loader.base_dataloader.generator = generator
    if not iterable and source is not None:
        loader.set_sampler(_EpochSampler(source, reseed))

    deepspeed = accelerator.state.deepspeed_plugin
    if deepspeed is not None and dataloader.batch_size is not None:
        key = "train_micro_batch_size_per_gpu"
        deepspeed.fill_match(key, must_match=False, **{key: dataloader.batch_size})
    return loader


def collate(rows: list[dict]) -> dict[str, torch.Tensor | None]:
    """Rows of equal length to `input_ids`, `target_ids` and `position_ids`, `[B, S]` int64; the last is None where
    rows are not packed.

    Targets are the next tokens of the whole row, -100 at its end: nothing needs shifting after this. A row's
    `labels` (as long as `input_ids`, unshifted, -100 where ignored, as in transformers) or its `loss_mask`
    (true for tokens that are to be predicted) decide which count; without either all do. The first token of a
    packed document, where `position_ids` are 0, is not predicted from the document before.
    """

    def stack(name: str) -> torch.Tensor:
        return torch.stack([torch.as_tensor(row[name]) for row in rows])

    input_ids = labels = stack("input_ids").long()
    if "labels" in rows[0]:
        labels = stack("labels").long()
    elif "loss_mask" in rows[0]:
        labels = input_ids.masked_fill(stack("loss_mask") == 0, IGNORE_INDEX)
    position_ids = stack("position_ids").long() if "position_ids" in rows[0] else None
    if position_ids is not None:
        labels = labels.masked_fill(position_ids == 0, IGNORE_INDEX)
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    return {"input_ids": input_ids, "target_ids": targets, "position_ids": position_ids}


def micro_batches(loader: DataLoader, consumed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of `prepare_dataloader`'s loader for ever, epoch by epoch, beyond the first `consumed`."""
    from accelerate import skip_first_batches

    epoch, skip = divmod(consumed, len(loader))
    while True:
        loader.set_epoch(epoch)
        yield from skip_first_batches(loader, skip) if skip else loader
        epoch, skip = epoch + 1, 0


def check_ids(batches: list[dict[str, torch.Tensor]], vocabulary: int) -> None:
    """ValueError for token ids or targets that the model has no row for: on a GPU they would end the process."""
    for batch in batches:
        for name, lowest in (("input_ids", 0), ("target_ids", IGNORE_INDEX)):
            low, high = (int(value) for value in batch[name].aminmax())
            if low < lowest or high >= vocabulary:
                raise ValueError(f"{name} from {low} to {high}: the model's vocabulary has {vocabulary} tokens")
