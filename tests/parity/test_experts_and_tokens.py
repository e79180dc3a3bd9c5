"""Devices that share the tokens of a row, and the experts of a dropless mixture, train what one device trains.

The classes of transformers compute norms and routers in float32 inside, so their tolerance is that of float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Mesh, Precision, Strategy, models, recipes, where
from piper.api.compiling import compiling
from piper.api.reference.verification import verify_strategy
from piper_capture import region
from piper_capture.steps.routed import RoutedLayouts
from piper_ir.ground.errors import CompileError, DirectiveError, PlanError
from piper_ir.plan.plan import Plan
from piper_ir.program.layout import DimPart
from piper_ir.verify import verify
from piper_ops import grouped_mm, route, unroute
from piper_simulator import repeated_share, simulate
from tests.helpers import expert_loops, families, parity
from tests.helpers.cases import each_case
from tests.helpers.decoders import DECODERS
from tests.helpers.memory_judge import lies
from tests.helpers.steered import EXPERTS, TOKENS, TOP, WIDTH
from tests.parity.test_dropless_experts import compiled, expected, job, run, shared

SEQUENCE = piper.shard(where(), stream="tokens")
CONTEXT = piper.shard(where(), over="cp", index="tokens")
SHARING: dict[str, tuple[Mesh, tuple[Any, ...], int]] = {
    "tp": (Mesh(tp=2, ep=2), (SEQUENCE,), 0),
    "cp": (Mesh(cp=2, ep=2), (CONTEXT,), 0),
    "tp, cp, dp, zero 1": (Mesh(tp=2, cp=2, ep=2, dp=2), (SEQUENCE, CONTEXT), 1),
}


@pytest.mark.parametrize("load", ["2", "all to one"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * ("dp" in n)) for n in SHARING]
)
def test_devices_share_tokens_beside_experts(name: str, load: str) -> None:
    mesh, directives, zero = SHARING[name]
    made = compiled(load, mesh, *directives, zero=zero)
    verify(made.plan)
    found = run(made)
    parity.assert_parity(found, expected(load, made.plan.replicas, made.plan.microbatches))
    assert not lies(made.plan, found.memory)


ROWS = ("dp", "ep")
FOLDED: dict[str, tuple[Mesh, Any, tuple[Any, ...], tuple[str, ...], int]] = {
    "tp and ep": (Mesh(tp=2, ep=2), ("tp", "ep"), (SEQUENCE,), ROWS, 0),
    "tp alone": (Mesh(tp=2, dp=2), "tp", (SEQUENCE,), ROWS, 1),
    "dp and ep": (Mesh(dp=2, ep=2), ("dp", "ep"), (), ROWS, 0),
    "tp and ep around cp": (Mesh(tp=2, cp=2, ep=2), "tp+ep", (SEQUENCE, CONTEXT), ROWS, 3),
    "states over cp": (Mesh(tp=2, cp=2, ep=2), ("tp", "cp", "ep"), (SEQUENCE, CONTEXT), (*ROWS, "cp"), 3),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "tp and ep")) for n in FOLDED]
)
def test_experts_over_several_axes(name: str) -> None:
    """Megatron's experts with a tensor-parallel size of 1, and torchtitan's folded expert parallelism."""
    mesh, over, directives, rows, zero = FOLDED[name]
    rest = recipes.data_parallel(over=rows, zero=zero)
    made = piper.compile(job("2"), Strategy(mesh, [shared(over=over), *directives, *rest]))
    verify(made.plan)
    found = run(made)
    parity.assert_parity(found, expected("2", made.plan.replicas, made.plan.microbatches))
    assert not lies(made.plan, found.memory)


def folded() -> Plan:
    return compiled("2", Mesh(tp=2, ep=2), SEQUENCE, over=("tp", "ep")).plan


def test_each_device_has_other_experts_along_both_axes() -> None:
    plan = folded()
    assert repeated_share(plan) < 0.01, "each device computes the rows of tokens of its own"
    params = {p.name: p for p in plan.params}
    assert params["layers.0.up"].layout == (DimPart("ep", 0), DimPart("tp", 0))
    assert params["layers.0.up"].spec.shape[0] == EXPERTS // 4 and not params["layers.0.up"].summed
    assert params["layers.0.router.weight"].summed == ("tp",)
    assert plan.experts == ("ep",) and {c.experts for c in plan.chunks} == {"", "tp+ep"}
    assert simulate(plan, "h100x4").period_s > 0


@each_case(
    ("experts", "message"),
    [
        ("ep", r"has experts along ep, and its step . exchanges rows along tp\+ep"),
        (
            "tp+dp",
            r"has experts along tp\+dp, its parameters have parts along ep, too, and its step F adds",
        ),
        ("cp", r"has experts along cp; devices have different ones along ep"),
    ],
)
def test_negative_control_experts_along_other_axes_are_found(experts: str, message: str) -> None:
    plan = folded()
    chunks = tuple(replace(c, experts=experts) if c.experts else c for c in plan.chunks)
    with pytest.raises(PlanError, match=message):
        verify(replace(plan, chunks=chunks))


@each_case(
    ("over", "mesh", "directive", "message"),
    [
        (("tp", "ep"), Mesh(tp=2, ep=2), piper.shard(where()), "along tp have the same tokens .* write stream=.tokens"),
        (("tp", "tp"), Mesh(tp=2), SEQUENCE, "over='tp.tp'; one of cp, .* only experts .* are shared over several axes"),
        (("tp", "ep"), Mesh(tp=2, ep=3), SEQUENCE, "8 experts cannot be shared equally by 6 devices"),
    ],
)  # fmt: skip
def test_axes_that_experts_cannot_be_over_are_refused(
    over: Any, mesh: Mesh, directive: Any, message: str
) -> None:
    with pytest.raises(DirectiveError, match=message):
        compiled("2", mesh, directive, over=over)


@pytest.mark.long
def test_more_devices_share_tokens_than_a_microbatch_has_rows() -> None:
    """Experts with a capacity exchange [experts, rows, ...], which devices do not share by tokens."""
    sizes = dict(layers=1, width=16, heads=4, hidden=16, vocab=16, length=8)
    mixture = models.Experts(number=4, top_k=1, hidden=8, capacity_factor=1.25)
    made = models.job(models.DecoderConfig(**sizes, experts=mixture), global_batch=2)
    experts = recipes.expert_parallel()
    strategy = Strategy(
        Mesh(tp=4, ep=2), [*experts, SEQUENCE, *recipes.data_parallel(over=("ep",))]
    )
    assert verify_strategy(made, strategy, steps=1).equal


def test_experts_with_a_capacity_are_over_one_axis() -> None:
    config = replace(
        DECODERS["Mixtral"], experts=replace(DECODERS["Mixtral"].experts, capacity_factor=1.0)
    )
    with pytest.raises(
        DirectiveError,
        match=r"places for so many tokens .* over one axis, and dropless ones over several",
    ):
        piper.compile(
            models.job(config, global_batch=8, precision="float64"),
            Strategy(
                Mesh(tp=2, ep=2),
                [
                    *recipes.expert_parallel(over=("tp", "ep")),
                    SEQUENCE,
                    *recipes.data_parallel(over=("ep",)),
                ],
            ),
        )


def _rows(plan: Plan) -> int:
    region = next(c for c in plan.chunks if c.experts).steps["F"].experts
    assert region is not None and isinstance(region.rows, int)
    return region.rows


def test_a_device_routes_its_own_tokens() -> None:
    whole, part = (
        compiled("2", mesh, *more).plan
        for mesh, more in ((Mesh(ep=2), ()), (Mesh(tp=2, ep=2), (SEQUENCE,)))
    )
    assert _rows(whole) == 2 * _rows(part) == whole.rows * TOKENS * TOP
    summed = {p.name: p.summed for p in part.params}
    assert summed["layers.0.up"] == ("tp",) and not any(p.summed for p in whole.params)


def test_negative_control_gradients_of_experts_are_sums_over_the_tokens_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RoutedLayouts, "summed", lambda self, number: ())
    work = replace(job("2"), clip_norm=0.2)  # not captured before
    made = piper.compile(
        work,
        Strategy(
            Mesh(tp=2, ep=2), [shared(bound=1.5), SEQUENCE, *recipes.data_parallel(over=("ep",))]
        ),
    )
    right = parity.reference(work, replicas=2, microbatches=1, steps=2)
    assert parity.differences(parity.RunOutcome.of(run(made)), right)


class Mixed(nn.Module):
    """A region of experts with an operation before the experts that is not theirs."""

    def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, WIDTH))
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        share, chosen = self.router(x.flatten(0, 1)).softmax(-1).topk(TOP, -1)
        with region(experts=0):
            rows, counts = route(self.before(x).flatten(0, 1), chosen, EXPERTS)
            y = unroute(grouped_mm(rows, counts, self.up), chosen, share)
        return x + y.view_as(x)


def less_mean(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def by_number(x: Tensor) -> Tensor:
    return x.view(-1, TOKENS, WIDTH).tanh()


@each_case(
    ("before", "message"),
    [
        (
            less_mean,
            "mean .* of experts0 needs all tokens of a row, which devices share over tp; leave it out",
        ),
        (
            by_number,
            "is written for 16 tokens, which devices share over tp: .*leave it out of the region",
        ),
    ],
)
def test_a_region_that_mixes_tokens_is_refused(
    before: Callable[[Tensor], Tensor], message: str
) -> None:
    work = replace(job("2"), model=functools.partial(Mixed, before))
    with pytest.raises(DirectiveError, match=message):
        piper.compile(
            work,
            Strategy(Mesh(tp=2, ep=2), [shared(), SEQUENCE, *recipes.data_parallel(over=("ep",))]),
        )


EP = shared()
ROWS_OF_EP = recipes.data_parallel(over=("ep",))
TAGGED = expert_loops.job(expert_loops.tagged)
BOUNDED = models.job(DECODERS["places and biases"], global_batch=8, precision="float64")


@each_case(
    ("work", "mesh", "directives", "message"),
    [
        (TAGGED, Mesh(ep=4), [EP, *ROWS_OF_EP], r"mixture 'layers.0.experts' has 6 experts, which 4 devices along ep"),
        (BOUNDED, Mesh(ep=3), [EP, *ROWS_OF_EP], "has 4 experts, which 3 devices along ep cannot share equally"),
        (BOUNDED, Mesh(tp=2, ep=2), [shared(over=("tp", "ep")), SEQUENCE, *ROWS_OF_EP], "experts over one axis"),
        (TAGGED, Mesh(ep=2, dp=2), [EP, *recipes.data_parallel()], "name ep in replicate, too"),
        (TAGGED, Mesh(ep=2, tp=2), [EP, EP, *ROWS_OF_EP], "shares the same already, over ep"),
        (TAGGED, Mesh(ep=2, tp=2), [EP, piper.shard(where(), cut=True), *ROWS_OF_EP], "only one of the two"),
        (TAGGED, Mesh(ep=2, tp=2), [shared(over="tp+ep"), piper.shard(where()), *ROWS_OF_EP], "have the same tokens"),
        (TAGGED, Mesh(tp=2), [EP, SEQUENCE], "has no ep, so nothing would be shared"),
    ],
)  # fmt: skip
def test_what_needs_no_capture_is_refused_without_one(
    work: piper.Job, mesh: Mesh, directives: list[Any], message: str
) -> None:
    def captured(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model is captured")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "traced_job", captured)
        with pytest.raises((CompileError, DirectiveError), match=message):
            piper.compile(work, Strategy(mesh, directives))
        with pytest.raises(AssertionError, match="is captured"):
            piper.compile(work, Strategy(Mesh(ep=2), [EP, *ROWS_OF_EP]))


MIXTURES = ("Qwen2-MoE", "DeepSeek-V3", "GPT-OSS")


@pytest.mark.long
@pytest.mark.parametrize("name", MIXTURES)
def test_decoders_share_tokens_beside_experts(name: str) -> None:
    work = models.job(DECODERS[name], global_batch=8, precision="float64", lr=0.01)
    strategy = Strategy(
        Mesh(tp=2, ep=2, pp=2),
        [
            *recipes.expert_parallel(), *recipes.tensor_parallel(sequence=True),
            *recipes.one_f_one_b(pp=2, microbatches=2), *recipes.data_parallel(over=("ep",), zero=1),
        ],
    )  # fmt: skip
    assert verify_strategy(work, strategy, steps=2).equal


def _directives(pp: int, zero: int) -> list[Any]:
    pipeline = recipes.one_f_one_b(pp=pp, microbatches=2) if pp > 1 else ()
    return [
        *recipes.expert_parallel(), *recipes.tensor_parallel(sequence=True), *pipeline,
        *recipes.data_parallel(over=("dp", "ep"), zero=zero),
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("family", families.FAMILIES)
def test_families_of_transformers_share_tokens_beside_experts(family: str) -> None:
    pytest.importorskip(
        "transformers", reason="Hugging Face's modules: transformers is not installed"
    )
    work = piper.Job(
        functools.partial(families.mixture, family), families.text, families.of_logits, expert_loops.optimizer,
        global_batch=8, precision=Precision(params="float64"), tokens_per_row=8,
    )  # fmt: skip
    for mesh, zero in (
        (Mesh(tp=2, ep=2), 0),
        (Mesh(tp=2, ep=2, pp=2), 1),
        (Mesh(tp=2, ep=4), 3),
        (Mesh(tp=2, ep=2, dp=2), 3),
    ):
        made = piper.compile(work, Strategy(mesh, _directives(mesh.size("pp"), zero)))
        verify(made.plan)
        found = piper.execute(made, steps=2, launcher="inline", gradients=True)
        microbatches = made.plan.microbatches
        right = parity.reference(
            work, replicas=made.plan.replicas, microbatches=microbatches, steps=2
        )
        parity.assert_parity(found, right, parity.FLOAT32)
        assert not lies(made.plan, found.memory)
