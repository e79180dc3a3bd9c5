"""Make a batch function of a dataset of torch.utils.data, with torch's conventions for samples and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from piper_ir.ground.errors import JobError
from piper_runtime.data.batch_source import BatchSource
from piper_runtime.data.permutation import permutation

Collate = Callable[[list[Any]], Any]
"""A function that makes a batch of samples, as the collate_fn of torch's DataLoader."""


@dataclass(frozen=True, eq=False)
class DatasetBatch(BatchSource):
    """Give each row of each step its sample of a dataset.

    Row r of step s is sample p_e((s * G + r) mod n) of epoch e = (s * G + r) div n, with the global batch G, the number
    of samples n, and the permutation p_e of epoch e, or the identity without `shuffle`. A step may lie in two epochs;
    no sample is left out.
    """

    dataset: Any = field(repr=False)
    collate: Collate
    seed: int
    shuffle: bool
    samples: int
    global_batch: int | None = None

    def __call__(self, step: int, rows: range) -> tuple[Any, Any]:
        samples = self._fetch([self.index(step, row) for row in rows])
        return pair_of(self.collate(samples), "from_dataset")

    def index(self, step: int, row: int) -> int:
        """Return the index in the dataset of a row of a step's global batch."""
        epoch, place = divmod(
            step * bound_rows(self.global_batch, "from_dataset") + row, self.samples
        )
        return permutation(self.samples, self.seed, epoch)(place) if self.shuffle else place

    def _fetch(self, indices: list[int]) -> list[Any]:
        """Return samples like torch's DataLoader: by one call of the dataset's `__getitems__` if it has that."""
        if (several := getattr(self.dataset, "__getitems__", None)) is not None:
            samples: list[Any] = several(indices)
            return samples
        return [self.dataset[i] for i in indices]

    def bound(self, global_batch: int) -> DatasetBatch:
        return replace(self, global_batch=global_batch)

    def fingerprint(self) -> dict[str, Any]:
        """Return number of samples, seed, whether they are shuffled, and the rows per step."""
        return {
            "kind": "dataset", "samples": self.samples, "seed": self.seed, "shuffle": self.shuffle,
            "global_batch": self.global_batch,
        }  # fmt: skip

    def check_replicas(self, replicas: int) -> None:
        """Do nothing: any number of replicas can share the rows."""

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return nothing: all follows from the step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: all follows from the step."""


def from_dataset(
    dataset: Any, collate: Collate | None = None, seed: int = 0, shuffle: bool = True
) -> DatasetBatch:
    """Return a batch function for `piper.Job`: every epoch goes once through the dataset, in an order of its own.

    Which samples a step reads follows from the step and the job's global batch alone. So it is the same for every
    strategy, and a resumed run needs no state of the data.

    Args:
        dataset: With `len(dataset)` and `dataset[i]`, as a map-style dataset of torch.utils.data. It goes to every
            worker.
        collate: Makes (inputs, targets) of a list of samples. The default is torch's default_collate, for samples that
            are pairs (inputs, targets).
        seed: Of the order; the order of an epoch depends on it and on the epoch only.
        shuffle: Whether samples are taken in random order.

    Raises JobError for an object that is no such dataset, or has no samples.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise JobError(
            f"from_dataset got a {type(dataset).__name__}, which has no samples by number; give a dataset with "
            f"len(dataset) and dataset[i], or use from_stream"
        )
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError) as e:
        raise JobError(
            f"from_dataset got a {type(dataset).__name__} without a length: {e}; give it __len__, "
            f"or use from_stream"
        ) from e
    if samples < 1:
        raise JobError(
            f"from_dataset got a {type(dataset).__name__} without samples; is the path right?"
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise JobError(f"from_dataset(seed={seed!r}): an integer is needed")
    if not isinstance(shuffle, bool):
        raise JobError(f"from_dataset(shuffle={shuffle!r}): True or False is needed")
    return DatasetBatch(dataset, collate_of(collate, "from_dataset"), seed, shuffle, samples)


def collate_of(collate: object, name: str) -> Collate:
    """Return the function that collates samples: torch's default for None; raise JobError if it cannot be called."""
    if collate is None:
        return default_collate
    if not callable(collate):
        raise JobError(f"{name}(collate={collate!r}): a function of a list of samples is needed")
    return collate


def bound_rows(global_batch: int | None, name: str) -> int:
    """Return the rows per step; raise JobError while they are not known."""
    if global_batch is None:
        raise JobError(
            f"{name}: the rows per step are not known yet; call the `batch` of a piper.Job that was made with it, "
            f"or the result of bound(global_batch)"
        )
    return global_batch


def pair_of(collated: Any, name: str) -> tuple[Any, Any]:
    """Return a collated batch as (inputs, targets), a mapping as inputs alone; raise JobError for any other value.

    torch's default_collate makes lists of tuples; inputs that were a tuple become one again.
    """
    if isinstance(collated, Mapping):
        return collated, None
    if not isinstance(collated, Sequence) or isinstance(collated, str) or len(collated) != 2:
        raise JobError(
            f"{name}: a batch of samples was collated to a {type(collated).__name__}; a pair (inputs, targets) is "
            f"needed, or a dict of inputs. Let the dataset return pairs, or give collate=, a function of a list of "
            f"samples that returns a pair"
        )
    inputs, targets = collated
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets
