"""Protect the requests of strategies to the capture (layers, shardings, policies), and refusals of contradictions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from packages.compiler.tests.compile_cases import layered
from piper_compiler import (
    CaptureRequest,
    capture_request,
    directive,
    partition,
    place,
    recompute,
    replicate,
    shard,
    site_field,
)
from piper_compiler.directives.prepare import Preparation
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import LONGEST_CHAIN, where
from piper_ir.program.program import Program

LAYERED = replace(layered(4), source="captured", chained=True)
BARE = replace(layered(4), source="captured", chained=False)


def asked(*directives: object, program: Program = LAYERED) -> CaptureRequest:
    return capture_request(Mesh(tp=2, cp=2), directives, program)  # type: ignore[arg-type]  # some have no type


def test_each_directive_adds_its_own() -> None:
    request = asked(
        shard(where(), over="tp"),
        partition(stages=2, layers="blocks.*"),
        recompute(where(), keep="products"),
        recompute(where(), keep="attention", group=2),
    )
    assert request.layers == ("blocks.*",)
    assert [(s.over, s.degree) for s in request.shardings] == [("tp", 2)]
    assert request.policies == tuple(sorted(request.policies)) and len(request.policies) == 3


def test_layers_are_asked_for_only_where_the_program_lacks_them() -> None:
    chosen = (asked(partition(stages=n), program=p).layers for n, p in ((4, LAYERED), (5, LAYERED)))
    assert tuple(chosen) == ((), LONGEST_CHAIN)
    assert asked(replicate(where(layer=0), over="tp"), program=BARE).layers == LONGEST_CHAIN
    named = (partition(stages=2, layers="blocks.*"), partition(stages=2))
    wanted = [asked(replicate(where(), zero=n), program=BARE).layers for n in (0, 1, 2, 3)]
    assert wanted == [(), (), (), LONGEST_CHAIN]  # parameters are gathered layer by layer
    by_name = (place(where(chunk="layer0"), on={"pp": 0}), replicate(where(), zero=3))
    assert asked(*by_name, program=BARE).empty  # its chunks stay as another directive names them
    for order in ((named[0], replicate(where(), zero=3)), (replicate(where(), zero=3), named[0])):
        assert asked(*order, program=BARE).layers == ("blocks.*",)
    assert asked(*named, program=BARE) == asked(*named[::-1], program=BARE)
    assert asked(program=BARE).empty


@pytest.mark.parametrize(
    ("directives", "message"),
    [
        ((shard(where()), shard(where(), over="cp")), "shares the same already, over tp"),
        ((shard(where(), cut=True), shard(where(), over="cp", index="tokens")), "cut=True beside"),
        ((partition(2, layers="a.*"), partition(2, layers="b.*")), "one set of layers"),
    ],
)
def test_contradictions_are_refused(directives: tuple[object, ...], message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        asked(*directives)


def test_a_directive_of_a_user_prepares_too() -> None:
    @directive
    @dataclass(frozen=True)
    class Twice:
        site: str = site_field()

        def prepare(self, request: CaptureRequest, seen: Preparation) -> CaptureRequest:
            assert seen.before == seen.directives[:1]
            return replace(request, policies=("products",))

    assert asked(recompute(where()), Twice()).policies == ("products",)
