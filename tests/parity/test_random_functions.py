"""Random numbers in forward, by any function and anywhere in the model, are those that plain PyTorch draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.reference.verification import VerificationReport, verify_strategy
from piper_ir.ground.errors import CaptureError, JobError
from piper_ops.random import draws as rules
from tests.helpers.cases import each_case

WIDTH, ROWS = 8, 8

FACTORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda y: y * torch.rand(y.shape[0], 1),
    "rand of rows": lambda y: torch.where((torch.rand(y.shape[0]) < 0.5)[:, None], y, -y),
    "rand of no rows": lambda y: y * torch.rand(WIDTH),
    "randn": lambda y: y * torch.randn(y.shape, dtype=y.dtype),
    "randint": lambda y: y * torch.randint(1, 9, (y.shape[0], 1)),
    "randperm": lambda y: y[:, torch.randperm(WIDTH)],
    "normal": lambda y: y * torch.normal(0.0, 1.0, (y.shape[0], 1)),
    "normal of means": lambda y: y * torch.normal(torch.zeros(y.shape[0], 1), 1.0),
    "bernoulli": lambda y: y * torch.bernoulli(torch.full((y.shape[0], WIDTH), 0.5)),
    "bernoulli_": lambda y: y * y.new_empty((y.shape[0], WIDTH)).bernoulli_(0.5),
    "uniform_": lambda y: y * torch.empty(y.shape[0], 1).uniform_(),
    "exponential_": lambda y: y * torch.empty(y.shape[0], 1).exponential_(),
    "rand_like": lambda y: y * torch.rand_like(y),
    "randn_like": lambda y: y * torch.randn_like(y),
    "randint_like": lambda y: y * torch.randint_like(y, 1, 9),
    "multinomial": lambda y: y * torch.multinomial(torch.ones(y.shape[0], WIDTH), 1),
    "several": lambda y: y[:, torch.multinomial(torch.ones(WIDTH), 4, replacement=True)].repeat(
        1, 2
    ),
    "log_normal_": lambda y: y * torch.empty(y.shape[0], 1).log_normal_(),
    "cauchy_": lambda y: y * torch.empty(y.shape[0], 1).cauchy_(),
    "geometric_": lambda y: y * torch.empty(y.shape[0], 1).geometric_(0.5),
    "rows in the second dimension": lambda y: y * torch.rand(3, y.shape[0], 1).sum(0),
    "halves of each row": lambda y: y * sum(torch.rand(y.shape[0] * 2).view(-1, 2).chunk(2, 1)),
    "every other one": lambda y: y * (torch.rand(y.shape[0] * 2) + 1)[::2, None],
    "rows repeated one by one": lambda y: (
        F.dropout(y.repeat_interleave(2, 0), 0.5).view(-1, 2, WIDTH).sum(1)
    ),
    "an order of each row's": lambda y: y.gather(1, torch.rand_like(y).argsort(1)),
    "one of each row's": lambda y: (
        y * torch.rand(len(y), 3)[torch.arange(len(y)), torch.randint(0, 3, (len(y),))][:, None]
    ),
    "twice": lambda y: y * torch.cat([torch.rand(len(y), 1)] * 2).chunk(2)[1],
    "form of a row": lambda y: y * torch.rand(len(y), 1) + torch.rand(len(y), 1).new_zeros(WIDTH),
    "several entries for each row": lambda y: y * torch.rand(y.shape[0] * WIDTH).view(-1, WIDTH),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda y: F.dropout(y, 0.5),
    "feature dropout": lambda y: F.dropout1d(y[..., None], 0.5)[..., 0],
    "alpha dropout": lambda y: F.alpha_dropout(y, 0.5, training=True),
    "rrelu in place": lambda y: F.rrelu(y * 1, training=True, inplace=True),
    "rrelu": lambda y: F.rrelu(y, training=True),
    "gumbel softmax": F.gumbel_softmax,
    "attention": lambda y: F.scaled_dot_product_attention(
        *(y.view(-1, 1, 4, 2),) * 3, dropout_p=0.5
    ).reshape(y.shape),
    "distribution": lambda y: y * torch.distributions.Normal(torch.zeros_like(y), 1.0).rsample(),
    "a part that torch.compile made": torch.compile(lambda y: F.dropout(y, 0.5), backend="eager"),
    "two": lambda y: F.dropout(y, 0.5) * torch.rand(y.shape[0], 1),
    "one that is not read": lambda y: (torch.rand(3), F.dropout(y, 0.5))[1],
}


class DrawsOfCall(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.linear(x))


class Sum(nn.Module):
    """Each layer adds what depends on its own numbers alone, so its gradients tell them."""

    def __init__(self, draws: dict[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DrawsOfCall(draw) for draw in draws.values())

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for layer in self.layers:
            total = total + layer(x)
        return total


class Labels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(torch.where(torch.rand(x.shape[0]) < 0.5, 0, 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.labels = nn.Linear(WIDTH, WIDTH), Labels()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) + self.labels(x)


class Elsewhere(nn.Module):
    """Parts of layers run outside of them, and numbers are drawn between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        given = x
        x = x * torch.rand(x.shape[0], 1) + self.layers[1].labels(x)
        for layer in self.layers:
            x = layer(x) * torch.rand(x.shape[0], 1) + self.layers[0].labels(given)
        return self.head(x * self.layers[0].labels(given)) * torch.rand(x.shape[0], 1)


def job_of(model: Callable[[], nn.Module], **more: Any) -> piper.Job:
    def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
        x = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))[
            :, rows.start : rows.stop
        ]
        return x[0], x[1]

    return piper.Job(
        model,
        batch,
        lambda output, targets: (output * targets).mean(),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        global_batch=ROWS,
        **more,
    )


def drawn(model: Callable[[], nn.Module], **more: Any) -> VerificationReport:
    strategy = piper.Strategy(piper.Mesh(pp=2), [*piper.recipes.one_f_one_b(pp=2, microbatches=2)])
    return verify_strategy(job_of(model, **more), strategy, steps=1)


def different(report: VerificationReport) -> set[str]:
    return {
        d.name.removesuffix(".linear.weight") for d in report.differences if d.what == "gradient"
    }


_NAMES = [*FACTORIES, *FUNCTIONS]
EACH = pytest.mark.parametrize(
    "draws",
    [{n: {**FACTORIES, **FUNCTIONS}[n] for n in _NAMES[k::8]} for k in range(8)],
    ids=_NAMES[:8],
)


@pytest.mark.sampled(8)
@EACH
def test_each_function_draws_what_plain_pytorch_draws(
    draws: dict[str, Callable[[Tensor], Tensor]],
) -> None:
    report = drawn(lambda: Sum(draws))
    wrong = [name for k, name in enumerate(draws) if f"layers.{k}" in different(report)]
    assert not wrong and not report.differences


@pytest.mark.long
@EACH
def test_other_numbers_are_told(
    draws: dict[str, Callable[[Tensor], Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "key_of", lambda _: (1, 3))
    report = drawn(lambda: Sum(draws))
    assert [name for k, name in enumerate(draws) if f"layers.{k}" not in different(report)] == []


def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@torch.library.custom_op("piper_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x * noise(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda context, gradient: gradient)

REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "poisson": (lambda y: y * torch.poisson(torch.full((y.shape[0], WIDTH), 4.0)), "torch's poisson is not among"),
    "order of rows": (lambda y: y + torch.randperm(y.shape[0])[:, None], "an order of the rows"),
    "tokens around rows": (
        lambda y: F.dropout(y.t().reshape(-1), 0.5).view(WIDTH, -1).t(), "a dimension of what is drawn has the "
                                                                         "rows inside"
    ),
    "rows read otherwise": (
        lambda y: y * torch.rand(y.shape[0] * WIDTH).view(WIDTH, -1).t(), "a dimension of what is drawn has the "
                                                                          "rows inside"
    ),
    "rows joined to themselves": (lambda y: sum(F.dropout(torch.cat([y, y]), 0.5).chunk(2)), "a dimension of what is drawn has"),
    "rows repeated": (lambda y: sum(F.dropout(y.repeat(2, 1), 0.5).chunk(2)), "a dimension of what is drawn has "
                                                                              "the rows"),
    "halves of what is drawn": (lambda y: y * sum(torch.rand(2 * len(y)).chunk(2))[:, None], "a dimension of what is drawn has"),
    "its first half": (lambda y: y * torch.rand(2 * len(y))[: len(y), None], "a dimension of what is drawn has the "
                                                                             "rows"),
    "rows read otherwise, later": (
        lambda y: y * (torch.rand(y.shape[0] * WIDTH) * 2 + 1).view(WIDTH, -1).t(), "a dimension of what is drawn "
                                                                                    "has the rows"
    ),
    "one more than the rows": (lambda y: y * torch.rand(y.shape[0] + 1)[:-1, None], "is no multiple of the rows"),
}  # fmt: skip


COMBINED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows by the order of draws": lambda y: y[torch.rand(len(y)).argsort()],
    "next row's": lambda y: y * torch.rand(len(y), 1).roll(1, 0),
    "shares of the rows": lambda y: y * torch.rand(len(y), 1).softmax(0),
    "mean of the rows": lambda y: y * torch.randn(len(y), WIDTH).mean(0),
    "the first row's": lambda y: y * torch.rand(len(y), 1)[0],
    "gumbel softmax of the rows": lambda y: F.gumbel_softmax(y, dim=0),
    "any of the rows": lambda y: y[torch.randint(0, len(y), (len(y),))],
    "times the rows": lambda y: y * (torch.rand(len(y), 1) * len(y)),
    "in place": lambda y: y * torch.zeros(len(y), 1).copy_(torch.rand(len(y), 1)).flip(0),
    "dropout of ones": lambda y: y * F.dropout(torch.ones_like(y)).flip(0),
}


@pytest.mark.long
@each_case("name", COMBINED)
def test_draws_whose_rows_are_combined_are_refused_by_line(name: str) -> None:
    with pytest.raises(
        CaptureError,
        match=r"test_random_functions.py:\d+ .*(combines rows of the batch|number of rows)",
    ):
        drawn(lambda: nn.Sequential(Sum({name: COMBINED[name]}), nn.Linear(WIDTH, WIDTH)))


def test_a_loss_may_not_read_a_mean_of_draws_beside_what_the_model_computes() -> None:
    def weighed() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Sum({"": lambda y: y * torch.rand(len(y), 1).mean(0)})
        )

    with pytest.raises(
        CaptureError,
        match=r"test_random_functions.py:\d+ .*(combines rows|sum or a mean over rows of what)",
    ):
        drawn(weighed)


@pytest.mark.long
@each_case("name", REFUSED)
def test_what_depends_on_the_plan_is_refused_by_its_line(name: str) -> None:
    draw, reason = REFUSED[name]
    with pytest.raises(
        CaptureError, match=rf"test_random_functions.py:\d+ .*{reason}.*draws=\"microbatches\""
    ):
        drawn(lambda: Sum({name: draw}))


def test_a_kernel_that_draws_is_refused_by_its_line() -> None:
    with pytest.raises(
        CaptureError,
        match=r"test_random_functions.py:\d+ .in noise.: the operator piper_tests::noisy draws",
    ):
        drawn(lambda: Sum({"": noisy}))


@pytest.mark.long
def test_torchs_own_numbers_are_those_of_the_same_microbatches() -> None:
    draws = {**FACTORIES, **FUNCTIONS, **{name: draw for name, (draw, _) in REFUSED.items()}}
    report = drawn(lambda: Sum(draws), draws="microbatches", loss_over="microbatch")
    assert report.equal and report.equal_whole_batch is None


@pytest.mark.long
def test_numbers_are_drawn_where_a_module_runs() -> None:
    assert not drawn(Elsewhere).differences


class Chosen(nn.Module):
    """Rows that an own rule chooses go through dropout, so that how much is drawn depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(-1) > 0).nonzero()[:, 0]
        return torch.zeros_like(x).index_add(0, chosen, F.dropout(self.linear(x[chosen]), 0.5))


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Chosen() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.long
def test_a_module_whose_draws_depend_on_values_draws_by_torchs_generator_alone() -> None:
    with pytest.raises(
        CaptureError,
        match=r"a module that runs as it is draws numbers for as many elements as values",
    ):
        drawn(Choosing)
    with pytest.raises(JobError, match=r"cannot be judged: .*a module that runs as it is"):
        drawn(Choosing, draws="microbatches")
    job = job_of(Choosing, draws="microbatches")
    cut = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=2))
    whole = piper.Strategy(piper.Mesh(), [piper.split(piper.where(), microbatches=2)])
    one, two = (
        piper.execute(piper.compile(job, s), steps=2, launcher="inline", memory=False).losses
        for s in (whole, cut)
    )
    assert one == pytest.approx(two)
