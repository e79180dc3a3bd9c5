"""A model whose rows read each other is refused by line: a microbatch has only some of the rows of the batch.

Each row of the table combines rows in another way; what keeps rows apart, however it is written, is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper_capture import capture
from piper_capture.whole_batch import row_mixing, row_trial
from piper_ir.ground.errors import CaptureError
from tests.helpers.cases import each_case

TOKENS, WIDTH = 10, 12
Step = Callable[["Model", Tensor], Tensor]

COMBINED: dict[str, Step] = {
    "centred": lambda m, h: h - h.mean(0),
    "scaled by the largest": lambda m, h: h / h.abs().max(),
    "softmax over rows": lambda m, h: F.softmax(h, 0),
    "running sum": lambda m, h: h.cumsum(0),
    "shuffled": lambda m, h: h + h.flip(0),
    "the row before": lambda m, h: h + torch.cat([h[:1], h[:-1]]),
    "the first row": lambda m, h: h - h[0],
    "rows as tokens": lambda m, h: h.view(TOKENS, -1, WIDTH).transpose(0, 1).cumsum(1),
    "rows as places": lambda m, h: F.avg_pool1d(h.transpose(0, 2), 3, 1, 1).transpose(0, 2),
    "a row's number": lambda m, h: h + torch.arange(len(h)).view(-1, 1, 1),
    "another row": lambda m, h: h[torch.arange(len(h)).flip(0)],
    "a count of tokens of all rows": lambda m, h: h * ((h[..., 0] > 0).sum() > 3),
    "ranks of rows": lambda m, h: h * (h.sum((1, 2)).argsort() < 2).view(-1, 1, 1),
}


def _sorted_by_expert(m: Model, h: Tensor) -> Tensor:
    """Return what two experts make of tokens, which are sorted by expert across rows and put back."""
    tokens = h.reshape(-1, WIDTH)
    weights, experts = m.first(tokens)[:, :4].softmax(-1).topk(2, -1)
    order = experts.reshape(-1).argsort()
    made = tokens[order // 2] * weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(tokens).index_add(0, order // 2, made).view_as(h)


def _in_windows(m: Model, h: Tensor) -> Tensor:
    rows = len(h)
    windows = h.roll(-1, 1).view(rows, 2, -1, WIDTH).reshape(rows * 2, -1, WIDTH)
    mixed = (windows @ windows.transpose(1, 2)).softmax(-1) @ windows
    return mixed.view(rows, 2, -1, WIDTH).reshape(rows, -1, WIDTH).roll(1, 1)


APART: dict[str, Step] = {
    "tokens sorted by expert": _sorted_by_expert,
    "windows": _in_windows,
    "both halves at once": lambda m, h: sum(m.first(torch.cat([h, 2 * h])).chunk(2)),
    "recurrence over tokens": lambda m, h: m.lstm(h.transpose(0, 1))[0].transpose(0, 1),
    "a token of each row": lambda m, h: (
        h[torch.arange(len(h)), h[..., 0].argmax(1)].unsqueeze(1) + h
    ),
    "a place of each row": lambda m, h: h.index_put(
        (torch.arange(len(h)), h[..., 0].argmax(1)), torch.zeros(WIDTH)
    ),
    "places": lambda m, h: h + m.first.weight[torch.arange(h.shape[1]).expand(len(h), -1) % WIDTH],
    "a library without a rule": lambda m, h: torch.linalg.solve(
        torch.eye(TOKENS) + 0.1 * h @ h.transpose(1, 2), h
    ),
}


class Model(nn.Module):
    def __init__(self, steps: dict[str, Step]) -> None:
        super().__init__()
        self.steps = steps
        self.first, self.last, self.lstm = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 3),
            nn.LSTM(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for step in self.steps.values():
            hidden = step(self, hidden)
        return self.last(hidden).mean(1)


def batch(rows: range) -> tuple[Tensor, Tensor]:
    return torch.ones(len(rows), TOKENS, WIDTH), torch.zeros(len(rows), dtype=torch.long)


@pytest.mark.long
@each_case("name", COMBINED)
def test_combined_rows_are_refused_by_line(name: str) -> None:
    line = COMBINED[name].__code__.co_firstlineno
    with pytest.raises(
        CaptureError, match=rf"(test_row_mixing.py:{line} |combines rows).*loss_over="
    ) as refused:
        capture(lambda: Model({name: COMBINED[name]}), batch, F.cross_entropy)
    assert "combines rows of the batch" in str(refused.value)


def test_combined_rows_are_taken_where_the_loss_is_over_a_microbatch() -> None:
    capture(lambda: Model(COMBINED), batch, F.cross_entropy, whole_batch=False)


@pytest.mark.long
def test_rows_that_count_by_themselves_are_taken() -> None:
    capture(lambda: Model(APART), batch, F.cross_entropy)


def _shifted(m: Model, h: Tensor) -> Tensor:
    """Shift scores of relative places by a view of padded rows, as Transformer-XL does."""
    scores = F.pad(h @ h.transpose(1, 2), (1, 0)).view(len(h), TOKENS + 1, TOKENS)
    return scores[:, 1:].view(len(h), TOKENS, TOKENS).softmax(-1) @ h


@each_case("apart", [True, False])
def test_rows_are_tried_beside_a_batch_norm(apart: bool) -> None:
    """A batch norm has a microbatch's statistics by definition; other operations of its chunk are tried all the same."""

    class Normed(Model):
        def __init__(self) -> None:
            super().__init__({"shifted": _shifted if apart else COMBINED["another row"]})
            self.norm = nn.BatchNorm1d(TOKENS)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    refusal = pytest.raises(CaptureError, match="combines rows of the batch")
    with nullcontext() if apart else refusal:
        capture(Normed, batch, F.cross_entropy, statistics=True)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_counts_tokens_is_refused_by_line(kind: type[nn.Module]) -> None:
    class Counting(nn.Module):
        def __init__(self, scale_grad_by_freq: bool) -> None:
            super().__init__()
            self.table = kind(5, 4, scale_grad_by_freq=scale_grad_by_freq)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens).flatten(1).sum(1)

    def tokens(rows: range) -> tuple[Tensor, Tensor]:
        return torch.arange(12).view(6, 2)[rows.start : rows.stop] % 5, torch.ones(len(rows))

    capture(lambda: Counting(False), tokens, F.mse_loss)
    with pytest.raises(
        CaptureError,
        match=r"test_row_mixing.py:\d+ .*how often a token .*scale_grad_by_freq=True.*loss_over=",
    ):
        capture(lambda: Counting(True), tokens, F.mse_loss)
    capture(lambda: Counting(True), tokens, F.mse_loss, whole_batch=False)


@each_case("apart", [True, False])
def test_a_count_of_the_tokens_of_all_rows_is_refused(apart: bool) -> None:
    class Unpadded(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            many = (tokens != 0).sum(1, keepdim=True) if apart else (tokens != 0).sum()
            made: Tensor = super().forward(tokens).sum(-1) * (many > 1)
            return made.sum(1)

    def tokens(rows: range) -> tuple[Tensor, Tensor]:
        return torch.ones(len(rows), TOKENS, dtype=torch.long), torch.ones(len(rows))

    refusal = pytest.raises(CaptureError, match="combines rows of the batch")
    with nullcontext() if apart else refusal:
        capture(lambda: Unpadded(5, 4), tokens, F.mse_loss)


@torch.library.custom_op("row_mixing::unknown", mutates_args=())
def unknown(h: Tensor) -> Tensor:
    return h.clone()


unknown.register_fake(torch.empty_like)
unknown.register_autograd(lambda context, gradient: gradient)


def test_what_is_too_large_to_try_is_taken_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_trial, "MOST", 0)
    captured = capture(lambda: Model({"": lambda m, h: unknown(h)}), batch, F.cross_entropy)
    (warning,) = set(captured.forward.warned)
    believed = (
        r"\S*test_row_mixing.py:\d+ .*rows of the batch apart is neither known .*piper verify"
    )
    assert re.match(believed, warning)


@each_case("apart", [True, False])
def test_a_tensor_that_is_filled_in_parts_is_tried_when_it_is_full(apart: bool) -> None:
    """The model has its loss, so that what its layers make is told by their parameters alone (DeepSeek-V2's keys)."""

    class Filled(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = self.first(x)
            keys = hidden.new_empty(*hidden.shape[:2], 2 * WIDTH)
            keys[..., :WIDTH].copy_(hidden.tanh())
            keys[..., WIDTH:].copy_(hidden if apart else COMBINED["shuffled"](self, hidden))
            return F.mse_loss(self.last(keys.sort(-1)[0][..., ::2]), y)

    def named(rows: range) -> tuple[dict[str, Tensor], tuple[()]]:
        return {
            "x": torch.ones(len(rows), TOKENS, WIDTH),
            "y": torch.ones(len(rows), TOKENS, 3),
        }, ()

    refusal = pytest.raises(CaptureError, match="combines rows of the batch")
    with nullcontext() if apart else refusal:
        capture(lambda: Filled({}), named, None)


def opaque(step: Step) -> nn.Module:
    class Region(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            model: Model = self.get_submodule("inner")
            return step(model, model.first(x))

    region = Region()
    region.add_module("inner", Model({}))
    return piper.tag(
        nn.Sequential(region, nn.Flatten(), nn.Linear(TOKENS * WIDTH, 3)), {"0": {"opaque": True}}
    )


def test_a_branch_that_changes_rows_a_little_is_refused() -> None:
    """Two in a hundred, where a condition on several rows holds: a trial tells that from rounding."""

    def branch(m: Model, h: Tensor) -> Tensor:
        return h + 0.02 * h.mean(0) if h.mean() > 1 else h

    with pytest.raises(CaptureError, match="as a branch may that depends on several rows"):
        capture(lambda: opaque(branch), batch, F.cross_entropy)


@each_case("most", ["MOST", "MOST_TRAINED"])
def test_a_region_that_is_too_large_to_try_is_taken_with_a_warning(most: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_trial, most, 0)
        captured = capture(lambda: opaque(lambda m, h: h - h.mean(0)), batch, F.cross_entropy)
    assert "rows of the batch apart is neither known" in "".join(captured.forward.warned)


def test_a_trial_decides_where_rules_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, tokens that go around in a window over [rows * windows] would be refused."""
    monkeypatch.setattr(row_mixing.RowTrial, "same", lambda self: False)
    with pytest.raises(CaptureError, match="combines rows of the batch"):
        capture(lambda: Model({"sorted": _sorted_by_expert}), batch, F.cross_entropy)
