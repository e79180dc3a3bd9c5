"""Job, Precision, batches by name, and the initial state."""

from collections import OrderedDict, UserDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from packages.runtime.tests.chains import chain
from packages.runtime.tests.handmade import Chain, chain_job
from piper_ir.ground.errors import JobError, SelectorError
from piper_runtime.rank.batches.batches import call_batch, flatten_batch, microbatch_rows
from piper_runtime.rank.job.job import Job, initial_state, materialize
from piper_runtime.rank.job.precision import Precision
from tests.helpers.cases import each_case


@each_case(
    ("field", "value", "says"),
    [
        ("model", Chain(2), "got a module"),
        ("batch", None, "a function of .step, rows. is needed"),
        ("scheduler", 3, "a function of the optimizer is needed"),
        ("global_batch", 0, "at least 1"),
        ("global_batch", 2.0, "an integer"),
        ("seed", -1, "at least 0"),
        ("seed", True, "an integer"),
        ("tokens_per_row", 0, "at least 1"),
        ("clip_norm", 0.0, "positive"),
        ("precision", "float31", "float31"),
        ("init", 3, "the path of weights is needed"),
        ("rename", 3, "a mapping from patterns"),
    ],
)
def test_unusable_fields_are_refused_by_name(field: str, value: Any, says: str) -> None:
    good = chain_job(2, 4)
    fields = {n: getattr(good, n) for n in ("model", "batch", "loss", "optimizer", "global_batch")}
    with pytest.raises(JobError, match=f"Job\\({field}=.*{says}"):
        Job(**{**fields, field: value})


def test_precision_names_what_is_accepted() -> None:
    with pytest.raises(JobError, match="float64, float32, bfloat16, float16 is needed"):
        Precision(params="float8")
    with pytest.raises(JobError, match=r"compute='float16'.* computes in it, with a scaled loss"):
        Precision(params="float16")
    with pytest.raises(JobError, match="lacks the range of the parameters"):
        Precision(params="bfloat16", compute="float16")
    with pytest.raises(JobError, match=r"loss_scale='dynamic'.*a piper.LossScale"):
        Precision(compute="float16", loss_scale="dynamic")  # type: ignore[arg-type]  # no scale
    with pytest.raises(JobError, match=r"accumulate='int8'\): one of float64"):
        Precision(accumulate="int8")
    assert Precision(params="float64", reduce="float64").dtype is torch.float64


def test_precision_has_one_dtype_unless_told_otherwise() -> None:
    plain = Precision(params="bfloat16")
    assert (
        plain.dtype is plain.compute_dtype is plain.reduce_dtype is torch.bfloat16
        and plain.sums_in is None
    )
    mixed = Precision(params="float32", compute="bfloat16")
    assert (
        mixed.compute_dtype is torch.bfloat16
        and mixed.dtype is mixed.reduce_dtype is mixed.sums_in is torch.float32
    )
    assert Precision(params="float32", keep={"a.*": "bfloat16"}).sums_in is torch.float32
    apart = Precision(compute="bfloat16", reduce="bfloat16", accumulate="float32")
    assert apart.reduce_dtype is torch.bfloat16 and apart.sums_in is torch.float32
    assert Precision(accumulate="float16").scaling is not None


def test_batches_are_named_by_their_paths() -> None:
    t = torch.zeros(2)
    pair = namedtuple("pair", ["a", "b"])
    assert list(flatten_batch((t, t))[0]) == ["inputs", "targets"]
    assert list(flatten_batch(((t, t), {"y": [t, None]}))[0]) == [
        "inputs.0",
        "inputs.1",
        "targets.y.0",
    ]
    named = OrderedDict(x=t, mask=t), pair(t, t)
    assert list(flatten_batch(named)[0]) == ["inputs.x", "inputs.mask", "targets.a", "targets.b"]
    assert list(flatten_batch(UserDict(x=t))[0]) == ["inputs.x"]
    assert flatten_batch(((t, 3, "mean"), None))[1] == {"inputs.1": "3", "inputs.2": "'mean'"}
    with pytest.raises(JobError, match=r"a bytes at inputs\.1"):
        flatten_batch(((t, b""), t))


def test_every_row_belongs_to_one_microbatch_of_one_replica() -> None:
    plan, _ = chain(dp=2, microbatches=4, rows=3)
    rows = [list(microbatch_rows(plan, replica, mb)) for replica in range(2) for mb in range(4)]
    assert [r for found in rows for r in found] == list(range(24)) and rows[4] == [12, 13, 14]


class Odd(nn.Module):
    """Tied names, a buffer that is not persistent, a plain tensor, an integer and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("turns", torch.tensor([1 + 2j]))
        self.mask = torch.ones(3)


def test_the_initial_state_has_every_tensor_once_in_its_dtype() -> None:
    state = initial_state(Odd(), torch.float64)
    assert list(state.params) == ["a.weight", "a.bias", "b.bias"]
    assert state.buffers.keys() == {"steps", "cache", "mask", "turns"}
    assert state.params["a.weight"].dtype is state.buffers["mask"].dtype is torch.float64
    assert state.buffers["steps"].dtype is torch.int64
    assert state.buffers["turns"].dtype is torch.complex64 and state.buffers["turns"][0].imag == 2


def test_buffers_are_cast_to_float64_only() -> None:
    for dtype, compute in ((torch.bfloat16, None), (torch.float64, torch.float32)):
        state = initial_state(Odd(), dtype, compute)
        assert (
            state.params["a.weight"].dtype is dtype and state.buffers["mask"].dtype is torch.float32
        )
    assert initial_state(Odd(), torch.float64).buffers["mask"].dtype is torch.float64


def test_a_state_dict_has_the_names_of_the_module_and_leaves_it_alone() -> None:
    model = Odd()
    model.register_state_dict_post_hook(
        lambda module, found, prefix, _: found.update({"cast": found.pop("a.bias").half()})
    )
    state = initial_state(model, torch.float64)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = state.state_dict({n: t + 1 for n, t in {**state.params, **state.buffers}.items()})
    assert (
        list(found) == list(before) == ["steps", "turns", "a.weight", "b.weight", "b.bias", "cast"]
    )
    assert all(torch.equal(found[n], before[n] + 1) for n in before if n != "cast")
    assert found["cast"].dtype is torch.float16
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_initial_state_follows_the_seed_and_leaves_the_callers_random_state_alone() -> None:
    job = chain_job(2, 4)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first, second = materialize(job), materialize(job)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.params["layers.1"], second.params["layers.1"])
    other = materialize(chain_job(2, 4, seed=4))
    assert not torch.equal(first.params["layers.1"], other.params["layers.1"])


def test_init_reads_a_saved_state_dict_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    model = Chain(2)
    torch.save(model.state_dict(), tmp_path / "good.pt")
    state = materialize(chain_job(2, 4, init=str(tmp_path / "good.pt")))
    assert torch.equal(state.params["layers.1"], model.layers[1].detach().double())
    with pytest.raises(JobError, match="not a state_dict of this model"):
        materialize(chain_job(3, 4, init=tmp_path / "good.pt"))
    (tmp_path / "broken.pt").write_bytes(b"no")
    with pytest.raises(JobError, match="not a state_dict of this model"):
        materialize(chain_job(2, 4, init=tmp_path / "broken.pt"))
    with pytest.raises(JobError, match="no such file"):
        materialize(chain_job(2, 4, init=tmp_path / "absent.pt"))


def test_a_float64_file_is_not_rounded_on_the_way(tmp_path: Path) -> None:
    saved = {n: t.double() + 1e-12 for n, t in Chain(2).state_dict().items()}
    torch.save(saved, tmp_path / "wide.pt")
    state = materialize(chain_job(2, 4, init=tmp_path / "wide.pt"))
    assert all(torch.equal(t, saved[n]) for n, t in {**state.params, **state.buffers}.items())


def broken(*_: Any) -> Any:
    raise ValueError("no data")


def test_exceptions_of_the_users_functions_are_named_with_their_line() -> None:
    where = rf"test_runtime_job.py:{broken.__code__.co_firstlineno + 1}\)$"
    with pytest.raises(
        JobError,
        match=r"^Job\.batch\(step=0, rows=range\(0, 2\)\) raised ValueError: no data \(.*" + where,
    ):
        call_batch(broken, 0, range(2))
    job = Job(broken, broken, broken, broken, global_batch=4)
    with pytest.raises(JobError, match=r"^Job\.model\(\) raised ValueError: no data \(.*" + where):
        materialize(job)


def test_a_call_that_does_not_fit_has_no_line_of_the_users_and_our_errors_pass() -> None:
    with pytest.raises(
        JobError, match=r"raised TypeError: .* takes 0 positional arguments but 2 were given$"
    ):
        call_batch(lambda: None, 0, range(2))  # type: ignore[arg-type, misc]  # on purpose

    def refuse(step: int, rows: range) -> Any:
        raise SelectorError("as it is")

    with pytest.raises(SelectorError, match=r"^as it is$"):
        call_batch(refuse, 0, range(2))
