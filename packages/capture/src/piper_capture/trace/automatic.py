"""Make the smallest module opaque that holds an operation that no joint graph can hold, unless the user tagged it.

- Fused recurrent layers have no portable form, but can be traced: their module gets the coordinate `opaque`, as if it
  were tagged.
- Branches, loops and sizes that depend on values of tensors, and operators with functions as arguments (scans), cannot
  be traced: their module gets the coordinate, and the graph holds a call of the module in place of its operations
  (`written`). The model is then traced again.

Each such module is named in a warning, and by `piper explain`. Operations outside of a small module are refused: in the
model itself, in a module with most of the model, and in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from piper_capture.module.tags import ATTRIBUTE, OPAQUE, module_coords, outermost_entries
from piper_capture.torch_api import _torch
from piper_capture.trace.written_modules import (
    Leaves,
    Planned,
    own_tensors,
    pickled,
    planning,
)
from piper_capture.values.concrete import DROPPED, is_size, line_of, tensors_of
from piper_ir.ground.errors import CaptureError
from piper_ops import REFUSALS, as_written

torch.compiler.allow_in_graph(as_written)

RECURRENT = frozenset(t for t in REFUSALS if REFUSALS[t] is REFUSALS[torch.lstm])
"""The functions of fused recurrent layers."""
OF_FUNCTIONS = frozenset({"associative_scan", "scan", "cond", "while_loop", "map_impl", "map"})
"""The operators that take functions; their module runs as it is written."""
COMPILED_ONLY = frozenset({"cond"})
"""The operators among them that torch compiles even in code that runs as it is written."""
AS_PYTHON = (
    "torch compiles them when it runs, which no plan holds. Write `if` in place of it, in a small nn.Module of its "
    "own, which becomes an opaque region by itself; or compute both ways and choose with torch.where"
)
MOST = 0.5
"""The largest part of a model's weights, or of its layers, in a module that becomes opaque automatically."""

OUT_OF_PLACE = (
    "It stands in no module of its own, but in {place}. Put it into a small nn.Module, which then runs by autograd "
    "as it is (`piper explain` says so), or write it with operations of static shapes (torch.where, masks)."
)

OF_LOSS = (
    "It stands in the loss. Let the model compute it in a small nn.Module that gets the labels, which then runs by "
    "autograd as it is (`piper explain` says so): batch returns labels among the inputs, and Job has no loss. Or "
    "write it with operations of static shapes (torch.where, masks)."
)


@dataclass(frozen=True)
class Automatic:
    """Name modules that became opaque automatically, for one cause.

    Attributes:
        modules: their dotted names.
        kind: the name of their class.
        line: the user's line with the cause.
        cause: the reason.
        written: whether they run as they are written, so that the bytes of saved tensors depend on values.
    """

    modules: tuple[str, ...]
    kind: str
    line: str
    cause: str
    written: bool

    @property
    def text(self) -> str:
        """Return a note on these modules and the consequences, as one line."""
        many = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        said = (
            f"module {self.modules[0]!r} ({self.kind}){many}: opaque, run by autograd as it is, "
            f"since {self.cause}: {self.line}. "
        )
        said += (
            "Its backward is not split into input and weight gradient, and shard leaves it whole"
        )
        if self.written:
            said += (
                ". What autograd keeps depends on values; the plan has the bytes for random "
                "numbers. A parameter that no row "
            )
            said += "reaches gets a gradient of zeros"
        return f"{said}. piper.tag(model, ...) with opaque=True chooses another part"


@dataclass
class AutomaticRegions:
    """Hold the modules that became opaque automatically in one capture."""

    model: nn.Module
    found: list[Automatic] = field(default_factory=list)
    _planned: dict[str, Planned] = field(default_factory=dict)
    _first: CaptureError | None = None
    """The problem of the first module, before larger ones were tried; it is more specific."""

    def planning(self) -> AbstractContextManager[None]:
        """Return a context in which calls of the modules that run as they are written are planned."""
        return planning(self._planned)

    @property
    def problem(self) -> CaptureError | None:
        """Return the error of a module that cannot run as it is written; None if there is none."""
        problem = next((p.problem for p in self._planned.values() if p.problem is not None), None)
        return problem and (self._first or problem)

    def take_written(self, module: nn.Module | None, line: str, cause: str) -> str:
        """Let all modules of a module's class run as they are written; return why they cannot, "" if they can."""
        if (
            module is None
            or module not in set(self.model.modules())
            or module in set(self._holding())
        ):
            holds = module is not None and module in set(self.model.modules())
            if not holds:
                return OF_LOSS
            place = f"{type(module).__name__}, which holds most of the model"
            return OUT_OF_PLACE.format(place="the model itself" if module is self.model else place)
        named, kind = self._alike(module), type(module).__name__
        paths = {name: tuple(own_tensors(m)) for name, m in named.items()}
        texts = {name: pickled(name, m) for name, m in named.items()}
        for name, one in named.items():
            key = f"{name} runs as written"
            self._planned[key] = Planned(name, kind, texts[name])
            one.__class__ = _class_of(type(one), key, paths[name])
            self._mark(one, name)
        self.found.append(Automatic(tuple(named), kind, line, cause, True))
        return ""

    def take_larger(self) -> bool:
        """Let the parent of a module whose results no graph can hold run as it is written; return whether it can."""
        inner = next(
            (one for one in self._planned.values() if isinstance(one.problem, Leaves)), None
        )
        if inner is None or "." not in inner.name:
            return False
        self._first = self._first or inner.problem
        self._give_back(inner.kind)
        cause = next(one for one in self.found if one.written and inner.name in one.modules)
        around = self.model.get_submodule(inner.name.rpartition(".")[0])
        if isinstance(around, nn.ModuleList | nn.ModuleDict):  # containers have no forward
            around = self.model.get_submodule(inner.name.rpartition(".")[0].rpartition(".")[0])
        self.found.remove(cause)
        return not self.take_written(around, cause.line, cause.cause)

    def _give_back(self, kind: str) -> None:
        """Let the modules of a class that ran as they are written be traced again."""
        for key, one in list(self._planned.items()):
            if one.kind == kind:
                module = self.model.get_submodule(one.name)
                module.__class__ = type(module).__mro__[1]
                marks = {
                    name: mark
                    for name, mark in module.__dict__[ATTRIBUTE].items()
                    if name != OPAQUE
                }
                module.__dict__[ATTRIBUTE] = marks
                del self._planned[key]

    def take_opaque(self, module: nn.Module, line: str, cause: str) -> None:
        """Make all modules of a module's class opaque."""
        named = {
            name: m for name, m in self._alike(module).items() if OPAQUE not in module_coords(m)
        }
        for name, one in named.items():
            self._mark(one, name)
        self.found.append(Automatic(tuple(named), type(module).__name__, line, cause, False))

    @property
    def texts(self) -> tuple[str, ...]:
        """Return a warning for each class of modules that became opaque."""
        return tuple(one.text for one in self.found)

    def _mark(self, module: nn.Module, name: str) -> None:
        module.__dict__[ATTRIBUTE] = {**module.__dict__.get(ATTRIBUTE, {}), OPAQUE: (1, name)}

    def _alike(self, module: nn.Module) -> dict[str, nn.Module]:
        return {name: m for name, m in self.model.named_modules() if type(m) is type(module)}

    def _holding(self) -> Iterator[nn.Module]:
        """Yield the modules that are too large a part of the model."""
        sizes = {id(p): p.numel() for p in self.model.parameters()}
        entries = {id(e) for e in outermost_entries(self.model, set())}
        for module in self.model.modules():
            own = sum(sizes[id(p)] for p in module.parameters())
            layers = len(entries.intersection(map(id, module.modules())))
            if module is self.model or (
                own > MOST * sum(sizes.values()) and layers > max(1, MOST * len(entries))
            ):
                yield module

    def settle(self, graph: fx.Graph) -> None:
        """Write the planned calls into the graph, as text in place of the module's name."""
        for node in graph.find_nodes(op="call_function", target=as_written):
            name, own, args, kwargs = node.args
            planned = self._planned[str(name)]
            examples = fx.map_arg((own, args, kwargs), lambda n: n.meta["example_value"])
            node.args = (planned.call(*examples).text, own, args, kwargs)


@dataclass(frozen=True)
class Untraceable:
    """Name an operation of a graph that no joint graph can hold, with the reason.

    An operation that can only run `as_it_is` is refused here if no module can be opaque for it; others by the cut.
    """

    node: fx.Node
    text: str
    recurrent: bool = False
    as_it_is: bool = False

    def refusal(self, why: str) -> CaptureError:
        """Return the error for an operation whose module cannot run as it is written; `why` is the reason."""
        return CaptureError(f"{line_of(self.node)}: {self.text}. {why}")


def causes(graph: fx.Graph, opaque: Callable[[fx.Node], bool]) -> Iterator[Untraceable]:
    """Yield the operations of a trace that no joint graph can hold; nodes for which `opaque` holds may be recurrent."""
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" or not _used(node):
            continue
        if node.target in RECURRENT and not opaque(node):
            yield Untraceable(
                node,
                "a fused recurrent layer is one cuDNN kernel on CUDA and a loop on CPU",
                recurrent=True,
            )
        elif (
            isinstance(node.target, _torch.HigherOrderOperator)
            and node.target.name() in OF_FUNCTIONS
        ):
            text = f"{node.target.name()} takes functions, which are traced by themselves"
            untraceable = Untraceable(node, text, as_it_is=True)
            if node.target.name() in COMPILED_ONLY:
                raise untraceable.refusal(AS_PYTHON)
            yield untraceable
        elif _torch.is_transform(node.target):
            yield Untraceable(
                node, "a transform of torch.func, such as vmap, has operations of its own"
            )
        elif "fake_quant" in str(getattr(node.target, "__name__", "")):
            yield Untraceable(
                node, "fake quantization has kernels for real numbers alone", as_it_is=True
            )
        elif any(map(_torch.data_dependent, tensors_of(node))):
            yield Untraceable(node, "the shape of a tensor depends on values of tensors")
        elif _torch.data_dependent_size(value):
            yield Untraceable(node, "a Python number is made of values of tensors")


def _used(node: fx.Node) -> bool:
    """Return whether a result of an operation is used: a size, for example, may only be checked or printed."""
    users = [u for u in node.users if getattr(u.target, "__name__", "") not in DROPPED]
    return any(not is_size(user) or _used(user) for user in users)


def module_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return the innermost module whose forward made a node."""
    keys = [key.split("@")[0] for key in node.meta.get("nn_module_stack") or {}]
    return next((modules[key] for key in reversed(keys) if key in modules), None)


def _class_of(kind: Any, key: str, names: Sequence[str]) -> Any:
    """Return a class whose forward is a call of `as_written`."""
    paths = tuple(tuple(name.split(".")) for name in names)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = []
        for path in paths:
            value: Any = self
            for part in path:
                value = getattr(value, part)
            own.append(value)
        return as_written(key, own, args, kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
