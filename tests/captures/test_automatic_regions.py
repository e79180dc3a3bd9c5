"""Modules that no joint graph can hold become opaque by themselves, are said so, and train as in plain PyTorch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import where
from piper.api.reference.verification import verify_strategy
from piper.views.explained.explain import explain
from piper_capture.chunks import opaque as opaque_steps
from piper_capture.trace import written_modules
from piper_ir.ground.errors import CaptureError, ExecutionError, PiperWarning
from tests.helpers.block_nets import LENGTH, ROWS, WIDTH, BlockNet, batch
from tests.helpers.cases import each_case
from tests.predictions.test_memory_truth import lies

EXPERTS = 3

PIPELINE = piper.recipes.pipeline(pp=2, microbatches=2)
BOTH = piper.Strategy(piper.Mesh(pp=2, dp=2), (*PIPELINE, *piper.recipes.data_parallel()))
ALONE = piper.Strategy(piper.Mesh(), (piper.split(where(), microbatches=2),))


class Mixture(nn.Module):
    """A loop over the experts that some token chose, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, WIDTH)
        scores = self.gate(tokens)
        share, chosen = scores.softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for expert in (mask.sum((-1, -2)) > 0).nonzero():
            place, token = torch.where(mask[expert[0]])
            out.index_add_(
                0, token, self.experts[int(expert)](tokens[token]) * share[token, place, None]
            )
        return out.view(x.shape), scores


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.often, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() < 1e6:
            return self.often(x)  # type: ignore[no-any-return]  # modules have no types
        return self.never(x)  # type: ignore[no-any-return]  # modules have no types


class Positive(nn.Module):
    """Sizes that only a run knows, inside alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros_like(x).masked_scatter(x > 0, x[x > 0].square())


class Energy(nn.Module):
    """The gradient of a scalar by the input, as in energy models and force fields."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.inner(place).sum(), place, create_graph=True)
        return force * x


class Aligned(nn.Module):
    """A CTC loss of each row."""

    def forward(self, x: Tensor) -> Tensor:
        text, ones = torch.ones(len(x), 1, dtype=torch.long), torch.ones(len(x), dtype=torch.long)
        loss = F.ctc_loss(
            x.log_softmax(-1).transpose(0, 1), text, ones * LENGTH, ones, reduction="none"
        )
        return x * loss[:, None, None]


class Transformed(Energy):
    def forward(self, x: Tensor) -> Tensor:
        forces: Tensor = torch.func.vmap(torch.func.grad(lambda row: self.inner(row).sum()))(x)
        return forces


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]  # type: ignore[no-any-return]  # modules have no types


class Block(nn.Module):
    def __init__(self, special: nn.Module) -> None:
        super().__init__()
        self.linear, self.special = nn.Linear(WIDTH, WIDTH), special

    def forward(self, x: Tensor) -> Tensor:
        made = self.special(torch.tanh(self.linear(x)))
        return x + (
            made[0] + made[1].mean(-1).view(x.shape[:2])[..., None]
            if isinstance(made, tuple)
            else made
        )


class Net(BlockNet):
    """Layers with such modules, of which one shares a weight with the embedding."""

    def __init__(self, *special: Callable[[], nn.Module], tie: bool = False) -> None:
        super().__init__(Block(make()) for make in special)
        if tie:
            self.layers[0].special.experts[1].weight = self.embed.weight  # type: ignore[union-attr, index]  # a Mixture


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=0.01)


def job(*special: Callable[[], nn.Module], tie: bool = False) -> piper.Job:
    model = functools.partial(Net, *special, tie=tie)
    return piper.Job(
        model,
        batch,
        F.cross_entropy,
        adam,
        ROWS,
        precision=piper.Precision(params="float64"),
        clip_norm=0.05,
    )


LSTM = functools.partial(Recurrent, nn.LSTM)
MIXED = (Mixture, Branch, Positive, LSTM)


def compiled(made: piper.Job, strategy: piper.Strategy) -> piper.Compiled:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PiperWarning)
        return piper.compile(made, strategy)


@pytest.fixture(scope="module")
def mixed() -> tuple[piper.Compiled, list[str]]:
    """The capture of the mixed model, which other tests share, and the warnings of it."""
    with pytest.warns(PiperWarning) as heard:
        found = piper.compile(job(*MIXED, tie=True), ALONE)
    return found, [str(w.message) for w in heard]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::piper_ir.ground.errors.PiperWarning")
@pytest.mark.parametrize("name", ["shared states, recomputed", "split"])
def test_equal_to_one_device(name: str, mixed: tuple[piper.Compiled, list[str]]) -> None:
    """Plans have tied weights, clipping, parts of parameters, recomputation and split backwards here."""
    more = {
        "shared states, recomputed": (
            *piper.recipes.data_parallel(zero=3),
            piper.recompute(where(layer=(0, 1, 3))),
        ),
        "split": (piper.split_backward(where()), *piper.recipes.data_parallel()),
    }
    report = verify_strategy(
        job(*MIXED, tie=True), replace(BOTH, directives=(*PIPELINE, *more[name])), steps=2
    )
    assert report.equal, report.text()


@pytest.mark.filterwarnings("ignore::piper_ir.ground.errors.PiperWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_in_forward_and_ctc(shared: bool) -> None:
    """Parameters are there for the gradients that a forward asks for, and are freed after it where ranks share them."""
    strategy = replace(
        BOTH, directives=(*PIPELINE, *piper.recipes.data_parallel(zero=3 if shared else 0))
    )
    report = verify_strategy(job(Energy, Aligned), strategy, steps=2)
    assert report.equal, report.text()
    said = piper.compile(job(Energy, Aligned), strategy).notes
    assert any("(Energy): opaque" in one and "asks for gradients in forward" in one for one in said)
    assert any("(Aligned): opaque" in one and "an operator makes inside" in one for one in said)


@pytest.mark.long
def test_each_is_said_with_module_line_cause_and_cost(
    mixed: tuple[piper.Compiled, list[str]],
) -> None:
    found, said = mixed
    text = explain(found)
    assert len(said) == 4 and all(f"note: {one}" in text for one in said)
    line = Mixture.forward.__code__.co_firstlineno + 6
    assert f"test_automatic_regions.py:{line} (for expert in" in said[0]
    assert said[0].startswith(
        "module 'layers.0.special' (Mixture): opaque, run by autograd as it is, since how often it runs"
    )
    assert (
        "module 'layers.1.special' (Branch): opaque" in said[1]
        and "a branch depends on values of tensors" in said[1]
    )
    assert (
        "module 'layers.2.special' (Positive): opaque" in said[2]
        and "the shape of a tensor depends on values" in said[2]
    )
    assert (
        "module 'layers.3.special.inner' (LSTM): opaque" in said[3]
        and "fused recurrent layer" in said[3]
    )
    assert all(
        "backward is not split" in one and "opaque=True chooses another part" in one for one in said
    )
    assert [("values; the plan has the bytes" in one) for one in said] == [True, True, True, False]
    assert [c.id for c in found.program.chunks if c.opaque] == [
        f"layer{k}_opaque1" for k in range(4)
    ]


def test_a_region_by_hand_is_left_as_it_is() -> None:
    made = job(LSTM)
    tagged = replace(made, model=lambda: piper.tag(made.model(), {"layers.0": {"opaque": True}}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = piper.compile(tagged, ALONE)
    assert [c.id for c in found.program.chunks] == [
        "root",
        "layer0_opaque1",
        "root.1",
    ] and not found.notes


@pytest.mark.long
@pytest.mark.parametrize("kind", [Mixture, LSTM], ids=["mixture", "lstm"])
def test_memory_is_that_of_the_plan(kind: Callable[[], nn.Module]) -> None:
    """A recurrent layer's is equal to the byte; a mixture's nearly so, whose experts have other tokens in the run."""
    found = compiled(job(kind, kind), ALONE)
    codes = {found.program.chunk(f"layer{k}_opaque1").code for k in (0, 1)}
    assert len(codes) == 1, "equal modules share their code"
    run = piper.execute(found, steps=1, launcher="inline", memory=True)
    if kind is LSTM:
        assert not lies(found.plan, run.memory)
    (role,) = found.plan.roles
    assert run.memory[0].peak == pytest.approx(role.peak_bytes, rel=0.05)


@pytest.mark.long
def test_gradients_of_parameters_that_no_row_reached_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: without zeros for them, autograd refuses the backward."""
    made = compiled(job(Branch), ALONE)
    chunk = made.program.chunk("layer0_opaque1")
    assert all(i.needs_grad for i in chunk.inputs)
    with pytest.raises(RuntimeError, match="to not have been used in the graph"):
        steps = opaque_steps.backward_step
        monkeypatch.setattr(opaque_steps, "backward_step", lambda *a, zeros: steps(*a))
        made.code.trace(chunk.code, 7)  # type: ignore[union-attr]  # a captured program has code


class Keeping(Branch):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sum()
        return super().forward(x)


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[..., 0] > 0].sum(0) if x.abs().max() < 0 else x[x[..., 0] > 0]


class Elsewhere(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * OUTSIDE[0]


class Told(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return {"made": super().forward(x)}  # type: ignore[return-value]  # on purpose


class Conditional(Branch):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.cond(x.abs().max() < 1e6, self.often, self.never, (x,))
        return made


class SignOfAll(Branch):
    """The bias outweighs most rows, so that random rows alike would seldom take the other branch."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.often(x)
        return 2 * y if y.sum() > 0 else y


OUTSIDE = [torch.ones(WIDTH, dtype=torch.float64)]


@each_case(
    ("kind", "says"),
    [
        (SignOfAll, r"combines rows of the batch, as a branch may that depends on several rows"),
        (Keeping, r"module 'layers.0.special' .*keeps something in self.last"),
        (
            Selecting,
            r"module 'layers.0.special' .*the shape of what it returns depends on values of "
            r"tensors .*torch.where",
        ),
        (Elsewhere, r"tensor of shape \(8,\) that is no(ne of its| parameter)"),
        (Told, r"module 'layers.0.special' .*it returns a dict"),
        (
            Transformed,
            r"gradients by torch.func .*torch.autograd.grad\(y.sum\(\), x, create_graph=True\)",
        ),
        (
            Conditional,
            r"automatic_regions.py:\d+.*torch.cond.*: cond takes functions.*Write `if` in place of "
            r"it.*torch.where",
        ),
    ],
)
def test_what_cannot_run_as_it_is_is_refused_by_name(
    kind: Callable[[], nn.Module], says: str
) -> None:
    with pytest.raises(CaptureError, match=f"(?s){says}"):
        piper.compile(job(kind), ALONE)


class Begun(Branch):
    """Starts by the first batch, in a branch that a trial on random numbers does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begun", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.begun == 0:
            self.begun.fill_(1)
        return super().forward(x)


def test_a_change_in_a_branch_is_found_when_it_runs() -> None:
    with pytest.raises(ExecutionError, match=r"Begun changed self\.begun in its forward"):
        piper.execute(compiled(job(Begun), ALONE), steps=1, launcher="inline")


def test_what_is_no_module_of_its_own_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        CaptureError,
        match=r"(?s)automatic_regions.py:\d+.*in the model itself. Put it into a small nn.Module",
    ):
        piper.compile(replace(job(), model=Branch), ALONE)

    def loss(out: Tensor, t: Tensor) -> Tensor:
        return out.sum() if out.sum() > 0 else -out.sum()

    with pytest.raises(
        CaptureError,
        match=r"(?s)test_automatic_regions.py:\d+.*in the loss. Let the model compute it in a",
    ):
        piper.compile(replace(job(LSTM), loss=loss), ALONE)


def test_a_module_that_is_too_large_to_run_in_a_capture_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(written_modules, "LARGEST", 1000)
    with pytest.raises(
        CaptureError,
        match=r"must run it for real, which would take 0.0 GiB .*replace='gated_experts'",
    ):
        piper.compile(job(lambda: Mixture()), ALONE)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::piper_ir.ground.errors.PiperWarning")
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    report = verify_strategy(job(functools.partial(Recurrent, kind), Branch), BOTH, steps=2)
    assert report.equal, report.text()


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.associative_scan import associative_scan

        return associative_scan(
            lambda a, b: a * 0.5 + b, self.linear(x), dim=1, combine_mode="generic"
        )  # type: ignore[no-any-return]  # modules have no types


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::piper_ir.ground.errors.PiperWarning")
def test_associative_scans() -> None:
    report = verify_strategy(job(Scan, Branch), BOTH, steps=2)
    assert report.equal, report.text()


@pytest.mark.long
def test_processes_get_the_modules() -> None:
    found = compiled(job(Mixture, LSTM), replace(BOTH, mesh=piper.Mesh(pp=2), directives=PIPELINE))
    runs = [
        piper.execute(found, steps=2, launcher=launcher).losses
        for launcher in ("processes", "inline")
    ]
    assert runs[0] == runs[1]
