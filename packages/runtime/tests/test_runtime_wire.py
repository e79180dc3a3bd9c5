"""Messages between ranks come back as they were, and run no code, whoever has sent them."""

from __future__ import annotations

import ast
import inspect
import io
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from packages.runtime.tests.chains import chain, run
from piper_ir.ground.errors import ExecutionError
from piper_runtime.checkpoint.rank_file import SaveDone
from piper_runtime.engine.memory import MemoryPoint, MemoryRecord
from piper_runtime.launch.ground.protocol import Failure
from piper_runtime.launch.ground.report import RankReport, StepDone
from piper_runtime.launch.torchrun import torchrun
from piper_runtime.launch.worker import mail as mailing
from piper_runtime.launch.worker import wire
from piper_runtime.launch.worker.mail import Mail, Patient
from piper_runtime.launch.worker.timed_rank import EmulationReport
from piper_runtime.profile.measure_messages import MessageSample
from piper_runtime.profile.profiler import ProfileReport
from piper_runtime.weights.dcp_tensors import SavedBox
from tests.helpers.cases import each_case

STEP = StepDone(3, 0.1, 1 / 3, {"loss": {0: 0.1, 7: -0.0}, "weight": {}}, 0.25)
MESSAGES: list[Any] = [
    None,
    "done",
    STEP,
    Failure("HangError", "rank 0 waits\n  über alles", "", (1,)),
    EmulationReport(started=1.0, held_up=[0.5], finished=[2.0]),
    ProfileReport(
        parts={("code", "F", 2): [0.5]},
        messages=[MessageSample("p2p", 4, (0, 1), (0.1, 0.2), (), (0.0, 0.3))],
        resident=[(1, 2)],
    ),
    SaveDone(
        1,
        3,
        9,
        [SavedBox("model.w", "float32", (2, 3), (1, 0), (1, 3), "__1_0.distcp", 0, 9)],
        {"optim.state.w.seen": 3},
        {"w": 3.0},
        ("AdamW", None),
        [{"lr": 0.1, "betas": [0.9, 0.99]}],
    ),
    RankReport(
        memory=MemoryRecord(9, 1, 3, (MemoryPoint(0, 4, 5),)),
        spans=[(0, 0.5, 1.5)],
        waits=[(0, 0.1, 0.2)],
    ),
]


@each_case("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_comes_back_as_it_was(message: Any) -> None:
    assert wire.decode(wire.encode(message)) == message


def test_floats_come_back_to_the_bit() -> None:
    for number in (math.pi, 1e-310, -0.0, math.inf, 2**53 + 1):
        assert repr(wire.decode(wire.encode(number))) == repr(number)
    assert math.isnan(wire.decode(wire.encode(math.nan)))


def test_tensors_come_back_in_their_dtype() -> None:
    sent = {
        "a": torch.randn(3, 2, dtype=torch.bfloat16),
        "b": torch.tensor([1 + 2j]),
        "c": torch.zeros((), dtype=torch.int64),
    }
    found = wire.decode(wire.encode(RankReport(states=sent, gradients=[{"a": sent["a"]}])))
    assert found.states.keys() == sent.keys() and torch.equal(found.gradients[0]["a"], sent["a"])
    assert all(
        torch.equal(found.states[n], t) and found.states[n].dtype is t.dtype
        for n, t in sent.items()
    )


def test_a_report_of_a_real_run_comes_back() -> None:
    plan, job = chain(pp=2)
    found = run(plan, job, trace=True, memory=True)
    for rank, states in found.rank_states.items():
        report = RankReport(states=dict(states), memory=found.memory[rank], finished=found.step_s)
        again = wire.decode(wire.encode(report))
        assert again.memory == report.memory and all(
            torch.equal(again.states[n], t) for n, t in states.items()
        )


class Evil:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "ran")


def framed(text: str, rest: bytes = b"") -> bytes:
    return len(text).to_bytes(wire.LENGTH, "big") + text.encode() + rest


@each_case("how", ["alone", "as tensors", "in a file of torch"])
def test_a_pickle_is_no_message_and_runs_nothing(how: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    blob = pickle.dumps(Evil(mark))
    file = io.BytesIO()
    torch.save([Evil(mark)], file)
    data = {
        "alone": blob,
        "as tensors": framed("null", blob),
        "in a file of torch": framed("null", file.getvalue()),
    }[how]
    mail = Mail(dist.HashStore(), 0, Patient("store"), "the store", 10.0)
    mail.store.set("0/1/0", data)
    with pytest.raises(
        ExecutionError, match=r"not one of Piper's .*does nobody else reach MASTER_PORT"
    ):
        mail.visit([1], [])
    assert not mark.exists()
    pickle.loads(blob)
    assert mark.exists(), "the control: read as a pickle it does run"


@each_case(
    "text",
    ['{"record": ["Popen", {"args": '
     '"true"}]}', '{"record": ["StepDone", {"path": 1}]}', '{"tensor": 0}', "[1]", "{}", "nul",
     json.dumps({"a": 1, "b": 2}), '{"object": 1}', '{"dict": [[{"list": []}, 1]]}', '{"list": ' * 5000],
)  # fmt: skip
def test_what_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ExecutionError, match="not one of Piper's"):
        wire.decode(framed(text))


def test_other_objects_are_not_sent() -> None:
    with pytest.raises(TypeError, match="a PosixPath is no part of a message"):
        wire.encode({"a": Path(".")})


def test_ranks_of_torchrun_read_no_pickles() -> None:
    trees = [ast.parse(inspect.getsource(module)) for module in (torchrun, mailing)]
    assert not [
        n
        for tree in trees
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom) and "pickle" in ast.dump(n)
    ]
