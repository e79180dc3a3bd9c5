"""Layers where people put them: which modules are taken, by themselves and by name; plans equal one device."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.captures import capturing
from piper.api.reference.verification import verify_strategy
from piper.views.explained.explain import explain
from piper_capture import Traced
from piper_capture.steps import joint
from piper_capture.store import codestore
from piper_ir.ground.errors import DirectiveError, SelectorError
from tests.helpers.capture_jobs import sgd
from tests.helpers.cases import each_case
from tests.helpers.layered_models import FOUND, WIDTH, Block, Listed, Stage, Whole


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)[rows.start : rows.stop] + step
    return x, x.sin()


def job(model: Callable[[], nn.Module]) -> piper.Job:
    return piper.Job(
        model, batch, F.mse_loss, sgd, global_batch=8, precision=piper.Precision(params="float64")
    )


def pipelined(pp: int = 2, *first: object, dp: int = 2) -> piper.Strategy:
    recipe = piper.recipes.one_f_one_b(pp=pp, microbatches=2)
    return piper.Strategy(
        piper.Mesh(pp=pp, dp=dp), (*first, *recipe, *piper.recipes.data_parallel())
    )


def stages_of(compiled: piper.Compiled) -> dict[str, int]:
    return {
        str(n.coords["chunk"]): int(n.coords["stage"])
        for n in compiled.graph.sequence
        if "chunk" in n.coords
    }


QUICK = (
    "sequential with dropout",
    "stages of stages",
    "reused with dropout",
    "repeated with dropout",
)
"""The cases that run in every test run; the others are long."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in FOUND]
)
def test_the_longest_chain_is_found_and_equals_one_device(name: str) -> None:
    model, said = FOUND[name]
    compiled = piper.compile(job(model), pipelined())
    assert f"layers: {said}" in explain(compiled)
    report = verify_strategy(job(model), pipelined())
    assert report.equal, report.text()


def test_lists_stay_what_they_were() -> None:
    """The program is that of a strategy that asks for no layers."""
    compiled = piper.compile(job(Listed), pipelined())
    plain = piper.compile(
        job(Listed), piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel())
    )
    assert compiled.program.key == plain.program.key
    assert "layers: 4, blocks.0, blocks.1, ... blocks.3 (entries of nn.ModuleList)" in explain(
        compiled
    )


@pytest.mark.long
def test_the_usual_layers_are_assembled_only_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that is one chunk without its chain is not traced forward and backward as one."""
    monkeypatch.setattr(capturing, "_CAPTURES", {})
    made = Mock(wraps=joint.trace_joint)
    monkeypatch.setattr(codestore, "trace_joint", made)
    chained = piper.compile(job(FOUND["dict"][0]), pipelined())
    (traced,) = capturing._CAPTURES.values()
    assert isinstance(traced, Traced) and traced.found is None
    calls = made.call_count
    plain = piper.compile(
        job(FOUND["dict"][0]), piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel())
    )
    assert traced.found is not None and plain.program.key != chained.program.key
    assert made.call_count > calls


@pytest.mark.long
def test_a_strategy_that_asks_for_no_layers_cuts_at_none() -> None:
    plain = piper.compile(
        job(FOUND["dict"][0]), piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel())
    )
    assert [c.id for c in plain.program.chunks] == ["root"]


def test_a_selection_by_layer_asks_for_layers() -> None:
    again = piper.recompute(piper.where(layer=1), "inputs")
    compiled = piper.compile(
        job(FOUND["dict"][0]),
        piper.Strategy(piper.Mesh(dp=2), (again, *piper.recipes.data_parallel())),
    )
    assert [c.id for c in compiled.program.chunks] == ["root", "layer0", "layer1", "root.1"]


@pytest.mark.long
def test_layers_by_name() -> None:
    stages = job(FOUND["stages of stages"][0])
    compiled = piper.compile(stages, pipelined(2, piper.partition(2, layers="layers.*")))
    assert (
        "layers: 3, layers.0, layers.1, layers.2 (named by partition(layers='layers.*'))"
        in explain(compiled)
    )
    named = pipelined(2, piper.partition(2, layers=("embed", "head.*")))
    report = verify_strategy(job(FOUND["dict"][0]), named)
    assert report.equal, report.text()


def test_a_name_that_matches_nothing_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        SelectorError,
        match=r"partition\(layers='block.*'\): no module matches 'block.\*'; the model has embed, ",
    ):
        piper.compile(job(Listed), pipelined(2, piper.partition(2, layers="block.*")))


def test_named_modules_that_do_not_run_are_refused() -> None:
    with pytest.raises(
        SelectorError,
        match=r"none of the modules that match runs .*blocks.0, blocks.1, .*\(4 Block\)",
    ):
        piper.compile(job(_WithSpare), pipelined(2, piper.partition(2, layers="spare")))


class _WithSpare(Listed):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


def test_a_model_without_a_chain_is_refused_with_the_way_out() -> None:
    alone = job(lambda: Whole(nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))).layers)
    with pytest.raises(
        DirectiveError,
        match=r"the model has no layers \(layers are entries of an nn.ModuleList that forward "
        r"calls, "
        r".*partition\(layers=...\)",
    ):
        piper.compile(alone, pipelined())


@pytest.mark.long
def test_a_chain_that_is_too_short_is_said() -> None:
    with pytest.raises(
        DirectiveError,
        match=r'5 layers; use at most 5 stages, or units="all", which has 7 \[partition condition '
        r"1",
    ):
        piper.compile(job(FOUND["stages of stages"][0]), pipelined(6))


def test_two_partitions_with_other_layers_are_refused() -> None:
    both = piper.partition(2, layers="blocks.*"), piper.partition(2, layers="head")
    with pytest.raises(
        DirectiveError,
        match=r"names others; one strategy has one set of layers \[partition condition 7",
    ):
        piper.compile(job(Listed), pipelined(2, *both))


def test_a_program_has_the_layers_that_it_was_captured_with() -> None:
    program = piper.compile(job(Listed), pipelined()).program
    with pytest.raises(DirectiveError, match=r"chosen when a model is captured.*compile a job"):
        piper.compile(program, pipelined(2, piper.partition(2, layers="blocks.*")), global_batch=8)


@each_case("layers", [3, "", ("blocks.*", 1)])
def test_layers_are_patterns(layers: object) -> None:
    with pytest.raises(
        DirectiveError,
        match=r"the pattern of a name of modules, or a tuple .*\[partition condition 7",
    ):
        piper.compile(job(Listed), pipelined(2, piper.partition(2, layers=layers)))  # type: ignore[arg-type]  # on purpose


# units


def interleaved(**more: object) -> piper.Strategy:
    recipe = piper.recipes.interleaved(pp=2, microbatches=2)
    return piper.Strategy(
        piper.Mesh(pp=2, dp=2),
        (piper.partition(4, **more), *recipe, *piper.recipes.data_parallel()),
    )  # type: ignore[arg-type]  # as given


@pytest.mark.long
def test_two_layers_make_four_chunks_of_an_interleaved_schedule() -> None:
    two = job(lambda: Listed(2))
    assert stages_of(piper.compile(two, interleaved(units="all"))) == {
        "root": 0,
        "layer0": 1,
        "layer1": 2,
        "root.1": 3,
    }
    report = verify_strategy(two, interleaved(units="all"))
    assert report.equal, report.text()


@each_case(
    ("units", "at", "stages"),
    [
        ("embedding", (1,), [0, 1, 1, 1, 1]),
        ("embedding", "even", [0, 0, 1, 1, 1]),
        ("head", (3,), [0, 0, 0, 0, 1]),
        ("head", "even", [0, 0, 0, 1, 1]),
        ("all", (4,), [0, 0, 0, 0, 1]),
        ("layers", (1,), [0, 0, 1, 1, 1]),
    ],
)
def test_boundaries_count_units(units: str, at: object, stages: list[int]) -> None:
    compiled = piper.compile(
        job(lambda: Listed(3)), pipelined(2, piper.partition(2, at=at, units=units))
    )  # type: ignore[arg-type]  # as given
    assert list(stages_of(compiled).values()) == stages


def test_by_cost_settles_to_the_same_stages() -> None:
    costly = pipelined(3, piper.partition(3, at="cost", units="all"), dp=1)
    compiled = piper.compile(job(lambda: Listed(3)), costly)
    item = costly.directives[0]
    assert isinstance(item, piper.partition)
    fixed = item.with_fixed_stages(
        piper.compile(job(lambda: Listed(3)), piper.Strategy(piper.Mesh(), ())).graph
    )
    assert isinstance(fixed.at, tuple)
    again = piper.compile(job(lambda: Listed(3)), pipelined(3, fixed, dp=1))
    assert stages_of(again) == stages_of(compiled)


@pytest.mark.parametrize(
    ("model", "units", "said"),
    [
        (
            Listed,
            "heads",
            r"units='heads'; one of 'layers', 'embedding', 'head', 'all' is accepted \[partition "
            r"condition 6",
        ),
        (
            lambda: Stage(3).blocks,
            "embedding",
            r"nothing stands before the first layer, so units='embedding' has no unit for it",
        ),
    ],
)
def test_units_that_are_not_there_are_refused(
    model: Callable[[], nn.Module], units: str, said: str
) -> None:
    with pytest.raises(DirectiveError, match=said):
        piper.compile(job(model), pipelined(2, piper.partition(2, units=units)))


# all the rest


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x * 2).tanh())


def test_a_tag_for_all_the_rest() -> None:
    tagged = job(lambda: piper.tag(_Pair(), {"second": dict(stage=1), "...": dict(stage=0)}))
    compiled = piper.compile(tagged, pipelined())
    assert [c.coords for c in compiled.program.chunks] == [{"stage": 0}, {"stage": 1}]
    report = verify_strategy(tagged, pipelined())
    assert report.equal, report.text()


def test_regions_without_a_stage_beside_others_are_named_with_their_lines() -> None:
    tagged = job(lambda: piper.tag(_Pair(), {"second": dict(stage=1)}))
    with pytest.raises(
        DirectiveError,
        match=r'stage1 \(stage 1\), but root.F has none; .*"\.\.\.": dict\(stage=0\)',
    ) as caught:
        piper.compile(tagged, pipelined())
    line = _Pair.forward.__code__.co_firstlineno + 1
    assert f"root begins at {__file__}:{line} " in str(caught.value)
