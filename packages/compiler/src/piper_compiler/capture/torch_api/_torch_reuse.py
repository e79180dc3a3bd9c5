"""Decide when one trace of a nested compile region serves another call of it, with torch's private API for that.

Dynamo keeps the traces of a region and asks at every call whether one of them serves. Its own answer takes most of a
capture of many layers: it clones the sources of all that the trace read, and wraps every parameter of the layer. It
also does not see a difference in what its guards check only once per run: tied weights, the grad mode, and what the
model changes between two calls. And it calls two traces equal that differ in keywords or in omitted arguments
(`are_same_graph_modules`). Here each trace has a graph of its own, and serves another call only where

1. the function is the same, its arguments have the same structure, kinds, sizes, strides and dtypes, constants are
   equal, and the same arguments are one tensor;
2. each guard on what the trace read of its arguments holds for what stands there in the new ones, and numbers are of
   one type and sign;
3. of the objects that it reads, the same ones are one object, and what Dynamo had met in another place before stands
   there: Dynamo guards an object only in the first place where it meets it; tensors have the same sizes and dtypes,
   modules the same class and hooks, and they and other objects the same names of attributes in the same order;
4. torch is in the same state (grad mode, autocast, default dtype, function modes), outside of other nested regions;
5. nothing that existed before the capture changed since the trace, nor anything before that the trace reads of its
   arguments.

Any other call is traced by itself, and so is one that gives a list, of which Dynamo would make a tuple. A model's
tensors that a call reads become inputs of the graph afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import (
    ConstantVariable,
    ListVariable,
    TensorVariable,
    UserFunctionVariable,
    higher_order_ops,
    invoke_subgraph,
)
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.invoke_subgraph import InputTag
from torch._dynamo.variables.iter import IteratorVariable
from torch._guards import ChainedSource
from torch.utils._ordered_set import OrderedSet

from piper_compiler.capture.torch_api import _torch

HOOKS = frozenset(
    name
    for name, value in vars(nn.Module()).items()
    if "_hooks" in name and isinstance(value, dict)
)
"""The attributes of a module that hold its hooks: functions that run with its forward, its backward and its state."""

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
"""The types of values that are the same one where they are equal. An enum of numbers is an object."""


@contextmanager
def checked_reuse(tensors: Collection[int]) -> Iterator[None]:
    """Let Dynamo use traces again under the module's conditions. `tensors` are ids of the model's tensors."""
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
        _torch.in_place(higher_order_ops, {"are_same_graph_modules": lambda *graphs: False}),
        _torch.in_place(SideEffects, reuse.changes.counted()),
    ):
        yield


class _Read:
    """Note the sources of all that Dynamo reads.

    Dynamo does not say whether a trace reads what the model had read before it.
    """

    def __init__(self) -> None:
        self._sources: dict[Any, None] = {}

    def noted(self) -> dict[str, Callable[..., Any]]:
        """Return a noting version of the method of VariableBuilder through which every read goes."""
        build = VariableBuilder.__call__

        def call(builder: VariableBuilder, value: Any) -> Any:
            self._sources[builder.source] = None
            return build(builder, value)

        return {"__call__": call}

    def with_earlier(
        self, tx: Any, sources: Iterable[Any], roots: frozenset[Any]
    ) -> OrderedSet[Any]:
        """Return the sources of a trace, those that were read of its arguments so far, and where Dynamo first met each.

        The guards on an object, and on what it holds, are on the first of its sources alone.
        """
        guarded = (guard.originating_source for guard in tx.output.guards)
        earlier = (source for source in (*guarded, *self._sources) if _depends(source, roots))
        found = OrderedSet([*sources, *earlier])
        met, known = tx.output.side_effects, dict[Any, Any]()
        values = [_value(tx, source, known) for source in found if _depends(source, roots)]
        firsts = [met[value].source for value in values if value in met]
        return OrderedSet([*found, *(first for first in firsts if first is not None)])


class _Changes:
    """Count the changes of what existed before the capture.

    Once something new can be reached from there, changes of everything count.
    """

    def __init__(self) -> None:
        self.number = 0
        self._open = False
        self._sources: dict[Any, None] = {}

    def counted(self) -> dict[str, Callable[..., None]]:
        """Return counting versions of the methods of SideEffects through which every change goes that Dynamo sees."""
        store, mutate = SideEffects.store_attr, SideEffects.mutation

        def store_attr(effects: SideEffects, item: Any, name: str, value: Any, *rest: Any) -> None:
            self._count(
                item, makes_reachable=not isinstance(value, TensorVariable | ConstantVariable)
            )
            store(effects, item, name, value, *rest)

        def mutation(effects: SideEffects, var: Any) -> None:
            self._count(var, makes_reachable=True)
            mutate(effects, var)

        return {"store_attr": store_attr, "mutation": mutation}

    def objects(self, tx: Any) -> list[Any]:
        """Return the objects that existed before the capture and have changed."""
        return [_value(tx, source, {}) for source in self._sources]

    def _count(self, var: Any, makes_reachable: bool) -> None:
        existed = isinstance(var.mutation_type, AttributeMutationExisting | ValueMutationExisting)
        self.number += existed or (self._open and not isinstance(var, IteratorVariable))
        self._open |= existed and makes_reachable
        if existed:
            self._sources[var.source] = None


class _Reuse:
    """Replace the functions with which Dynamo uses traces again, for one capture."""

    def __init__(
        self, tensors: frozenset[int], save: Callable[..., None], stamp_out: Callable[..., Any]
    ) -> None:
        self.changes = _Changes()
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
        """Keep a trace that has no effects beside its results, as Dynamo found."""
        self._save(tx, fn_var, fingerprint, *args, condition=condition, **kwargs)
        if any(isinstance(argument, ListVariable) for argument in args):  # what the function gives
            return
        cache = tx.output.tracing_context.hop_dispatch_set_cache.get_cache(_torch.INVOKE)
        _, entry = cache.subgraph_reuse_cache[invoke_subgraph.get_fn_code(fn_var)][-1]
        moment = _Moment.now(tx, fn_var, self.changes.number)
        if moment is not None:
            self._traces += _trace(
                tx, fingerprint, condition, entry, moment, self.changes.objects(tx)
            )

    def find(self, tx: Any, fn_var: Any, fingerprint: Any) -> Any:
        """Return the trace that serves a call, or None."""
        moment, changed = _Moment.now(tx, fn_var, self.changes.number), self.changes.objects(tx)
        arguments = _arguments(fingerprint)
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

    def stamp_out(self, tx: Any, fingerprint: Any, entry: Any) -> Any:
        """Make a call of the trace's graph.

        The meta of the call holds, under CAPTURED, the inputs that are the model's tensors and that the region reads by
        itself; under MODULES it holds the modules that take the place of the trace's.
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
    """Return the values at the sources of a trace if its arguments are those of another call.

    `elsewhere` are the values that do not depend on the arguments; `arguments` are pairs of the source of the trace's
    argument and that of the call's.
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
        return _value(self._tx, source, self._found)

    def include(self, objects: Iterable[Any]) -> bool:
        """Return whether one of the objects was met on the way from the arguments to the values that were read."""
        met = {id(value) for source, value in self._found.items() if source not in self._elsewhere}
        return any(id(value) in met for value in objects)


@dataclass(frozen=True)
class _Moment:
    """Describe the state in which Dynamo traces, as far as a trace may depend on it without a guard.

    `state` is compared by its `check`.
    """

    output: Any
    function: Any
    changes: int
    modes: tuple[Any, ...]
    state: Any = field(compare=False)

    @staticmethod
    def now(tx: Any, fn_var: Any, changes: int) -> _Moment | None:
        """Return the present moment, or None within another region or transformation."""
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
            torch._C._dynamo.guards.GlobalStateGuard(),
        )


@dataclass(frozen=True)
class _Trace:
    """Hold a trace that may serve other calls.

    Attributes:
        entry: Dynamo's own record of it.
        moment: the state in which Dynamo traced it.
        arguments: what it depends on in its arguments without a guard.
        elsewhere: source -> value of what else it read.
        guards: (source, check, expected) on what it read of its arguments.
        reads: the sources of `elsewhere` and `guards`.
        objects: what `_objects` says of them.
        modules: (source, id) of those that are modules.
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
        """Return whether conditions 2 and 3 hold, and 5 for what changed before."""
        try:
            guarded = all(
                check(values(source), expected) for source, check, expected in self.guards
            )
            return (
                guarded
                and self.objects == _objects(values, self.reads, self.sources)
                and not values.include(changed)
            )
        except Exception:  # of whatever kind, from an attribute that is not there or another thing than a guard expects
            return False


def _trace(
    tx: Any, fingerprint: Any, condition: Any, entry: Any, moment: _Moment, changed: Sequence[Any]
) -> Iterator[_Trace]:
    """Yield the trace, or nothing where it depends on its arguments in a way that `_Values` cannot follow."""
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
            _arguments(fingerprint),
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
        found = handler.get_metadata_fn(guard, value)
        return (
            bool(handler.eval_fn(value, expected))
            and type(found) is type(expected)
            and repr(found) == repr(expected)
        )

    return exactly


def _value(tx: Any, source: Any, known: dict[Any, Any]) -> Any:
    root = tx.output.root_tx
    return source.get_value({"G": root.f_globals, "L": root.f_locals}, {}, known)


def _depends(source: Any, roots: frozenset[Any]) -> bool | None:
    """Return whether a source leads through one of `roots`; None where it mentions one in another way."""
    at = source
    while at not in roots:
        if not isinstance(at, ChainedSource):
            return None if any(root.name in source.name for root in roots) else False
        at = at.base
    return True


def _arguments(fingerprint: Any) -> tuple[Any, ...]:
    """Return what a trace depends on in a call's arguments without a guard; it is equal for calls that are alike."""
    nodes: dict[fx.Node, int] = {}
    found = [_argument(tag, vt, nodes) for tag, vt in fingerprint.flat_vts]
    return (
        fingerprint.treespec,
        fingerprint.has_unknown,
        tuple(s is not None for s in fingerprint.arg_sources),
        *found,
    )


def _argument(tag: Any, vt: Any, nodes: dict[fx.Node, int]) -> tuple[Any, ...]:
    if tag is InputTag.MODULE:
        return (tag,)
    if tag is InputTag.CONSTANT:
        return tag, type(vt.value), vt.value, repr(vt.value)
    node = vt.as_proxy().node
    same = nodes.setdefault(node, len(nodes))
    if tag is InputTag.SYMNODE:
        return tag, same, type(vt.sym_num), _size(vt.sym_num)
    return tag, same, vt.python_type(), _tensor(node.meta["example_value"])


def _objects(values: _Values, reads: Iterable[Any], arguments: Iterable[Any]) -> tuple[Any, ...]:
    """Return which of the objects are the same, and their properties as far as no guard checks them.

    For modules that are arguments all submodules count: Dynamo does not say which of those it runs that the model read
    before.
    """
    seen: dict[int, int] = {}
    kept = [values(source) for source in reads]  # alive, so that ids are theirs
    given = [values(source) for source in arguments if source is not None]
    kept += (
        inner for module in given if isinstance(module, nn.Module) for inner in module.modules()
    )
    return tuple(
        None if type(v) in CONSTANTS else (seen.setdefault(id(v), len(seen)), _facts(v))
        for v in kept
    )


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, type | FunctionType | ModuleType):
        return None  # these are compared by identity, a function of its own by its code
    return tuple(getattr(value, "__dict__", ()))


def _module(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's class, the names of its attributes and parts, and its hooks; it may have its own forward."""
    own = vars(module)
    hooks = {
        name: [id(hook) for hook in value.values()] for name, value in own.items() if name in HOOKS
    }
    return type(module), tuple(own), tuple(module._modules), hooks


def _tensor(tensor: Tensor) -> tuple[Any, ...]:
    sizes = (tuple(map(_size, tensor.shape)), tuple(map(_size, tensor.stride())))
    return type(tensor), *sizes, tensor.dtype, tensor.device, tensor.requires_grad


def _size(size: Any) -> Any:
    """Return a number, or the expression of a symbolic one: to compare symbols themselves would leave guards."""
    return size.node.expr if hasattr(size, "node") else size
