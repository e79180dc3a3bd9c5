"""Every rule of an op is judged: what the op makes of parts is the parts of what it makes of the whole, or their sum.

The negative controls are rules that look right and are wrong; the same judge catches each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from packages.capture.tests import layout_calls, layout_calls_elements, layout_calls_moves
from packages.capture.tests.layout_judge import (
    Draw,
    Given,
    call_of,
    marks,
    of_call,
    wrong_parts,
    wrong_terms,
)
from piper_capture.layouts.loops import DimOf, Loops, OpCall
from piper_capture.layouts.rules import rules
from piper_capture.layouts.rules.letters import all_whole
from piper_capture.layouts.rules.rules_elementwise import elementwise
from piper_capture.torch_api._torch import OpOverload
from tests.helpers.cases import each_case

aten = torch.ops.aten
piper = torch.ops.piper
Rule = Callable[[OpCall], Loops]
TABLES = {
    "products": layout_calls.PRODUCTS, "attention": layout_calls.ATTENTION, "norms": layout_calls.NORMS,
    "losses": layout_calls.LOSSES, "experts": layout_calls.EXPERTS,
    "float8": layout_calls.FLOAT8,
    "views": layout_calls_moves.VIEWS, "parts": layout_calls_moves.PARTS,
    "reductions": layout_calls_moves.REDUCTIONS, "look-ups": layout_calls_moves.LOOKUPS, "made": layout_calls_moves.MADE,
    "elements": layout_calls_elements.FAMILIES, "single elements": layout_calls_elements.SINGLE,
}  # fmt: skip
CASES: dict[str, Given] = {
    name: given for table in TABLES.values() for name, given in table.items()
}


def found_wrong(call: OpCall) -> list[str]:
    return [*wrong_parts(call), *wrong_terms(call)]


def judged(table: Mapping[str, Given], seed: int) -> dict[str, list[str]]:
    """What is wrong with the cases of a table: their marks, parts or terms."""
    calls = {name: given.call(seed) for name, given in table.items()}
    wrong = {
        name: [f"{found}, not {table[name].parts}"]
        for name, c in calls.items()
        if (found := marks(c)) != table[name].parts
    }
    return wrong | {name: found for name, call in calls.items() if (found := found_wrong(call))}


@pytest.mark.long
@each_case("table", TABLES)
def test_an_op_on_parts_makes_the_parts_of_its_result(table: str) -> None:
    assert judged(TABLES[table], seed=0) == {}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
def test_other_sizes_and_numbers_are_alike(seed: int) -> None:
    assert judged(CASES, seed) == {}


def test_every_rule_is_judged() -> None:
    ops = {given.op for given in CASES.values()}
    assert len(CASES) == sum(map(len, TABLES.values()))
    assert not {str(op) for op in rules.RULES} - {str(op) for op in ops} - WITHOUT_NUMBERS
    assert len(ops & set(rules.RULES)) >= 60
    assert all(op in rules.RULES or rules.is_elementwise(op) for op in ops)


WITHOUT_NUMBERS = {
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.new_empty.default",
    "piper.float8_past_scale.default",  # predicted, not executed
}
"""The ops that leave nothing to compare."""


@each_case(
    "op",
    [
        aten.bernoulli.p,
        aten.rand_like.default,
        aten.as_strided.default,
    ],
)
def test_what_has_no_rule_is_computed_whole(op: OpOverload) -> None:
    arguments = {
        aten.bernoulli.p: (0.5,),
        aten.as_strided.default: ([6, 6], [6, 1]),
    }
    call = call_of(op, (Draw(0).f("66"), *arguments.get(op, ())), {})
    found = of_call(call)
    assert not found.known
    assert "=" not in marks(call) and "+" not in marks(call)


def test_a_result_that_a_mask_leaves_out_keeps_the_numbers_of_the_others() -> None:
    call = CASES["convolution gradient, weight of groups"].call()
    assert [tuple(r.shape) for r in call.results][::2] == [(0,), (0,)]
    assert call.results[1].shape == call.tensors[call.number("weight")].shape


def test_a_part_of_one_step_is_not_squeezed_away() -> None:
    call = call_of(aten.squeeze.dim, (Draw(0).f("62"), 1), {})
    assert marks(call) == "=- -> =-"


@each_case(
    ("shape", "given", "runs"),
    [
        ((10, 24), (2, 5, 4, 6), [(1, 2), (1, 2)]),
        ((2, 3, 8), (6, 2, 4), [(2, 1), (1, 2)]),
        ((4, 6), (6, 4), [(2, 2)]),
        ((5, 1, 3), (5, 3, 1), [(2, 1), (1, 2)]),
        ((), (1, 1), [(0, 2)]),
    ],
)
def test_a_view_loops_over_its_dimensions_in_the_shortest_runs(
    shape: tuple[int, ...], given: tuple[int, ...], runs: list[tuple[int, int]]
) -> None:
    """Heads that do not fit into the blocks of a recipe are left whole, and the rows beside them are not."""
    call = call_of(aten.view.default, (torch.zeros(shape), list(given)), {})
    assert [(len(a), len(b)) for a, b in of_call(call).loops.same] == runs


@each_case("reduce", ["integers", "booleans", "cast"])
def test_what_rounds_is_not_linear(reduce: str) -> None:
    d = Draw(0)
    calls = {
        "integers": call_of(aten.add.Tensor, (d.i("r", 9), d.i("r", 9)), {}),
        "booleans": call_of(aten.add.Tensor, (d.b("r"), d.b("r")), {}),
        "cast": call_of(aten._to_copy.default, (d.f("r"),), {"dtype": torch.float32}),
    }
    assert of_call(calls[reduce]).loops.linear == ()


def _edited(edit: Callable[[Loops], Loops]) -> Callable[[Rule], Rule]:
    return lambda rule: lambda call: edit(rule(call))


def _linear(*terms: int) -> Callable[[Rule], Rule]:
    return _edited(lambda loops: replace(loops, linear=(frozenset(terms),)))


def _freed(*dims: DimOf) -> Callable[[Rule], Rule]:
    """Leave to devices what must be whole: all of it, or some dimensions."""
    return _edited(
        lambda loops: replace(loops, whole=loops.whole - set(dims) if dims else frozenset())
    )


def _summed(*dims: DimOf) -> Callable[[Rule], Rule]:
    """Add up what must be whole: all of it, or some dimensions."""
    return _edited(
        lambda loops: replace(
            loops,
            whole=loops.whole - set(dims) if dims else frozenset(),
            summed=loops.summed | (set(dims) or loops.whole),
        )
    )


def _of(loops: Loops) -> Callable[[Rule], Rule]:
    return lambda rule: lambda call: loops


def _same(*pairs: tuple[DimOf, DimOf]) -> Any:
    return tuple(((a,), (b,)) for a, b in pairs)


def _swapped(loops: Loops) -> Loops:
    return replace(loops, same=tuple((a, b[::-1]) for a, b in loops.same))


_unmoved = _edited(lambda loops: Loops(loops.same, loops.summed, loops.whole, loops.linear))
CONVOLUTION_SUMS = Loops(
    _same((DimOf(0, 0), DimOf(-1, 0)), (DimOf(0, 1), DimOf(1, 1)), (DimOf(1, 0), DimOf(-1, 1)), (DimOf(2, 0), DimOf(1, 0))),
    summed=frozenset({DimOf(0, 1)}), whole=frozenset(DimOf(k, d) for k in (0, 1, -1) for d in (2, 3)),
)  # fmt: skip
WRONG: dict[str, tuple[str, Callable[[Rule], Rule]]] = {
    "mm's inner dimension is one of the result": ("mm, square", _of(Loops(_same((DimOf(0, 1), DimOf(-1, 1)))))),
    "a bias is added with each term": ("addmm", _summed()),
    "a convolution's bias is added with each term": ("convolution, bias", _of(CONVOLUTION_SUMS)),
    "heads lie in groups": ("attention", _edited(_swapped)),
    "gradients of keys are sums over heads in groups": ("attention gradient", _edited(_swapped)),
    "causal queries do not know their places": ("attention, causal", _freed(DimOf(0, 1))),
    "keys are terms of a sum": ("attention", _summed(DimOf(1, 1))),
    "a mean is a sum": ("mean, all", _summed()),
    "a loss's mean is a sum": ("cross_entropy, mean", _summed()),
    "a mean's gradient counts its own rows": ("cross_entropy gradient, mean", _freed()),
    "classes are apart": ("cross_entropy gradient", _freed()),
    "softmax along its dimension": ("softmax", _freed()),
    "a scan along its dimension": ("cumsum", _freed()),
    "a sum of numbers of the largest": ("argmax", _summed()),
    "a part of a slice": ("slice, part", _freed()),
    "a slice of parts": ("slice, block", _summed()),
    "a slice that does not move": ("slice, block", _unmoved),
    "a shape that does not shrink": ("view, split", _unmoved),
    "a norm over its own part": ("rms_norm_dgrad", _freed()),
    "channels of a group are apart": ("group_norm gradient, frozen", _freed()),
    "the shape of the whole weight": ("layer_norm_wgrad", _unmoved),
    "a table in parts": ("embedding", _summed()),
    "rows of experts are apart": ("grouped_mm", _of(Loops(_same((DimOf(0, 0), DimOf(-1, 0)))))),
    "experts are apart": ("grouped_mm", _of(Loops(_same((DimOf(1, 0), DimOf(2, 0))), summed=frozenset({DimOf(1, 0)})))),
    "a share's gradient of its own part": ("unroute gradient of shares", _of(Loops(linear=(frozenset({0, 2}),)))),
    "counts of parts": ("embedding gradient, by count", _summed()),
    "an added tensor with each term": ("scatter_add", _summed()),
    "a repeated part": ("repeat", _freed()),
    "both factors at once": ("mul", _linear(0, 1)),
    "both matrices at once": ("mm", _linear(0, 1)),
    "a divisor": ("div", _linear(1)),
    "a number added to each term": ("add of a scalar", _linear(0)),
    "one of two terms": ("add", _linear(0)),
    "a condition's other value": ("where, number", _linear(1)),
    "an activation": ("gelu", _linear(0)),
    "a padding that is not zero": ("constant_pad_nd, ones", _linear(0)),
}  # fmt: skip
"""A rule that is wrong, by what it says: the case that must catch it, and the rule made out of the right one."""

NEEDLESS: dict[str, tuple[str, Callable[[Rule], Rule]]] = {
    "all is whole": ("mm", lambda rule: all_whole),
    "gradients of keys are no sums over groups": (
        "attention gradient",
        _edited(lambda loops: replace(loops, summed=frozenset())),
    ),
    "a weight's gradient is no sum over rows": (
        "layer_norm_backward",
        _edited(lambda loops: replace(loops, summed=frozenset())),
    ),
    "a mask is whole": (
        "attention, full mask",
        _edited(lambda loops: replace(loops, whole=loops.whole | {DimOf(3, 1)})),
    ),
}
"""Rules that are right and computed whole where that is not needed."""


@each_case("what", WRONG)
def test_a_wrong_rule_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, made = WRONG[what]
    call = CASES[case].call()
    right: Any = rules.RULES.get(call.op, elementwise)
    monkeypatch.setitem(rules.RULES, call.op, made(right))
    assert found_wrong(call)


@each_case("what", NEEDLESS)
def test_a_rule_that_is_whole_without_need_is_caught(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, made = NEEDLESS[what]
    call = CASES[case].call()
    monkeypatch.setitem(rules.RULES, call.op, made(rules.RULES[call.op]))
    assert not found_wrong(call)
    assert marks(call) != CASES[case].parts
