"""Keep the functions of chunks, traced when they are asked for, and a program with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor, fx

from piper_capture.chunks.cut import Cut, Piece
from piper_capture.chunks.dispatch import Dispatch
from piper_capture.chunks.opaque import trace_opaque
from piper_capture.chunks.other_rows import check_rows
from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts import Agreed, Sharded, shared_joint
from piper_capture.steps.codegen import StepCode
from piper_capture.steps.joint import JointInput, TracedChunk, cut_chunk, trace_joint
from piper_capture.steps.kernels import counted
from piper_capture.steps.routed import Routed, RoutedForms, RoutedLayouts, route_of
from piper_capture.store.tiled_loss import tiled
from piper_capture.torch_api._torch_context import check_context
from piper_capture.trace.written_modules import blocks_of
from piper_capture.values.concrete import concrete_shape, tensors_of
from piper_capture.whole_batch.counting import CounterSpec
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import TensorSpec, bind
from piper_ir.program.layout import Sharding
from piper_ir.program.ops import KEEP_ALL, variant_name
from piper_ir.program.program import Chunk, Signature, Step


@dataclass(frozen=True)
class PassedOn:
    """Say how to trace the code of a chunk that passes values on: F copies them, I copies their gradients back.

    Nothing is kept for I, so that the code is the same under any policy of recomputation.

    Attributes:
        specs: of the values, affine in rows.
        needs_grad: which of them have gradients.
    """

    specs: tuple[TensorSpec, ...]
    needs_grad: tuple[bool, ...]

    def joint(self, rows: int) -> Joint:
        """Return the graph of forward and backward."""
        graph = fx.Graph()
        graph.output(tuple(graph.placeholder(f"value{k}") for k in range(len(self.specs))))
        inputs = [
            JointInput("value", example_tensor(spec, rows), needs_grad)
            for spec, needs_grad in zip(self.specs, self.needs_grad, strict=True)
        ]
        return trace_joint(fx.GraphModule(torch.nn.Module(), graph), inputs, self.needs_grad)


@dataclass(frozen=True)
class TraceSpec:
    """Say how to trace one code at any number of rows.

    Attributes:
        cut: the cut of the captured graph.
        specs: the specs of the piece's inputs, affine in rows.
        needs_grad: which inputs need a gradient.
        tangent_mask: which outputs receive a gradient.
        keep: the policy of recomputation.
        inside: for each policy in it the places in the piece's body of the operations for which it holds; None for all.
        reduce: the dtype of gradient accumulators; None for the dtype of their parameters.
        shardings: how devices share its work.
        base: the original code, if this is a form of it for devices that share it; else "".
        agreed: the agreement with other chunks on shared parameters and tables.
        params: for each input, its names in all chunks of the base.
        dispatch: the values that it exchanges with chunks of experts, or they with it.
        routed: how devices trade the rows of a dropless mixture inside of it.
        tiles: the tiles of tokens in which it computes logits and their loss.
        fused: the steps in which Inductor compiles groups of its operations.
    """

    cut: Cut
    piece: Piece
    specs: tuple[TensorSpec, ...]
    needs_grad: tuple[bool, ...]
    tangent_mask: tuple[bool, ...]
    keep: str = KEEP_ALL
    inside: tuple[tuple[int, ...], ...] | None = None
    reduce: torch.dtype | None = None
    shardings: tuple[Sharding, ...] = ()
    base: str = ""
    agreed: Agreed = field(default_factory=Agreed)
    params: tuple[tuple[str, ...], ...] = ()
    dispatch: Dispatch | None = None
    routed: Routed | None = None
    tiles: int = 1
    fused: tuple[Step, ...] = ()

    @property
    def origins(self) -> tuple[frozenset[str] | None, ...]:
        """Return the names of the captured operations for which each policy holds; None for all."""
        if self.inside is None:
            return (None,)
        body = [node.name for node in self.cut.body(self.piece)]
        return tuple(frozenset(body[k] for k in places) for places in self.inside)

    @property
    def routes(self) -> bool:
        """Return whether it sorts tokens by expert."""
        return route_of(self.cut.body(self.piece)) is not None

    @property
    def routed_tokens(self) -> int:
        """Return the tokens of a row that it sorts by expert; 0 if their number is no multiple of the rows."""
        route = route_of(self.cut.body(self.piece))
        assert route is not None
        chosen = route.args[1]
        assert isinstance(chosen, fx.Node)
        one, two = (concrete_shape(tensors_of(chosen)[0], rows, chosen)[0] for rows in (1, 2))
        return one if two == 2 * one else 0

    @cached_property
    def forms(self) -> RoutedForms:
        """Return the forms of a chunk with devices that trade rows inside of it."""
        assert self.routed is not None
        return RoutedForms(
            self.routed, partial(self.cut.module, self.piece), self._inputs_of_device
        )

    def opaque(self, rows: int) -> TracedChunk:
        """Return the steps of an opaque piece."""
        module, random = self.cut.module(self.piece, rows), self.cut.random(self.piece)
        blocks = [blocks_of(spec.shape) for spec in self.specs]
        return trace_opaque(
            module,
            self._inputs(rows),
            self.tangent_mask,
            blocks,
            random=random,
            keep=self.keep if self.inside is None or any(self.inside) else KEEP_ALL,
            reduce=self.reduce,
        )

    def joint(self, rows: int) -> Joint:
        """Return the graph of forward and backward on one device alone, which is the same under any policy."""
        if self.routed is not None:
            return replace(self.forms.joint(rows, self.tangent_mask), reduce=self.reduce)
        every = rows if self.dispatch is None else rows * self.dispatch.degree
        if every > rows:
            check_rows(self.cut.forward, every)
        module = self.cut.module(self.piece, every, self.dispatch)
        inputs, outputs = ((), ()) if self.dispatch is None else self.dispatch.exchanged
        traced = trace_joint(module, self._inputs(every), self.tangent_mask, self.reduce)
        traced = replace(traced, exchanged_inputs=inputs, exchanged_outputs=outputs)
        return traced if self.tiles == 1 else tiled(traced, every, self.tiles)

    def _inputs(self, rows: int) -> list[JointInput]:
        return [
            JointInput(slot.kind, self._example(k, spec, rows), needs_grad)
            for k, (slot, spec, needs_grad) in enumerate(
                zip(self.piece.slots, self.specs, self.needs_grad, strict=True)
            )
        ]

    def _inputs_of_device(self, rows: int) -> list[JointInput]:
        """Return the inputs with a device's tokens, where devices share them."""
        assert self.routed is not None
        return [
            replace(one, example=example_tensor(self.routed.own(spec), rows))
            if one.kind == "value"
            else one
            for one, spec in zip(self._inputs(rows), self.specs, strict=True)
        ]

    def _example(self, number: int, spec: TensorSpec, rows: int) -> Tensor:
        """Return a meta tensor like an input."""
        tensor = example_tensor(spec, rows)
        how = None if self.dispatch is None else self.dispatch.inputs[number]
        return (
            tensor
            if self.dispatch is None or how is None
            else tensor.new_empty(how.form(tensor.shape, self.dispatch.degree))
        )


def example_tensor(spec: TensorSpec, rows: int) -> Tensor:
    """Return a meta tensor of that spec."""
    shape = tuple(bind(d, rows) for d in spec.shape)
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")


Fused = dict[str, tuple[str, tuple[Step, ...]]]
"""The code id of a code with fusions -> that of the one without, and the steps with fusions; none if it has none."""


class CodeStore:
    """Map a code id to the functions of its steps, at a number of rows.

    The parameters' dtype is part of the code id, and so is a policy of recomputation (`variant`). The store traces a
    code when it is first used and keeps the result, so that one capture serves all strategies, microbatch sizes and
    widths.
    """

    def __init__(self) -> None:
        self._recipes: dict[str, TraceSpec] = {}
        self._passed: dict[str, PassedOn] = {}
        self._counters: dict[str, CounterSpec] = {}
        self._traced: dict[tuple[str, int], TracedChunk] = {}
        self._joints: dict[tuple[str, int], Joint] = {}
        self._sharded: dict[tuple[str, int], Sharded] = {}
        self._expected: dict[str, Chunk] = {}
        self._fused: Fused = {}

    def add(self, code: str, recipe: TraceSpec) -> None:
        self._recipes.setdefault(code, recipe)

    def add_passed(self, code: str, passed: PassedOn) -> None:
        """Let the store make the code of a chunk that passes values on."""
        self._passed.setdefault(code, passed)

    def add_counter(self, counter: CounterSpec) -> None:
        """Let the store make the code that counts in a batch."""
        self._counters.setdefault(counter.code, counter)

    def variant(
        self, code: str, keep: str, inside: tuple[tuple[int, ...], ...] | None = None
    ) -> str:
        """Return the code id of a code under a policy of recomputation.

        Each policy in it holds for the operations at the places `inside` of the piece's body; None for all.
        """
        name = variant_name(code, keep)
        if inside is not None:
            name += f" {hashlib.sha256(repr(inside).encode()).hexdigest()[:16]}"
        if code in self._passed:
            self.add_passed(name, self._passed[code])
        else:
            self._recipes.setdefault(name, replace(self._recipes[code], keep=keep, inside=inside))
        return name

    def shared(
        self,
        code: str,
        asked: tuple[Sharding, ...],
        agreed: Agreed,
        params: tuple[tuple[str, ...], ...] = (),
    ) -> str:
        """Return the code id of a code for devices that share its work.

        The names `params` count if indexes are named.
        """
        named = f" {params}" if any(s.index for s in asked) else ""
        ways = "".join(f" {s.over} {s.way}" for s in asked if s.way)
        digest = hashlib.sha256(
            f"{code} {asked!r} {agreed.text}{named}{ways}".encode()
        ).hexdigest()[:16]
        recipe = replace(
            self._recipes[code], shardings=asked, base=code, agreed=agreed, params=params
        )
        self._recipes.setdefault(digest, recipe)
        return digest

    def tiled(self, code: str, tiles: int) -> str:
        """Return the code id of a code that computes its logits and loss in tiles of tokens."""
        name = hashlib.sha256(f"{code} {tiles} tiles".encode()).hexdigest()[:16]
        self._recipes.setdefault(name, replace(self._recipes[code], tiles=tiles))
        return name

    def fused(self, code: str, steps: Iterable[Step]) -> str:
        """Return the code id of a code in which Inductor compiles groups of operations of some steps.

        A code that is a module of its own, or that only passes values on or counts, stays as it is.
        """
        wanted = tuple(sorted(steps))
        name = hashlib.sha256(f"{code} fused {''.join(wanted)}".encode()).hexdigest()[:16]
        if name not in self._fused:
            self._fused[name] = code, wanted if self._fuse(name, code, wanted) else ()
        return name if self._fused[name][1] else code

    def _fuse(self, name: str, code: str, steps: tuple[Step, ...]) -> bool:
        """Let the store make a code with fusions; return False if it has none."""
        recipe = self._recipes.get(code)
        if recipe is None or recipe.piece.opaque:
            return False
        self._recipes.setdefault(name, replace(recipe, fused=steps))
        return True

    def _unfused(self, code: str) -> str:
        """Return the code id of a code without its fusions."""
        return self._fused.get(code, (code, ()))[0]

    def dispatched(self, code: str, dispatch: Dispatch) -> str:
        """Return the code id of a code that exchanges values with chunks of experts, or is one."""
        digest = hashlib.sha256(f"{code} {dispatch!r}".encode()).hexdigest()[:16]
        self._recipes.setdefault(digest, replace(self._recipes[code], dispatch=dispatch))
        return digest

    def routed(self, code: str, how: Routed) -> str:
        """Return the code id of a code with devices that trade rows inside of it."""
        digest = hashlib.sha256(f"{code} {how.text}".encode()).hexdigest()[:16]
        self._recipes.setdefault(digest, replace(self._recipes[code], routed=how, base=code))
        return digest

    def routed_layouts(self, code: str) -> RoutedLayouts:
        """Return the layouts of the inputs of such a code."""
        return self._recipes[code].forms.layouts

    def recipe(self, code: str) -> TraceSpec:
        """Return the recipe for tracing a code."""
        return self._recipes[code]

    def layouts(self, code: str, rows: int) -> Sharded:
        """Return the graph of one of the devices that share a code, with the layouts of its tensors."""
        sharded = self._sharded.get((code, rows))
        if sharded is None:
            recipe = self._recipes[code]
            sharded = self._sharded[code, rows] = shared_joint(
                self.joint(recipe.base, rows), recipe.shardings, recipe.agreed, recipe.params
            )
        return sharded

    def joint(self, code: str, rows: int) -> Joint:
        """Return the graph of forward and backward, which policies and devices that share it have in common."""
        recipe = self._passed.get(code) or self._recipes[code]
        if isinstance(recipe, TraceSpec) and recipe.shardings:
            return self.layouts(code, rows).joint
        if (code, rows) not in self._joints:
            self._joints[code, rows] = recipe.joint(rows)
        return self._joints[code, rows]

    def expect(self, code: str, chunk: Chunk) -> None:
        """Record the ports and steps of this code at two rows and more, affine in rows, as the program has them."""
        self._expected[code] = chunk

    @property
    def made(self) -> tuple[dict[tuple[str, int], TracedChunk], dict[str, Chunk], Fused]:
        """Return all steps that were made so far, the chunks that are expected, and the codes with fusions.

        They can be pickled.
        """
        return dict(self._traced), dict(self._expected), dict(self._fused)

    def __iter__(self) -> Iterator[str]:
        yield from self._recipes
        yield from self._passed
        yield from self._counters

    def __len__(self) -> int:
        return len(self._recipes)

    def trace(self, code: str, rows: int) -> TracedChunk:
        """Return the chunk's steps at exactly `rows` rows, with plain integers as sizes."""
        if code not in set(self):
            raise CaptureError(
                f"no code {code!r} in this store; it holds {', '.join(self._recipes)}"
            )
        if rows < 1:
            raise CaptureError(f"a microbatch has {rows} rows on one device; it needs at least one")
        traced = self._traced.get((code, rows))
        if traced is None:
            check_context()
            counter = self._counters.get(code)
            traced = (
                counter.trace(rows)
                if counter is not None
                else self._made(code, self._passed.get(code) or self._recipes[code], rows)
            )
            self._traced[code, rows] = traced
        return traced

    def alone(self, code: str, rows: int) -> tuple[dict[str, TensorSpec], dict[Step, Signature]]:
        """Return the ports and steps of a code at one number of rows, from a trace there alone."""
        traced = self.trace(code, rows)
        steps = {
            step: replace(
                sig,
                cost=counted(sig.cost),
                overlaps=tuple(replace(o, beside=counted(o.beside)) for o in sig.overlaps),
            )
            for step, sig in traced.steps.items()
        }
        return dict(traced.ports), steps

    def _made(self, code: str, recipe: TraceSpec | PassedOn, rows: int) -> TracedChunk:
        if isinstance(recipe, PassedOn):
            return cut_chunk(recipe.joint(rows), KEEP_ALL)
        if recipe.piece.opaque:
            return recipe.opaque(rows)
        eager = self._unfused(code)
        base = eager if recipe.keep == KEEP_ALL else eager.partition(variant_name("", ""))[0]
        usual = self._traced.get((base, rows)) if base != code and not recipe.fused else None
        return cut_chunk(self.joint(base, rows), recipe.keep, recipe.origins, recipe.fused, usual)

    def get(self, code: str, rows: int) -> Mapping[Step, StepCode]:
        """Return the functions of the steps that are not empty; they fit `Captured.bind(rows)`.

        Raises CaptureError if the chunk at this number of rows is not the one that the program describes.
        """
        traced = self.trace(code, rows)
        expected = self._expected.get(self._unfused(code))
        if expected is not None and rows > 1:
            _check_as_planned(expected.bind(rows), traced, rows)
        return traced.code

    def export(self, codes: Iterable[str], rows: int) -> dict[str, dict[Step, StepCode]]:
        """Return the functions of these chunks for a worker, each code once; the result can be pickled."""
        return {code: dict(self.get(code, rows)) for code in dict.fromkeys(codes)}


def _check_as_planned(planned: Chunk, traced: TracedChunk, rows: int) -> None:
    for step, signature in planned.steps.items():
        actual = traced.steps[step]
        if (signature.reads, signature.writes, signature.accumulates) != (
            actual.reads,
            actual.writes,
            actual.accumulates,
        ):
            raise CaptureError(
                f"step {step} of a chunk reads {actual.reads} and writes {actual.writes} at {rows} rows, but reads "
                f"{signature.reads} and writes {signature.writes} at fewer rows; write the model so that its "
                f"operations do not depend on the rows"
            )
    for port, spec in planned.ports.items():
        if spec != traced.ports[port]:
            raise CaptureError(
                f"{port} of a chunk is {traced.ports[port]} at {rows} rows; {spec} follows from other numbers of "
                f"rows. A size does not grow by the same with each row, as where k of topk or a slice x[:k] is "
                f"more than the rows. Take microbatches of more rows, or write it with sizes that follow from the "
                f"rows"
            )
