"""Programs without a model for the compiler's tests, layered or random DAGs with byte sizes; random strategies for
them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from types import ModuleType

from piper_compiler import (
    Directive,
    Strategy,
    Training,
    order,
    place,
    recipes,
    replicate,
    split,
    synthetic,
)
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.ground.sizes import Affine, TensorSpec
from piper_ir.program.program import (
    BatchTensor,
    Buffer,
    Chunk,
    Cost,
    Input,
    Liveness,
    Output,
    Param,
    Program,
    Signature,
    Step,
)

SCALAR = TensorSpec((), "float32")
SCHEDULES: dict[str, tuple[int, Callable[..., tuple[Directive, ...]]]] = {
    "gpipe": (1, recipes.gpipe),
    "one_f_one_b": (1, recipes.one_f_one_b),
    "pipeline": (1, recipes.pipeline),
    "interleaved": (2, recipes.interleaved),
    "looped_bfs": (2, recipes.looped_bfs),
    "zb_h1": (1, recipes.zb_h1),
    "zb_h2": (1, recipes.zb_h2),
    "interleaved_zb": (2, recipes.interleaved_zb),
    "zbv": (2, recipes.zbv),
}
"""The recipes that treat microbatches alike, with their stages per device."""


def layered(layers: int, params: int = 100, F: float = 3, I: float = 4, W: float = 2) -> Program:  # noqa: E741 - the field's name
    """A synthetic chain whose chunks have the coordinate layer and no stage."""
    program = synthetic(stages=layers, F=F, I=I, W=W, params=params)
    return replace(
        program,
        chunks=tuple(replace(c, coords={"layer": c.coords["stage"]}) for c in program.chunks),
    )


def frozen_first(stages: int, frozen: int = 1) -> Program:
    """A chain whose first stages train nothing and hence have no backward; the first stage after them has no input
    gradient."""
    program = synthetic(stages=stages, F=3, I=4, W=2, params=100)
    chunks = list(program.chunks)
    for s in range(frozen):
        forward = replace(chunks[s].steps["F"], writes=("out0",))
        output = replace(chunks[s].outputs[0], needs_grad=False)
        inputs = tuple(replace(i, needs_grad=False) for i in chunks[s].inputs)
        chunks[s] = replace(chunks[s], inputs=inputs, outputs=(output,), steps={"F": forward})
    after = chunks[frozen]
    first = replace(after.inputs[0], needs_grad=False)
    steps = {**after.steps, "I": replace(after.steps["I"], writes=("iw0",))}
    chunks[frozen] = replace(after, inputs=(first, *after.inputs[1:]), steps=steps)
    params = tuple(replace(p, trained=i >= frozen) for i, p in enumerate(program.params))
    return replace(program, chunks=tuple(chunks), params=params)


@cache
def users_place() -> Callable[..., Directive]:
    """A copy of `place`, as a user has it who copies its file and renames the class."""
    source = inspect.getsource(sys.modules[place.__module__]).replace(
        "class Place", "class PlaceCopy"
    )
    module = ModuleType("a_users_file")
    sys.modules["a_users_file"] = module  # as when the file is imported
    exec(compile(source, "a_users_file.py", "exec"), module.__dict__)
    made: Callable[..., Directive] = module.__dict__["PlaceCopy"]
    return made


@dataclass
class _Draft:
    """A chunk before it is known who reads its outputs."""

    stage: int
    sources: list[tuple[int, int]] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    outputs: int = 1
    trains: bool = False
    buffer: bool = False


class RandomProgram:
    """A program drawn from a seed: a DAG with skips, branches and several tensors per boundary, frozen chunks, shared
    parameters, batch tensors read in several places, buffers, workspace, and byte sizes that are all different."""

    def __init__(self, rng: Random, stages: int, buffers: bool = True) -> None:
        self.rng, self.stages, self.buffers = rng, stages, buffers
        self.drafts = [_Draft(s) for s in range(stages) for _ in range(rng.randint(1, 2))]
        self.params: dict[str, Param] = {}
        self.sizes = 0
        self.loss_kind = rng.choice(("mean", "mean", "sum"))
        self._connect()
        self._parameters()

    def _connect(self) -> None:
        read: set[tuple[int, int]] = set()
        for i, draft in enumerate(self.drafts):
            draft.outputs = self.rng.choice((1, 1, 2))
            if i:
                straight = (i - 1, self.rng.randrange(self.drafts[i - 1].outputs))
                draft.sources = [straight] if self.rng.random() < 0.8 else [self._any_before(i)]
                draft.sources += [
                    self._any_before(i) for _ in range(self.rng.choice((0, 0, 0, 1, 2)))
                ]
                if i == len(self.drafts) - 1:
                    loose = (
                        {(j, k) for j in range(i) for k in range(self.drafts[j].outputs)}
                        - read
                        - set(draft.sources)
                    )
                    draft.sources += sorted(loose)
                read.update(draft.sources)
        self.drafts[-1].outputs = 0

    def _any_before(self, i: int) -> tuple[int, int]:
        j = self.rng.randrange(i)
        return j, self.rng.randrange(self.drafts[j].outputs)

    def _parameters(self) -> None:
        frozen = self.rng.choice((0, 0, 0, 1, 2))
        for i, draft in enumerate(self.drafts):
            last = i == len(self.drafts) - 1
            trained = i >= frozen or last
            for k in range(self.rng.choice((0, 1, 1, 2)) if not last else 1):
                name = f"c{i}.p{k}"
                self.params[name] = Param(
                    name, TensorSpec((self.rng.randint(1, 300),), "float32"), trained=trained
                )
                draft.params.append(name)
            if self.rng.random() < 0.15 and self.params:
                draft.params.append(self.rng.choice(sorted(self.params)))
            draft.params = list(dict.fromkeys(draft.params))
            draft.trains = any(self.params[p].trained for p in draft.params)
            draft.trains |= any(self.drafts[j].trains for j, _ in draft.sources)
            draft.buffer = self.buffers and self.rng.random() < 0.1

    def tensor(self) -> TensorSpec:
        """A size like no other: 4 bytes times an affine number of elements."""
        self.sizes += 1
        return TensorSpec((Affine(self.sizes % 5, 16 + self.sizes),), "float32")

    def build(self) -> Program:
        specs = {(i, k): self.tensor() for i, d in enumerate(self.drafts) for k in range(d.outputs)}
        chunks = tuple(self._chunk(i, d, specs) for i, d in enumerate(self.drafts))
        used = {e.ref for c in chunks for e in c.inputs if e.kind == "buffer"}
        buffers = tuple(Buffer(n, TensorSpec((7,), "float32")) for n in sorted(used))
        trained = {c.inputs[k].ref for c in chunks for s in c.steps.values() for k in s.accumulates}
        params = tuple(replace(p, trained=p.name in trained) for p in self.params.values())
        batch = (
            BatchTensor("inputs", TensorSpec((Affine(0, 1), 3), "int64")),
            BatchTensor("targets", TensorSpec((Affine(0, 1),), "int64")),
        )
        return Program(chunks, params, buffers, batch, self.loss_kind)  # type: ignore[arg-type]  # one of the two literals

    def _chunk(self, i: int, draft: _Draft, specs: dict[tuple[int, int], TensorSpec]) -> Chunk:
        last = i == len(self.drafts) - 1
        inputs = [
            Input("value", f"c{j}:out{k}", specs[j, k], self.drafts[j].trains)
            for j, k in draft.sources
        ]
        if not draft.sources or self.rng.random() < 0.1:
            inputs.append(Input("batch", "inputs", TensorSpec((Affine(0, 1), 3), "int64")))
        if last:
            inputs.append(Input("batch", "targets", TensorSpec((Affine(0, 1),), "int64")))
        first_param = len(inputs)
        inputs += [
            Input("param", p, self.params[p].spec, self.params[p].trained) for p in draft.params
        ]
        if draft.buffer:
            inputs.append(Input("buffer", f"b{i}", TensorSpec((7,), "float32")))
        outputs = [
            Output("value", specs[i, k], needs_grad=draft.trains) for k in range(draft.outputs)
        ]
        if last:
            outputs.append(Output("loss", SCALAR, needs_grad=True))
            outputs += [Output("weight", SCALAR)] if self.loss_kind == "sum" else []
        if draft.buffer:
            outputs.append(Output("buffer", TensorSpec((7,), "float32"), f"b{i}", varies=False))
        ports = {f"in{k}": e.spec for k, e in enumerate(inputs)} | {
            f"out{k}": o.spec for k, o in enumerate(outputs)
        }
        tangents = [f"tan{k}" for k, o in enumerate(outputs) if o.needs_grad]
        ports |= {t: outputs[int(t[3:])].spec for t in tangents}
        accumulates = tuple(
            k for k in range(first_param, first_param + len(draft.params)) if inputs[k].needs_grad
        )
        steps = self._steps(inputs, len(outputs), tangents, accumulates, draft.trains, ports)
        return Chunk(f"c{i}", {"stage": draft.stage}, tuple(inputs), tuple(outputs), ports, steps)

    def _steps(
        self,
        inputs: list[Input],
        outputs: int,
        tangents: list[str],
        accumulates: tuple[int, ...],
        trains: bool,
        ports: dict[str, TensorSpec],
    ) -> dict[Step, Signature]:
        """F; with a backward also I (unless no input has a gradient) and W (unless nothing is trained)."""
        saved = tuple(f"saved{k}" for k in range(self.rng.randint(1, 3))) if trains else ()
        ports |= {s: self.tensor() for s in saved}
        everything = tuple(f"in{k}" for k in range(len(inputs)))
        forward = Signature(
            everything, (*(f"out{k}" for k in range(outputs)), *saved), cost=self._cost()
        )
        steps: dict[Step, Signature] = {"F": self._with_liveness(forward)}
        if not trains:
            return steps
        gradients = tuple(
            f"gin{k}" for k, e in enumerate(inputs) if e.kind == "value" and e.needs_grad
        )
        ports |= {g: inputs[int(g[3:])].spec for g in gradients}
        kept = tuple(
            f"in{k}"
            for k, e in enumerate(inputs)
            if e.kind in ("value", "param", "batch") and self.rng.random() < 0.3
        )
        split_at = self.rng.randint(0, len(saved))
        inner: tuple[str, ...] = ()
        if gradients:
            inner = ("iw0",) if accumulates else ()
            ports |= {p: self.tensor() for p in inner}
            steps["I"] = self._with_liveness(
                Signature((*saved, *tangents, *kept), (*gradients, *inner), cost=self._cost())
            )
        else:
            steps["I"] = Signature((), ())
        if accumulates:
            reads = (
                *saved[split_at:],
                *inner,
                *(tangents if self.rng.random() < 0.5 or not gradients else ()),
            )
            steps["W"] = self._with_liveness(Signature(reads, (), accumulates, cost=self._cost()))
        else:
            steps["W"] = Signature((), ())
        return steps

    def _cost(self) -> Cost:
        return Cost(seconds=float(self.rng.choice((0, 1, 1, 2, 3))))

    def _with_liveness(self, sig: Signature) -> Signature:
        """Half of the steps say what they hold while they run."""
        if self.rng.random() < 0.5 or not sig.reads:
            return sig
        consumed = self.rng.sample(range(len(sig.reads)), self.rng.randint(1, len(sig.reads)))
        segments = tuple(
            (Affine(self.rng.randint(0, 500), self.rng.randint(1, 200)),)
            for _ in range(len(consumed) + 1)
        )
        return replace(sig, liveness=Liveness(tuple(consumed), segments))


@dataclass(frozen=True)
class Case:
    """Everything that `compile_program` takes, drawn from a seed. `text` says what was drawn."""

    program: Program
    strategy: Strategy
    global_batch: int
    training: Training
    text: str


Group = tuple[str, int, int]
"""Phase, stage, microbatch."""


def random_case(
    seed: int, orders: tuple[str, ...] = ("default", "total", "partial", "gpipe", "1f1b")
) -> Case:
    """A program, placement, order, microbatch count and data parallelism. All legal: orders come from a random run."""
    rng = Random(seed)
    stages, m = rng.randint(1, 8), rng.randint(1, 6)
    kind, home = _placement(rng, stages, m)
    if rng.random() < 0.8:
        program = RandomProgram(rng, stages, buffers=kind != "double").build()
    else:
        program = _sized(synthetic(stages=stages, F=3, I=4, W=2, params=99), rng)
    p, dp = 1 + max(home.values()), rng.choice((1, 1, 2, 3))
    names = rng.choice((("", ""), ("", ""), ("out", "in"), ("comm", "comm")))
    directives: list[Directive] = [split(where(), microbatches=m)]
    if p > 1 or rng.random() < 0.5:
        directives += _places(home, stages, m, p, names)
    wanted = rng.choice(orders)
    directives += _orders(rng, wanted, program, home, stages, m)
    if dp > 1:
        bucket_mb = rng.choice((1e-5, 3e-4, 25))
        at = rng.randint(0, 1) * len(directives)
        directives.insert(
            at, replicate(where(), bucket_mb=bucket_mb, reduce=rng.choice(("", "sync")))
        )
    clip = rng.choice((None, 1.0))
    training = Training(group_of={q.name: rng.randint(0, 1) for q in program.params}, clip=clip)
    rows = rng.randint(1, 3)
    text = (
        f"seed {seed}: {stages} stages, m={m}, {kind} on {p} devices, order {wanted}, dp={dp}, "
        f"{program.loss_kind}, clip {clip}"
    )
    return Case(program, Strategy(Mesh(pp=p, dp=dp), directives), rows * m * dp, training, text)


def _sized(program: Program, rng: Random) -> Program:
    """A synthetic chain whose boundary values and gradients have bytes."""
    spec = TensorSpec((Affine(0, rng.randint(1, 400)),), "uint8")
    chunks = []
    for chunk in program.chunks:
        loss = chunk.outputs[0].kind == "loss"
        ports = {
            k: spec if k.startswith(("gin", "iw")) or (k in ("out0", "tan0") and not loss) else s
            for k, s in chunk.ports.items()
        }
        outputs = tuple(o if o.kind == "loss" else replace(o, spec=spec) for o in chunk.outputs)
        inputs = tuple(replace(i, spec=spec) if i.kind == "value" else i for i in chunk.inputs)
        ports |= {f"in{k}": i.spec for k, i in enumerate(inputs)}
        chunks.append(replace(chunk, inputs=inputs, outputs=outputs, ports=ports))
    return replace(program, chunks=tuple(chunks), hop=rng.choice((0.0, 1.0)))


def _placement(rng: Random, stages: int, m: int) -> tuple[str, dict[tuple[int, int], int]]:
    """(stage, microbatch) -> device; every device has something."""
    kind = rng.choice(("chain", "V", "loop", "random", "random", "double"))
    if kind == "V" and stages % 2 == 0:
        at: Callable[[int, int], int] = lambda s, i: min(s, stages - 1 - s)  # noqa: E731 - one of five alternatives
    elif kind == "loop":
        p = rng.randint(1, stages)
        at = lambda s, i: s % p  # noqa: E731 - one of five alternatives
    elif kind == "double" and m > 1:
        at = lambda s, i: s if i % 2 == 0 else stages - 1 - s  # noqa: E731 - one of five alternatives
    elif kind == "random":
        drawn = [rng.randrange(stages) for _ in range(stages)]
        numbers = {d: k for k, d in enumerate(dict.fromkeys(drawn))}
        at = lambda s, i: numbers[drawn[s]]  # noqa: E731 - one of five alternatives
    else:
        kind, at = "chain", lambda s, i: s
    return kind, {(s, i): at(s, i) for s in range(stages) for i in range(m)}


def _places(
    home: dict[tuple[int, int], int], stages: int, m: int, p: int, names: tuple[str, str]
) -> list[Directive]:
    out: list[Directive] = []
    for s in range(stages):
        by_device: dict[int, list[int]] = {}
        for i in range(m):
            by_device.setdefault(home[s, i], []).append(i)
        for device, mbs in by_device.items():
            selection = where(stage=s) if len(mbs) == m else where(stage=s, mb=tuple(mbs))
            out.append(place(selection, on={"pp": device}, send=names[0], recv=names[1]))
    return out


def _orders(
    rng: Random,
    wanted: str,
    program: Program,
    home: dict[tuple[int, int], int],
    stages: int,
    m: int,
) -> list[Directive]:
    if wanted == "default":
        return []
    run = _random_run(rng, program, stages, m, wanted)
    per_device: dict[int, list[Group]] = {}
    for group in run:
        per_device.setdefault(home[group[1], group[2]], []).append(group)
    out: list[Directive] = []
    for groups in per_device.values():
        for _ in range(2 if wanted == "partial" else 1):
            some = groups if wanted != "partial" else [g for g in groups if rng.random() < 0.5]
            if len(some) > 1:
                out.append(order(*(where(phase=phase, stage=s, mb=i) for phase, s, i in some)))
    return out


def _random_run(rng: Random, program: Program, stages: int, m: int, wanted: str) -> list[Group]:
    """All (phase, stage, microbatch) in a random order that the data allows; "gpipe" and "1f1b" prefer F and B."""
    stage_of = {c.id: c.coords["stage"] for c in program.chunks}
    feeds = {
        (stage_of[e.ref.split(":")[0]], c.coords["stage"], e.needs_grad)
        for c in program.chunks
        for e in c.inputs
        if e.kind == "value"
    }
    back = {
        c.coords["stage"]
        for c in program.chunks
        if any(not s.empty for k, s in c.steps.items() if k != "F")
    }
    in_turn = {
        c.coords["stage"] for c in program.chunks if any(o.kind == "buffer" for o in c.outputs)
    }
    waiting: dict[Group, set[Group]] = {}
    for i in range(m):
        for s in range(stages):
            waiting["F", s, i] = {("F", a, i) for a, b, _ in feeds if b == s and a != s}
            if s in in_turn and i:  # microbatches update a buffer in order
                waiting["F", s, i].add(("F", s, i - 1))
            if s in back:
                waiting["B", s, i] = {("F", s, i)} | {
                    ("B", b, i) for a, b, grad in feeds if a == s and b != s and grad
                }
    out: list[Group] = []
    while waiting:
        ready = [g for g, before in waiting.items() if not before]
        preferred = {"gpipe": "F", "1f1b": "B"}.get(wanted)
        group = rng.choice([g for g in ready if g[0] == preferred] or ready)
        out.append(group)
        del waiting[group]
        for before in waiting.values():
            before.discard(group)
    return out
