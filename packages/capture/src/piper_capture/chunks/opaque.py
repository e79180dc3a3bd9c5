"""Make the steps of an opaque region, which autograd runs as the user wrote it: nothing is made functional or cut.

F runs the region's operations and keeps autograd's graph behind one port, `saved0`, whose bytes are the saved tensors
other than inputs, parameters and outputs. I reads the inputs and outputs that autograd saved, so that they live until
then, and the parameters, which need not live in between. I makes all gradients. Parameter gradients go to W (`iw`),
which adds them to the accumulators.

Under a policy of recomputation F keeps nothing, and R is a second forward that keeps autograd's graph. It makes outputs
once more, which count in `saved0` if autograd saves them.

Bytes, temporaries and kernels are measured: the steps run once on fake CPU tensors, by the code that will run for real.
If torch takes other kernels on a device, they may differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from piper_capture.steps.codegen import StepCode
from piper_capture.steps.draws import Drawn
from piper_capture.steps.joint import Interpreter, JointInput, TracedChunk, constants_of
from piper_capture.steps.kernels import launched, listed
from piper_capture.torch_api import _torch, _torch_joint
from piper_capture.trace.written_modules import equal_rows, weights_like
from piper_capture.values.concrete import line_of
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import TensorSpec, bind
from piper_ir.program.ops import HANDS_ON, KEEP_ALL
from piper_ir.program.program import Cost, Liveness, Signature, Step
from piper_ops import (
    Returned,
    as_written,
    backward_step,
    call_of,
    dtype_name,
    forward_step,
    is_draw,
    kernel_of,
    storage_key,
)

aten = torch.ops.aten


def trace_opaque(
    module: fx.GraphModule,
    inputs: Sequence[JointInput],
    tangent_mask: Sequence[bool],
    blocks: Sequence[Sequence[int]],
    *,
    random: bool,
    keep: str = KEEP_ALL,
    reduce: torch.dtype | None = None,
) -> TracedChunk:
    """Return the steps of `module`, whose placeholders are `inputs`; output k receives a gradient if tangent_mask[k].

    `blocks` has the number of entries per row in each dimension of each input, 0 if its size does not depend on rows.
    Under a policy of recomputation that does not keep all, F keeps nothing, whatever else the policy names. W adds to
    accumulators of the dtype `reduce`, or of the dtype of their parameters.

    Raises CaptureError for code that cannot be written as text (nested graphs), or cannot run on fake tensors.
    """
    constants = constants_of(module)
    body = _body(module, tuple(constants))
    again: Returned = "all" if keep.endswith(HANDS_ON) else "handle"
    trial = _Trial(
        module,
        inputs,
        tuple(tangent_mask),
        constants,
        blocks,
        again=None if keep == KEEP_ALL else again,
    )
    specs = [TensorSpec(tuple(i.example.shape), dtype_name(i.example.dtype)) for i in inputs]
    ports = {f"in{k}": spec for k, spec in enumerate(specs)}
    ports |= {f"out{k}": spec for k, spec in enumerate(trial.outputs)}
    values = [k for k in trial.used if inputs[k].kind == "value"]
    params = [k for k in trial.used if inputs[k].kind == "param"]
    comes = trial.tangents
    writes = tuple(f"out{k}" for k in range(len(trial.outputs)))
    steps: dict[Step, Signature] = {"I": Signature((), ()), "W": Signature((), ())}
    code: dict[Step, StepCode] = {}
    if trial.used:
        ports["saved0"] = TensorSpec((trial.saved,), "uint8")
        ports |= {f"tan{k}": trial.outputs[k] for k, c in enumerate(comes) if c}
        handed = {k: f"iw{j}" for j, k in enumerate(params)}
        ports |= {f"gin{k}": specs[k] for k in values} | {
            port: specs[k] for k, port in handed.items()
        }
        writes = writes if trial.again else (*writes, "saved0")
        reads = ("saved0", *(f"tan{k}" for k, c in enumerate(comes) if c), *trial.kept)
        written = tuple(handed.get(k, f"gin{k}") for k in trial.used)
        steps["I"] = Signature(reads, written, (), trial.backward.cost(), trial.backward.liveness())
        used = [k in trial.used for k, i in enumerate(inputs) if i.needs_grad]
        code["I"] = StepCode(
            f"# step I\nfrom piper_ops.written.opaque import backward_step\n\nstep = backward_step({sum(comes)}, "
            f"{used}, {trial.params}{', zeros=True' if trial.real else ''})\n",
            {},
        )
        if params:
            steps["W"], code["W"] = _accumulate(params, [specs[k] for k in params], reduce)
    reads = tuple(f"in{k}" for k in range(len(inputs)))
    steps = {
        "F": Signature(reads, writes, (), trial.forward.cost(), trial.forward.liveness()),
        **steps,
    }
    wanted = [i.needs_grad for i in inputs]
    fixed = {f"constant{i}": value for i, value in enumerate(constants.values())}
    source = f"{body}\n\nstep = forward_step(body, {wanted}, {list(comes)}, [{', '.join(fixed)}]"
    whole = not (trial.again and trial.used)
    ends = {"F": "'all'" if whole else "'outputs'", "R": repr(again)}
    made_by = {
        step: StepCode(f"# step {step}\n{source}, {end}, {list(trial.params)})\n", fixed)
        for step, end in ends.items()
    }
    code = {"F": made_by["F"], **code}
    if not whole:
        written = (*writes, "saved0") if again == "all" else ("saved0",)
        steps["R"] = Signature(reads, written, (), trial.repeated.cost(), trial.repeated.liveness())
        code["R"] = made_by["R"]
    grads = tuple(k in trial.used for k in range(len(inputs)))
    return TracedChunk(ports, steps, code, comes, grads, random, trial.draws)


def _body(module: fx.GraphModule, constants: Sequence[str]) -> str:
    """Return the source of `body(*inputs, *constants)`, with its imports; every device in it is the one it runs on."""
    graph, env = fx.Graph(), {}
    nodes = list(module.graph.nodes)
    for node in (n for n in nodes if n.op == "placeholder"):
        env[node] = graph.placeholder(node.name)
    constant_nodes = {name: graph.placeholder(f"constant{i}") for i, name in enumerate(constants)}
    for node in nodes:
        if node.op == "get_attr":
            if str(node.target) not in constant_nodes:
                raise CaptureError(
                    f"{line_of(node)}: a function that is traced by itself (torch.autograd.Function, checkpoint, "
                    f"control flow) is not accepted in an opaque region; register it with torch.library, or remove "
                    f"opaque=True"
                )
            env[node] = constant_nodes[str(node.target)]
        elif node.op != "placeholder":
            env[node] = graph.node_copy(node, env.__getitem__)
    code = graph.python_code("self")
    text = (
        code.src.strip()
        .replace("def forward(self, ", "def body(")
        .replace("def forward(self)", "def body()")
    )
    imported = [_import(n, v) for n, v in sorted(code.globals.items())]
    lines = ["from piper_ops.written.opaque import forward_step", *imported]
    return "\n".join([*dict.fromkeys(filter(None, lines)), "", "", text, ""])


def _import(name: str, value: Any) -> str:
    """Return the line that defines a global of the generated code."""
    if value is torch.device:
        return f"def {name}(*_, **__):\n    return DEVICE"
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
    if name in ("inf", "nan"):
        return f"{name} = float({name!r})"
    if value is type(None):
        return ""
    home, inner = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(home, str) and inner.isidentifier():
        return f"from {home} import {inner} as {name}"
    raise CaptureError(
        f"an opaque region calls {name}, which cannot be imported by name in another process; define it at the top "
        f"of a module"
    )


@dataclass
class _Observed:
    """Hold the kernels, memory and random operations of one step that ran.

    Attributes:
        kernels: in the order of their launch.
        held: the additional bytes held at each op that allocates.
        draws: random operations.
    """

    kernels: list[Any] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    draws: list[Drawn] = field(default_factory=list)

    def cost(self) -> Cost:
        return listed(self.kernels)

    def liveness(self) -> Liveness:
        return Liveness((), (tuple(self.held),))


class _Watch(_torch.TorchDispatchMode):
    """Watch every op below autograd, and count the bytes of storages that ops make until they die.

    Of an operator that takes functions only the results are seen, and no kernels.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[Tensor], running: Callable[[], fx.Node | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._running = running
        self._known = {storage_key(t) for t in known}
        self._alive: dict[int, int] = {}
        self._base = self.live = 0
        self.observed = _Observed()

    def begin(self) -> _Observed:
        """Start another step; storages that are alive now do not count in it."""
        self._base, self.observed = self.live, _Observed()
        return self.observed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        seen = (
            isinstance(func, _torch.OpOverload) and func.namespace != "prim"
        )  # prim::device asks a tensor for its device
        if seen and (
            func._schema.is_mutable or not any(r.alias_info for r in func._schema.returns)
        ):
            self.observed.kernels.append(launched(func, args, result, kwargs or {}))
        if is_draw(func, args, kwargs):
            self._note(func, args, kwargs or {}, result)
        if sum([self._add(t) for t in _torch.pytree.tree_leaves(result) if isinstance(t, Tensor)]):
            self.observed.held.append(self.live - self._base)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note a random operation; only the first of a module that runs as it is, since values decide how many."""
        node = self._running()
        noted = {d.origin for d in self.observed.draws}
        if node is not None and not (node.target is as_written and node.name in noted):
            self.observed.draws.append(Drawn.of(node.name, func, args, kwargs, out))

    def _add(self, tensor: Tensor) -> bool:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._known or key in self._alive:
            return False
        self._alive[key] = storage.nbytes()
        self.live += storage.nbytes()
        weakref.finalize(storage, self._drop, key)
        return True

    def _drop(self, key: int) -> None:
        self.live -= self._alive.pop(key)


class _Trial:
    """Run F and I on fake tensors.

    Attributes:
        outputs: their specs.
        tangents: whether the gradient of output k is used.
        used: indexes of the inputs that get a gradient.
        again: the return value of a second forward before the backward, so that F keeps nothing; None without one.
        saved: bytes of saved tensors beside inputs and outputs; if the forward runs again, the second outputs count.
        kept: ports of inputs and outputs that the backward keeps or reads too.
        params: the index in `kept` of each parameter there, by input.
        forward: the observations of F.
        repeated: the observations of R.
        backward: the observations of I.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[JointInput],
        mask: Sequence[bool],
        constants: Mapping[str, Tensor],
        blocks: Sequence[Sequence[int]],
        *,
        again: Returned | None,
    ) -> None:
        self._module = module
        self._inputs, self._wanted, self.again = inputs, [i.needs_grad for i in inputs], again
        self.real = bool(module.graph.find_nodes(op="call_function", target=as_written))
        with nullcontext() if self.real else _torch_joint.fake_mode(), torch.device("cpu"):
            generator = torch.Generator().manual_seed(0)
            self._given = [
                self._example(i, b, generator) for i, b in zip(inputs, blocks, strict=True)
            ]
            fixed = {
                n: c if self.real else torch.empty(c.shape, dtype=c.dtype)
                for n, c in constants.items()
            }
            self._running: list[Interpreter] = []
            body = _interpreted(module, fixed, self._running)
            self._body = _drawing_alike(body) if self.real else body
            self.tangents, self.used = self._reached(mask)
            self.params: dict[int, int] = {}
            self.kept = self._kept()
            ports = {k: f"in{k}" for k, i in enumerate(inputs) if i.kind == "param"}
            self.params = {
                k: self.kept.index(port) for k, port in ports.items() if port in self.kept
            }
            with torch.no_grad(), _Watch([*self._given, *fixed.values()], self._node) as watch:
                self._measure(watch)

    def _example(
        self, given: JointInput, blocks: Sequence[int], generator: torch.Generator
    ) -> Tensor:
        shape, dtype = given.example.shape, given.example.dtype
        if not self.real:
            return torch.empty(shape, dtype=dtype)
        if given.kind in ("param", "buffer"):
            return weights_like(shape, dtype, generator)
        calls = self._module.graph.find_nodes(op="call_function", target=as_written)
        return equal_rows(
            shape, blocks, dtype, generator, min(call_of(str(n.args[0])).integers for n in calls)
        )

    def _reached(self, mask: Sequence[bool]) -> tuple[tuple[bool, ...], list[int]]:
        """Return which outputs' gradients are used, and which inputs get a gradient from them."""
        leaves = [
            t.detach().requires_grad_(w) for t, w in zip(self._given, self._wanted, strict=True)
        ]
        with torch.enable_grad():
            outputs = self._body(*leaves)
        if len(outputs) != len(mask):
            raise CaptureError(
                f"the opaque chunk has {len(outputs)} outputs but tangent_mask has {len(mask)} entries"
            )
        comes = [m and o.requires_grad for m, o in zip(mask, outputs)]
        ends = [o for o, c in zip(outputs, comes) if c]
        sources = {
            k: t for k, t in enumerate(leaves) if self._wanted[k]
        }  # a forward may ask for gradients of others
        if not ends or not sources:
            return (False,) * len(comes), []
        if self.real:  # other values take other paths
            return tuple(comes), list(sources)
        try:
            gradients = torch.autograd.grad(
                ends, list(sources.values()), [torch.empty_like(o) for o in ends], allow_unused=True
            )
        except (
            _torch.RUN_ERRORS
        ) as error:  # what autograd says of such a forward on a real device too
            raise CaptureError(
                f"{self._line()}: the backward of this opaque region fails: {error}"
            ) from error
        return tuple(comes), [k for k, g in zip(sources, gradients) if g is not None]

    def _node(self) -> fx.Node | None:
        """Return the operation that runs."""
        return self._running[-1].node if self._running else None

    def _line(self) -> str:
        return line_of(next(n for n in self._module.graph.nodes if n.op.startswith("call")))

    def _kept(self) -> list[str]:
        """Return the inputs and outputs that autograd keeps, and always the inputs whose gradient is wanted."""
        if not self.used:
            return []
        saved: list[Tensor] = []

        def pack(t: Tensor) -> Tensor:
            saved.append(t)
            return t

        with torch.no_grad(), saved_tensors_hooks(pack, lambda t: t):
            *results, _ = self._forward("all")
        keys = {storage_key(t) for t in saved}
        is_kept = [w or storage_key(t) in keys for t, w in zip(self._given, self._wanted)]
        inputs = [f"in{k}" for k, h in enumerate(is_kept) if h]
        return (
            inputs
            if self.again == "handle"
            else inputs + [f"out{k}" for k, t in enumerate(results) if storage_key(t) in keys]
        )

    def _forward(self, returns: Returned) -> list[Tensor]:
        return list(
            forward_step(self._body, self._wanted, self.tangents, (), returns, list(self.params))(
                list(self._given)
            )
        )

    def _measure(self, watch: _Watch) -> None:
        again = self.again if self.used else None
        self.forward = self.repeated = watch.begin()
        returned = self._forward("outputs" if again else "all")
        self.draws = tuple(self.forward.draws)
        results = returned[: len(self.tangents)]
        self.outputs = [TensorSpec(tuple(t.shape), dtype_name(t.dtype)) for t in results]
        kept = list(results)
        if again:
            self.repeated = watch.begin()
            returned = self._forward(again)
            kept += returned[:-1]
        self.saved = watch.live - sum(t.untyped_storage().nbytes() for t in kept)
        self.backward = _Observed()
        if self.used:
            tangents = [torch.empty_like(o) for o, c in zip(results, self.tangents) if c]
            used = [k in self.used for k, w in enumerate(self._wanted) if w]
            ports = {f"in{k}": t for k, t in enumerate(self._given)} | {
                f"out{k}": t for k, t in enumerate(results)
            }
            args = [returned.pop(), *tangents, *(ports[p] for p in self.kept)]
            self.backward = watch.begin()
            backward_step(len(tangents), used, self.params, zeros=self.real)(args)


GRADIENTS = (
    "Ask for them by torch.autograd.grad(y.sum(), x, create_graph=True) of an x that requires gradients "
    "(x.requires_grad_() of a copy), which runs as it is in a module of its own"
)


def _interpreted(
    module: fx.GraphModule, constants: Mapping[str, Tensor], running: list[Interpreter]
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the module as a function of its inputs, whose errors name the user's line; `running` is the latest run."""

    def body(*inputs: Tensor) -> tuple[Tensor, ...]:
        interpreter = Interpreter(module, constants)
        running[:] = [interpreter]
        try:
            return tuple(interpreter.run(*inputs))
        except _torch.RUN_ERRORS as error:
            where = (
                line_of(interpreter.node) if interpreter.node is not None else "an opaque region"
            )
            reason = str(error).strip().partition("\n")[0]
            if "saved tensor hooks" in reason:
                reason = f"gradients by torch.func (grad, vjp, jacrev, hessian). {GRADIENTS}"
            raise CaptureError(
                f"{where}: cannot run in an opaque region at capture: {reason}"
            ) from error
        finally:
            running.clear()  # it holds tensors, which would count as alive

    return body


def _drawing_alike(body: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that draws the same random numbers in each call: a branch on one is the same at any rows."""

    def seeded(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return body(*inputs)

    return seeded


def _accumulate(
    params: Sequence[int], specs: Sequence[TensorSpec], reduce: torch.dtype | None
) -> tuple[Signature, StepCode]:
    """Return the step W, which adds the gradients that I made to the accumulators."""
    gradients = [f"iw{j}" for j in range(len(params))]
    sums = [f"acc{j}" for j in range(len(params))]
    adds = "\n".join(f"    {a}.add_({g}); del {g}" for a, g in zip(sums, gradients))
    source = f"# step W\ndef step(args):\n    {', '.join([*gradients, *sums])}, = args\n    args.clear()\n{adds}\n    return ()\n"
    observed = _Observed()
    for spec in specs:
        like = torch.empty(
            tuple(bind(d, 0) for d in spec.shape), dtype=getattr(torch, spec.dtype), device="meta"
        )
        total = torch.empty_like(like, dtype=reduce)
        observed.kernels.append(kernel_of(aten.add_.Tensor, (total, like), total, {}))
    freed = Liveness(tuple(range(len(params))), ((),) * (len(params) + 1))
    return Signature(tuple(gradients), (), tuple(params), observed.cost(), freed), StepCode(source)
