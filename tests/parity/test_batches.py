"""Batches as people have them: mappings, constants, tensors without rows, bags, labels in the model."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.captures.capturing import capture_key
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import CaptureError, JobError, PiperError
from piper_ir.plan.plan import Plan
from tests.helpers.cases import each_case

WIDTH, VOCAB, LENGTH = 8, 11, 5
RECIPE = (*piper.recipes.one_f_one_b(pp=2, microbatches=2), *piper.recipes.data_parallel())
BOTH = piper.Strategy(piper.Mesh(pp=2, dp=2), RECIPE)


class Encoding(UserDict[str, Any]):
    """A mapping with attributes, as tokenizers return it."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Layers(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, classes)

    def run(self, x: Tensor, times: int = 1) -> Tensor:
        for layer in self.layers:
            for _ in range(times):
                x = x + layer(x).tanh()
        return self.head(x)


class Words(Layers):
    """A language model that computes its loss itself, in one of the forms in which models return it."""

    def __init__(self, form: str = "output") -> None:
        super().__init__(VOCAB)
        self.form = form
        self.words, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        scale: float = 1.0,
        reduction: str = "mean",
        twice: bool = False,
    ) -> Any:
        x = self.words(input_ids) * scale
        if positions is not None:
            x = x + self.positions(positions)
        logits = self.run(x, 2 if twice else 1)
        loss = (
            None
            if labels is None
            else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        )
        if self.form == "output":
            return Output(loss, logits)
        return {"tuple": (loss, logits), "dict": {"logits": logits, "loss": loss}, "scalar": loss}[
            self.form
        ]


class Bags(Layers):
    def __init__(self) -> None:
        super().__init__(3)
        self.words = nn.EmbeddingBag(VOCAB, WIDTH, mode="mean")

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.run(self.words(text, offsets))


class Images(Layers):
    def __init__(self) -> None:
        super().__init__(3)
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return self.run(self.stem(image).mean((2, 3)))


@dataclass
class Sentence:
    tokens: Tensor
    labels: Tensor
    scale: float = 1.0


@dataclass
class Sample:
    words: Sentence
    positions: Tensor | None = None


class Records(Words):
    """A language model that gets dataclasses."""

    def forward(self, sample: Sample) -> Any:  # type: ignore[override]  # one argument in the place of many
        return super().forward(sample.words.tokens, sample.words.labels, scale=sample.words.scale)


def records(step: int, rows: range) -> Sample:
    found = with_labels(step, rows)
    return Sample(Sentence(found.input_ids, found.labels, 2.0))


def ids(step: int, rows: range) -> Tensor:
    return (torch.arange(8 * LENGTH).view(8, LENGTH) * 7 + step * 3)[rows.start : rows.stop] % VOCAB


def classes(rows: range) -> Tensor:
    return torch.arange(8)[rows.start : rows.stop] % 3


def with_labels(step: int, rows: range, **more: Any) -> Encoding:
    tokens = ids(step, rows)
    return Encoding(input_ids=tokens, labels=tokens.roll(1, 1), **more)


def bags(step: int, rows: range) -> Any:
    return (ids(step, rows).flatten(), torch.arange(0, len(rows) * LENGTH, LENGTH)), classes(rows)


def images(step: int, rows: range) -> Any:
    image = torch.linspace(-1, 1, 8 * 3 * 16).view(8, 3, 4, 4)[rows.start : rows.stop] + step
    return {"image": image}, [{"label": classes(rows), "name": "class"}]


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def job(
    model: Callable[[], nn.Module],
    batch: Callable[[int, range], Any],
    loss: Any = None,
    **more: Any,
) -> piper.Job:
    wide = piper.Precision(params="float64")
    return piper.Job(model, batch, loss, optimizer=sgd, global_batch=8, precision=wide, **more)


def positions() -> Tensor:
    return torch.arange(LENGTH)


JOBS: dict[str, Callable[[], piper.Job]] = {
    "an output with a loss, constants, positions": lambda: job(
        Words,
        lambda s, r: with_labels(
            s, r, scale=2, reduction="mean", twice=True, positions=piper.shared(positions())
        ),
    ),
    "a tuple that begins with a loss": lambda: job(lambda: Words("tuple"), with_labels),
    "a dict with a loss": lambda: job(lambda: Words("dict"), with_labels),
    "a loss alone, positions by name": lambda: job(
        lambda: Words("scalar"),
        lambda s, r: dict(with_labels(s, r, positions=positions())),
        shared="positions",
    ),
    "dataclasses": lambda: job(lambda: Records("scalar"), records),
    "bags with offsets": lambda: job(Bags, bags, F.cross_entropy),
    "images with labels in dicts": lambda: job(
        Images, images, lambda out, t: F.cross_entropy(out, t[0]["label"])
    ),
}


QUICK = ("an output with a loss, constants, positions", "dataclasses", "bags with offsets")
"""The cases that run in every test run; the others are long."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in JOBS]
)
def test_equal_to_one_device(name: str) -> None:
    report = verify_strategy(JOBS[name](), BOTH)
    assert report.equal, report.text()


def test_constants_are_part_of_plan_and_key() -> None:
    one, other = (
        job(Words, lambda s, r, scale=scale: with_labels(s, r, scale=scale)) for scale in (1, 2)
    )
    assert capture_key(one) != capture_key(other)
    plan = piper.compile(one, BOTH).plan
    assert plan.constants == (("inputs.scale", "1"),)
    assert loads(Plan, dumps(plan)) == plan


def test_a_tensor_without_rows_has_its_own_shape_at_any_rows() -> None:
    found = piper.compile(
        job(Words, lambda s, r: with_labels(s, r, positions=piper.shared(positions()))), BOTH
    )
    shapes = {b.name: b.spec.bind(7).shape for b in found.program.batch}
    assert shapes == {
        "inputs.input_ids": (7, LENGTH),
        "inputs.labels": (7, LENGTH),
        "inputs.positions": (LENGTH,),
    }


def test_a_mark_is_part_of_the_capture_key() -> None:
    """Positions of two entries look like two rows, unless they are marked."""

    def key(mark: Callable[[Tensor], Tensor], entries: int) -> object:
        return capture_key(
            job(Words, lambda s, r: with_labels(s, r, positions=mark(torch.arange(entries))))
        )

    assert key(piper.shared, 2) != key(torch.clone, 2) and key(piper.shared, 5) != key(
        torch.clone, 5
    )


# what is refused


def changing(step: int, rows: range) -> Mapping[str, Any]:
    return with_labels(step, rows, scale=float(step))


def ragged(step: int, rows: range) -> Any:
    lengths = [1 + (row * 3 + step) % 4 for row in rows]
    return (
        torch.arange(sum(lengths)) % VOCAB,
        torch.tensor([0, *lengths[:-1]]).cumsum(0),
    ), classes(rows)


def contrast(output: Tensor, other: Tensor) -> Tensor:
    scores = output @ other.T
    return F.cross_entropy(scores, torch.arange(scores.shape[0]))


def points(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)[rows.start : rows.stop] + step
    return x, x.sin()


REFUSED: dict[str, tuple[type[PiperError], Callable[[], piper.Job], str]] = {
    "positions that are not declared": (
        CaptureError,
        lambda: job(Words, lambda s, r: with_labels(s, r, positions=positions())),
        r"inputs.positions has shape \(5,\) for 2 rows; .*piper.shared\(tensor\), or "
        r"Job\(shared='inputs.positions'\)",
    ),
    "a name that is not there": (
        CaptureError,
        lambda: job(Words, with_labels, shared="position"),
        r"Job\(shared='position'\): no tensor of the batch has this name; it has inputs.input_ids, "
        r"inputs.labels",
    ),
    "bags of different lengths": (
        CaptureError,
        lambda: job(Bags, ragged, F.cross_entropy),
        r"are padded to one: \[rows, length\]",
    ),
    "no labels": (
        CaptureError,
        lambda: job(Words, lambda s, r: {"input_ids": ids(s, r)}),
        r"the model's own loss is NoneType. .*when they get labels: let batch return them among "
        r"the inputs",
    ),
    "a constant of another kind": (
        CaptureError,
        lambda: job(Words, lambda s, r: with_labels(s, r, scale=b"2")),
        "is a bytes; a batch holds",
    ),
    "a list": (
        CaptureError,
        lambda: job(Words, lambda s, r: [ids(s, r)]),
        "batch returned list; it must return a pair .*, or a dict of inputs",
    ),
    "all rows at once": (
        CaptureError,
        lambda: job(lambda: nn.Linear(WIDTH, WIDTH), points, contrast),
        rf"test_batches.py:{contrast.__code__.co_firstlineno + 1} .*compares the rows of a batch "
        rf"with each other: its "
        rf"result has "
        r"rows x rows numbers.*\(contrastive, .*Accepted is .*let one row of Job.batch hold the "
        r"whole set",
    ),
}


@each_case("name", REFUSED)
def test_refused_with_the_way_out(name: str) -> None:
    kind, made, said = REFUSED[name]
    with pytest.raises(kind, match=said):
        piper.compile(made(), BOTH)


def test_a_constant_that_changes_is_refused_where_it_does() -> None:
    compiled = piper.compile(job(Words, changing), BOTH)
    said = r"Job.batch\(step=1, .*returned inputs.scale=1.0; the plan was made for 0.0. What is no tensor is a constant"
    with pytest.raises(JobError, match=said):
        piper.execute(compiled, steps=2, launcher="inline", memory=False)


@each_case("name", [3, "", ("x", None)])
def test_names_of_shared_tensors_are_texts(name: Any) -> None:
    with pytest.raises(
        JobError,
        match=r"Job\(shared=.*the name of a tensor of the batch is needed, or a tuple of names",
    ):
        job(Words, with_labels, shared=name)


def test_only_tensors_are_marked() -> None:
    with pytest.raises(TypeError, match="shared got a list"):
        piper.shared([1])  # type: ignore[arg-type]  # on purpose
