"""Decide whether a trace of a nested compile region can be reused for another call, with torch's private API for it.

Dynamo keeps the traces of a region and looks at every call for one to reuse. Its own check takes most of a capture of
many layers: it clones every source that the trace read, and wraps every parameter of the layer. It also misses
differences that its guards check only once per run: tied weights, the grad mode, and changes that the model makes
between two calls. And it treats two traces as equal that differ in keywords or in omitted arguments
(`are_same_graph_modules`). Here each trace has a graph of its own, and is reused for another call only if

1. the function is the same, its arguments have the same structure, kinds, sizes, strides and dtypes, constants are
   equal, and the same arguments are one tensor;
2. each guard on a source that leads through the trace's arguments holds for the value there in the new arguments, and
   numbers are of one type and sign;
3. sources with one object in the trace have one object in the call, also the first source of an object that Dynamo
   met before the trace: it guards an object only there; tensors have the same sizes and dtypes, modules the same class
   and hooks, and they and other objects the same names of attributes in the same order;
4. torch is in the same state (grad mode, autocast, default dtype, function modes, coordinates of `region`), outside of
   other nested regions;
5. no object that existed before the capture changed since the trace, and none that the trace reads through its
   arguments changed before it.

Any other call is traced separately, and so is one that returns a list, which Dynamo would make a tuple. A model's
tensors that a call reads become inputs of the graph afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import (
    ListVariable,
    TensorVariable,
    UserFunctionVariable,
    higher_order_ops,
    invoke_subgraph,
)
from torch._dynamo.variables.base import (
    MutationType,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._guards import ChainedSource
from torch.fx import traceback
from torch.utils._ordered_set import OrderedSet

from piper_capture.torch_api import _torch
from piper_capture.torch_api._torch_arguments import properties_of, quickly, tensor_facts
from piper_capture.torch_api._torch_changes import Changes
from piper_capture.torch_api.attributes import HOOKS

EQUALITIES = frozenset(
    {
        "BOOL_MATCH",
        "CONSTANT_MATCH",
        "CONSTANT_SUBCLASS_MATCH",
        "DICT_KEYS_MATCH",
        "EQUALS_MATCH",
        "MAPPING_KEYS_CHECK",
    }
)
"""The guards that compare by ==, for which 1, 1.0 and True are equal, and so are 0.0 and -0.0."""

CONSTANTS = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""The types whose values are compared by value, not by identity. An enum of numbers is an object."""


@contextmanager
def checked_reuse(tensors: Collection[int]) -> Iterator[None]:
    """Let Dynamo reuse traces under this module's conditions. `tensors` are ids of the model's tensors."""
    reuse = _Reuse(
        frozenset(tensors), invoke_subgraph.save_reuse_entry, invoke_subgraph.stamp_out_subgraph
    )
    build, read = invoke_subgraph.build_reuse_condition, _Read()

    def condition(tx: Any, fingerprint: Any, sources: Any) -> Any:
        return build(
            tx,
            fingerprint,
            read.with_earlier(tx, sources, frozenset(fingerprint.arg_sources) - {None}),
        )

    with (
        _torch.in_place(VariableBuilder, read.noted()),
        _torch.in_place(invoke_subgraph, {"build_reuse_condition": condition}),
        _torch.in_place(invoke_subgraph, reuse.functions()),
        _torch.in_place(
            invoke_subgraph,
            {
                "build_fingerprint_with_pytree": quickly(
                    invoke_subgraph.build_fingerprint_with_pytree
                )
            },
        ),
        _torch.in_place(higher_order_ops, {"are_same_graph_modules": lambda *graphs: False}),
        _torch.in_place(SideEffects, reuse.changes.counted()),
        _torch.in_place(MutationType, reuse.changes.dated()),
    ):
        yield


class _Read:
    """Note the sources of all values that Dynamo reads.

    Dynamo does not record that a trace reads a value if the model had read it before.
    """

    def __init__(self) -> None:
        self._sources: dict[Any, None] = {}

    def noted(self) -> dict[str, Callable[..., Any]]:
        """Return a version of the method of VariableBuilder for every read that also notes the source."""
        build = VariableBuilder.__call__

        def call(builder: VariableBuilder, value: Any) -> Any:
            self._sources[builder.source] = None
            return build(builder, value)

        return {"__call__": call}

    def with_earlier(
        self, tx: Any, sources: Iterable[Any], roots: frozenset[Any]
    ) -> OrderedSet[Any]:
        """Return the sources of a trace, all earlier reads through its arguments, and the first source of each object.

        Dynamo puts the guards on an object, and on its attributes, only on the first of its sources.
        """
        guarded = (guard.originating_source for guard in tx.output.guards)
        earlier = (source for source in (*guarded, *self._sources) if _depends(source, roots))
        all_sources = OrderedSet([*sources, *earlier])
        met, known = tx.output.side_effects, dict[Any, Any]()
        values = [_value(tx, source, known) for source in all_sources if _depends(source, roots)]
        firsts = [met[value].source for value in values if value in met]
        return OrderedSet([*all_sources, *(first for first in firsts if first is not None)])


class _Reuse:
    """Replace the functions that reuse traces in Dynamo, for one capture."""

    def __init__(
        self, tensors: frozenset[int], save: Callable[..., None], stamp_out: Callable[..., Any]
    ) -> None:
        self.changes = Changes()
        self._tensors, self._save, self._stamp_out = tensors, save, stamp_out
        self._traces: list[_Trace] = []
        self._found: tuple[_Trace, _Values] | None = None

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the replacements by name in Dynamo's module."""
        return {
            "find_reuse_match": self.find,
            "save_reuse_entry": self.save,
            "stamp_out_subgraph": self.stamp_out,
        }

    def save(
        self, tx: Any, fn_var: Any, fingerprint: Any, *args: Any, condition: Any, **kwargs: Any
    ) -> None:
        """Keep a trace that Dynamo found free of side effects."""
        self._save(tx, fn_var, fingerprint, *args, condition=condition, **kwargs)
        self.changes.after_trace()
        if any(isinstance(argument, ListVariable) for argument in args):  # the return values
            return
        cache = tx.output.tracing_context.hop_dispatch_set_cache.get_cache(_torch.INVOKE)
        _, entry = cache.subgraph_reuse_cache[invoke_subgraph.get_fn_code(fn_var)][-1]
        moment = _Moment.now(tx, fn_var, self.changes.number)
        if moment is not None:
            self._traces += _trace(tx, fingerprint, condition, entry, moment, self._changed(tx))

    def find(self, tx: Any, fn_var: Any, fingerprint: Any) -> Any:
        """Return the trace that can be reused for a call, or None."""
        moment, changed = _Moment.now(tx, fn_var, self.changes.number), self._changed(tx)
        arguments = properties_of(fingerprint)
        for trace in self._traces:
            if (
                moment == trace.moment
                and trace.moment.state.check()
                and arguments == trace.arguments
            ):
                values = _Values(
                    tx, trace.elsewhere, zip(trace.sources, fingerprint.arg_sources, strict=True)
                )
                if trace.holds(values, changed):
                    self._found = trace, values
                    return trace.entry
        return None

    def _changed(self, tx: Any) -> list[Any]:
        """Return the objects that existed before the capture and have changed."""
        return [_value(tx, source, {}) for source in self.changes.sources]

    def stamp_out(self, tx: Any, fingerprint: Any, entry: Any) -> Any:
        """Add a call of the trace's graph.

        The meta of the call holds, under CAPTURED, the model's tensors that the region reads without having them as
        arguments; under MODULES it holds the modules that replace the trace's.
        """
        assert self._found is not None
        trace, values = self._found
        inputs = entry.body_gmod.graph.find_nodes(op="placeholder")
        kept, captured = [], []
        for position, (origin, node) in enumerate(
            zip(entry.subgraph_input_mapping, inputs, strict=True)
        ):
            value = (
                values(origin.source)
                if isinstance(origin, invoke_subgraph.LiftedCapturedSource)
                else None
            )
            if id(value) in self._tensors:
                captured.append((position, value, node.meta["example_value"]))
            else:
                kept.append(origin)
        result = self._stamp_out(tx, fingerprint, replace(entry, subgraph_input_mapping=kept))
        first = result if isinstance(result, TensorVariable) else result.items[0]
        [call] = first.as_proxy().node.all_input_nodes
        call.meta[_torch.CAPTURED] = captured
        call.meta[_torch.MODULES] = {key: values(source) for source, key in trace.modules}
        return result


class _Values:
    """Return the values at the sources of a trace after its arguments are replaced by another call's.

    `elsewhere` are the values that do not depend on the arguments; `arguments` are pairs of an argument's source in the
    trace and its source in the call.
    """

    def __init__(
        self, tx: Any, elsewhere: Mapping[Any, Any], arguments: Iterable[tuple[Any, Any]]
    ) -> None:
        self._tx, self._elsewhere = tx, elsewhere
        self._found = {
            **elsewhere,
            **{own: _value(tx, other, {}) for own, other in arguments if own is not None},
        }

    def __call__(self, source: Any) -> Any:
        value = self._found.get(source, self)
        return _value(self._tx, source, self._found) if value is self else value

    def include(self, objects: Iterable[Any]) -> bool:
        """Return whether one of the objects was read on the way from the arguments to the values of the trace."""
        met = {id(value) for source, value in self._found.items() if source not in self._elsewhere}
        return any(id(value) in met for value in objects)


@dataclass(frozen=True)
class _Moment:
    """Describe the state of Dynamo and torch that a trace may depend on without a guard.

    `state` is compared by its `check`.
    """

    output: Any
    function: Any
    changes: int
    modes: tuple[Any, ...]
    coordinates: Mapping[str, Any]
    state: Any = field(compare=False)

    @staticmethod
    def now(tx: Any, fn_var: Any, changes: int) -> _Moment | None:
        """Return the present state, or None within another region or a transform of torch.func."""
        output = tx.output
        nested = (
            output.current_tracer is not output.root_tracer
            or torch._C._functorch.peek_interpreter_stack() is not None
        )
        if nested or not isinstance(fn_var, UserFunctionVariable):
            return None
        modes = tuple(tx.symbolic_torch_function_state.mode_stack)
        return _Moment(
            output,
            fn_var.get_function(),
            changes,
            modes,
            dict(traceback.current_meta.get("custom") or {}),
            torch._C._dynamo.guards.GlobalStateGuard(),
        )


@dataclass(frozen=True)
class _Trace:
    """Hold a trace that may be reused for other calls.

    Attributes:
        entry: Dynamo's own record of it.
        moment: the state of Dynamo and torch at the trace.
        arguments: the properties of its arguments that it depends on without a guard.
        elsewhere: source -> value, for the sources that do not lead through an argument.
        guards: (source, check, expected) for the sources that lead through an argument.
        reads: all sources that it read, its arguments among them.
        objects: the identities and properties of the values there, from `_objects`.
        modules: (source, id) of the modules among them.
    """

    entry: Any
    moment: _Moment
    arguments: tuple[Any, ...]
    sources: tuple[Any, ...]
    elsewhere: Mapping[Any, Any]
    guards: tuple[tuple[Any, Callable[[Any, Any], bool], Any], ...]
    reads: tuple[Any, ...]
    objects: tuple[Any, ...]
    modules: tuple[tuple[Any, str], ...]

    def holds(self, values: _Values, changed: Sequence[Any]) -> bool:
        """Return whether conditions 2 and 3 hold, and 5 for the objects in `changed`."""
        try:
            guarded = all(
                check(values(source), expected) for source, check, expected in self.guards
            )
            return (
                guarded
                and self.objects == _objects(values, self.reads, self.sources)
                and not values.include(changed)
            )
        except Exception:  # of any kind, from a missing attribute or from a value of another type than a guard expects
            return False


def _trace(
    tx: Any, fingerprint: Any, condition: Any, entry: Any, moment: _Moment, changed: Sequence[Any]
) -> Iterator[_Trace]:
    """Yield the trace, or nothing if it depends on its arguments in a way that `_Values` cannot follow."""
    sources = tuple(fingerprint.arg_sources)
    roots = frozenset(s for s in sources if s is not None)
    guards = [
        (source, _check(handler, guard), expected)
        for source, handler, expected, guard in condition.guards
    ]
    lifted = [
        o.source
        for o in entry.subgraph_input_mapping
        if isinstance(o, invoke_subgraph.LiftedCapturedSource)
    ]
    reads = tuple(dict.fromkeys([*roots, *condition.traced_sources, *lifted]))
    depends = {
        source: _depends(source, roots) for source in (*reads, *(source for source, _, _ in guards))
    }
    if None in depends.values() or any(
        _depends(root, roots - {root}) is not False for root in roots
    ):
        return
    elsewhere = {source: _value(tx, source, {}) for source in reads if not depends[source]}
    values = _Values(tx, elsewhere, zip(sources, sources, strict=True))
    objects = _objects(values, reads, sources)
    if not values.include(changed):
        kept = tuple(guard for guard in guards if depends[guard[0]])
        modules = tuple(
            (source, str(id(values(source))))
            for source in reads
            if isinstance(values(source), nn.Module)
        )
        yield _Trace(
            entry,
            moment,
            properties_of(fingerprint),
            sources,
            elsewhere,
            kept,
            reads,
            objects,
            modules,
        )


def _check(handler: Any, guard: Any) -> Callable[[Any, Any], bool]:
    """Return a function that tells whether a guard holds for a value, given the value that it expects."""
    if guard.create_fn_name() not in EQUALITIES:
        check: Callable[[Any, Any], bool] = handler.eval_fn
        return check

    def exactly(value: Any, expected: Any) -> bool:
        actual = handler.get_metadata_fn(guard, value)
        return (
            bool(handler.eval_fn(value, expected))
            and type(actual) is type(expected)
            and repr(actual) == repr(expected)
        )

    return exactly


def _value(tx: Any, source: Any, known: dict[Any, Any]) -> Any:
    """Return the value at a source, and keep it and those on the way to it in `known`.

    It is `source.get_value`, which compiles the text of each step anew: a layer has 400 sources.
    """
    if source in known:
        return known[source]
    root = tx.output.root_tx
    names = {"G": root.f_globals, "L": root.f_locals}
    if not isinstance(source, ChainedSource):
        return source.get_value(names, {}, known)
    base = _value(tx, source.base, known)
    value = known[source] = eval(_code(source._name_template), names, {"base": base})
    return value


@cache
def _code(template: str) -> CodeType:
    return compile(template.format("base"), "<source>", "eval")


def _depends(source: Any, roots: frozenset[Any]) -> bool | None:
    """Return whether a source leads through one of `roots`; None if it mentions one in another way."""
    at = source
    while at not in roots:
        if not isinstance(at, ChainedSource):
            return None if any(root.name in source.name for root in roots) else False
        at = at.base
    return True


def _objects(values: _Values, reads: Iterable[Any], arguments: Iterable[Any]) -> tuple[Any, ...]:
    """Return an index per object, equal for one object, and its properties that no guard checks.

    For a module that is an argument all submodules count: Dynamo does not record that a trace reads a submodule if the
    model had read it before.
    """
    seen: dict[int, int] = {}
    kept = [values(source) for source in reads]  # kept alive, so that no id is used again
    passed = [values(source) for source in arguments if source is not None]
    kept += (
        inner for module in passed if isinstance(module, nn.Module) for inner in module.modules()
    )
    return tuple(
        None if type(v) in CONSTANTS else (seen.setdefault(id(v), len(seen)), _facts(v))
        for v in kept
    )


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tensor_facts(value)
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, type | FunctionType | ModuleType):
        return None  # these are compared by identity, a nested function by its code
    return tuple(getattr(value, "__dict__", ()))


def _module(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's class, the names of its attributes and submodules, and its hooks, which no guard checks."""
    own = vars(module)
    hooks = {name: [id(hook) for hook in own[name].values()] for name in HOOKS if own.get(name)}
    return type(module), tuple(own), tuple(module._modules), hooks
