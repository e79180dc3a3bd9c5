"""What devices that share a layer save is what the literature says, and their sums are made in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
from torch import fx

import piper
from piper import Mesh, models
from piper_capture import Captured, capture, with_shardings
from piper_capture.steps import exchanges
from piper_capture.store.assemble import TRACE_ROWS
from piper_ir.program.layout import Sharding
from piper_ir.program.program import Chunk
from piper_ops.pointwise import collectives
from tests.helpers import shared_jobs


@dataclass(frozen=True)
class LayerShare:
    """Hold what one device has of a layer.

    Attributes:
        saved: bytes that live from F to the backward.
        statistics: bytes among them of numbers in float32 that a norm or an attention keeps of each token.
        flops: of all steps.
    """

    saved: int
    statistics: int
    flops: int

    @property
    def values(self) -> int:
        return self.saved - self.statistics


@cache
def captured(name: str) -> Captured:
    """Return the capture of a preset with one layer, which is what it is in the whole model."""
    sizes: Any = replace(models.preset(name), layers=1)
    job = models.job(sizes, global_batch=2)
    return capture(job.model, partial(job.batch, 0), job.loss, dtype=job.precision.compute_dtype)


def shared(name: str, degree: int, stream: str = "") -> LayerShare:
    """Return what each of `degree` devices has of a layer of a preset."""
    asked = [Sharding("tp", degree, (), stream)] if degree > 1 else []
    program = with_shardings(captured(name), asked).bind(1)
    return of_layer(next(c for c in program.chunks if c.id == "layer0"))


def of_layer(layer: Chunk) -> LayerShare:
    """Return what a device has of a layer whose sizes are integers."""
    ports = [layer.ports[name] for name in _kept(layer)]
    small = [spec for spec in ports if spec.dtype == "float32"]
    flops = sum(signature.cost.flops for signature in layer.steps.values())
    return LayerShare(sum(int(s.nbytes) for s in ports), sum(int(s.nbytes) for s in small), flops)


def _kept(layer: Chunk) -> Iterator[str]:
    """Yield the ports whose values live from F to the backward: what F saves, and the inputs that I and W read."""
    values = {f"in{k}" for k, given in enumerate(layer.inputs) if given.kind == "value"}
    read = {port for step in ("I", "W") for port in layer.steps[step].reads}
    yield from (name for name in layer.ports if name.startswith("saved") or name in values & read)


def published(name: str, degree: int, stream: str = "") -> float:
    """Return the bytes of a GPT's layer by table 2 of arXiv 2205.05198, without its masks of dropout.

    They are s b h (8 + 24 / t), and 32 s b h / t with sequence parallelism; statistics are not counted.
    """
    sizes = models.preset(name)
    factor = 32 / degree if stream else 8 + 24 / degree
    return factor * sizes.length * sizes.width


def source_of(stream: str) -> str:
    """The code of a layer's forward and backward on one of two devices."""
    made = shared_jobs.compiled("llama", Mesh(tp=2), [], stream=stream)
    assert made.code is not None
    code = next(c.code for c in made.plan.chunks if c.id == "layer1")
    return "".join(step.source for step in made.code.get(code, made.plan.rows).values())


def test_sums_over_devices_copy_nothing() -> None:
    """What is added up over the devices is a product that nothing else reads."""
    source = source_of("")
    assert source.count("EXCHANGE('all_reduce'") == 4
    assert "clone" not in source


def test_terms_that_are_needed_again_are_copied() -> None:
    graph = fx.Graph()
    term = graph.placeholder("x")
    copied, own = (
        exchanges.call(graph.call_function(op, (term, "tp", 2)), "x")
        for op in (collectives.all_reduce, collectives.all_reduce_)
    )
    assert "x.clone(" in copied and "clone" not in own


@pytest.mark.long
def test_a_layer_saves_what_korthikanti_count() -> None:
    """Table 2 of arXiv 2205.05198 without dropout: 276.8 MB on each of eight devices, and 100.7 MB with sequence
    parallelism; the difference is statistics, which it does not count."""
    whole = shared("gpt3-175b", 1)
    for stream, megabytes in (("", 276.8), ("tokens", 100.7)):
        found, formula = (
            shared("gpt3-175b", 8, stream),
            published("gpt3-175b", 8, stream),
        )
        assert formula == pytest.approx(megabytes * 1e6, rel=1e-3)
        assert found.values == formula
        assert found.saved == pytest.approx(formula, rel=2e-3)
    assert 8 * found.saved == whole.saved
    assert 8 * found.flops < 1.001 * whole.flops


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_devices_that_share_tokens_save_their_part(name: str) -> None:
    def saved(degree: int) -> LayerShare:
        directives = [piper.shard(piper.where(), stream="tokens")] if degree > 1 else []
        made = piper.compile(shared_jobs.job(name), piper.Strategy(Mesh(tp=degree), directives))
        return of_layer(next(c for c in made.plan.chunks if c.id == "layer1"))

    whole = saved(1)
    assert 2 * saved(2).saved == whole.saved > 0
    assert 4 * saved(4).saved == whole.saved


def test_a_plan_has_the_instructions_of_whole_layers() -> None:
    """What devices exchange is inside of the steps; gradients of whole parameters are equal, not terms of a sum."""

    def counted(degree: int) -> list[int]:
        directives = [piper.shard(piper.where())] if degree > 1 else []
        made = piper.compile(
            shared_jobs.job("llama"),
            piper.Strategy(
                Mesh(tp=degree, pp=2),
                [*directives, *piper.recipes.one_f_one_b(pp=2, microbatches=4)],
            ),
        )
        assert not any(bucket.over for bucket in made.plan.buckets)
        return sorted(len(role.program) for role in made.plan.roles)

    assert counted(2) == counted(1)


def test_a_bound_at_some_rows_builds_no_graph_at_others() -> None:
    """The placements at the first rows of a trace decide which parameters agree; no device runs that graph."""
    made = with_shardings(captured("llama3-8b"), [Sharding("tp", 8)], 5)
    first = made.code.layouts(made.program.chunks[1].code, TRACE_ROWS[0][0])
    assert first.summed(0) is not None and "joint" not in vars(first)
    assert "joint" in vars(made.code.layouts(made.program.chunks[1].code, 5))
