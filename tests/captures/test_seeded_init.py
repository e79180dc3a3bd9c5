"""Job(init="seeded"): each tensor alone, in any order and on any rank, is that of the whole model by the judge's
rules."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import piper
from piper import Mesh, Precision, Strategy, recipes
from piper.api.reference import reference, reference_weights
from piper.api.reference.reference_weights import constructed
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import JobError
from piper_runtime import Job
from piper_runtime.engine.memory import MemoryCounter
from piper_runtime.launch.ground.request import Attempt, make_requests
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.rank import materialize
from piper_runtime.rank.values.store import Store
from piper_runtime.weights import LazyTensors, recorder, recording
from tests.helpers.cases import each_case
from tests.helpers.models import CASES
from tests.helpers.parity import assert_parity
from tests.helpers.seeded_models import Foreign, Shuffled, seeded_job, unusual_job

LAYOUTS = {
    "one device": Strategy(Mesh(), ()),
    "1F1B": Strategy(Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=2)),
    "GPipe x replicas": Strategy(
        Mesh(pp=2, dp=2), (*recipes.gpipe(pp=2, microbatches=2), *recipes.data_parallel())
    ),
}


def whole(job: Job) -> dict[str, Tensor]:
    """The tensors of the model that the judge makes at once, in the job's dtype."""
    model = constructed(job)
    reference_weights.cast_tensors(model, job.precision.dtype, job.precision.dtype)
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    plain = {
        f"{p}.{n}" if p else n: t
        for p, m in model.named_modules()
        for n, t in vars(m).items()
        if isinstance(t, Tensor)
    }
    return {n: t.detach() for n, t in (found | plain).items()}


def each_alone(job: Job, backwards: bool = True) -> dict[str, Tensor]:
    state = materialize(job)
    both = {**{n: state.params for n in state.params}, **{n: state.buffers for n in state.buffers}}
    return {name: both[name][name] for name in (reversed(both) if backwards else both)}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    assert a.keys() == b.keys()
    return {
        n
        for n, t in a.items()
        if t.dtype != b[n].dtype or t.shape != b[n].shape or not torch.equal(t, b[n])
    }


@each_case("name", CASES)
def test_each_tensor_alone_equals_that_of_the_whole_model(name: str) -> None:
    job = seeded_job(name)
    assert differing(each_alone(job), whole(job)) == set()


@each_case("dtype", ["float64", "float32", "bfloat16"])
def test_unusual_constructors_are_recorded_exactly(dtype: str) -> None:
    job = unusual_job(precision=Precision(params=dtype))
    made = each_alone(job)
    assert differing(made, whole(job)) == set()
    assert differing(made, each_alone(job, backwards=False)) == set()
    assert torch.equal(made["bare"], torch.zeros(3)) and made["tail.weight"].min() >= 0.4
    assert made["given"].abs().max() > 0 and (made["sparse"] == 0).any()


def test_another_seed_gives_other_numbers_and_the_callers_random_state_stays() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, other = each_alone(seeded_job("gpt")), each_alone(seeded_job("gpt", seed=6))
    assert torch.equal(torch.get_rng_state(), before)
    same = {n for n in first if n not in differing(first, other)}
    assert same == {n for n in first if "norm" in n}


def test_layers_of_equal_shape_get_different_numbers() -> None:
    found = each_alone(seeded_job("deep"))
    weights = [t for n, t in found.items() if n.endswith("qkv.weight")]
    assert len(weights) == 8 and all(not torch.equal(a, b) for a, b in pairwise(weights))


@pytest.fixture
def one_seed_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "draw_seed", lambda seed, draw: seed)


@pytest.fixture
def copies_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    add = recorder._ConstructorLog._add
    monkeypatch.setattr(
        recorder._ConstructorLog,
        "_add",
        lambda log, f, *rest: None if "copy_" in str(f) else add(log, f, *rest),
    )


@pytest.fixture
def everything_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder._ConstructorLog, "_covers", lambda log, tensor: True)


@pytest.fixture
def all_writes_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_FILLS", recorder._FILLS | {"aten::mul_", "aten::sub_"})


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ("one_seed_for_all", "cut.weight"),
        ("copies_forgotten", "copied.weight"),
        ("everything_fills", "halved.bias"),
        ("all_writes_fill", "halved.bias"),
    ],
)
def test_negative_controls_faults_of_the_recording(
    fault: str, caught: str, request: pytest.FixtureRequest
) -> None:
    job = unusual_job()
    expected = whole(job)
    request.getfixturevalue(fault)
    assert caught in differing(each_alone(job), expected)


def test_negative_control_a_rejection_loop_that_is_not_one_call_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "_replaced", lambda *_: nullcontext())
    with pytest.raises(JobError, match=r"reads values of a tensor \(aten\._local_scalar_dense"):
        materialize(unusual_job())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt", "frozen"])
def test_every_rank_of_three_layouts_holds_the_same_bits(name: str) -> None:
    job = seeded_job(name)
    expected = whole(job)
    for layout, strategy in LAYOUTS.items():
        compiled = piper.compile(job, strategy)
        plan, code = compiled.plan, compiled.code
        assert code is not None
        exported = code.export([c.code for c in plan.chunks], plan.rows)
        attempt = Attempt(plan, exported, job, materialize(job), RunOptions(steps=1))
        requests = make_requests(attempt)
        held: set[str] = set()
        for rank in reversed(range(plan.mesh.world)):
            request = pickle.loads(pickle.dumps(requests[rank]))
            store = Store(plan, rank, request.params, request.buffers)
            found = {**store.params, **store.buffers}
            assert differing(found, {n: expected[n] for n in found}) == set(), (layout, rank)
            held |= found.keys()
        assert {p.name for p in plan.params if p.trained} <= held


def test_a_request_holds_what_its_role_needs_and_no_tensor() -> None:
    job = replace(
        unusual_job(),
        model=lambda: torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(4)),
    )
    params = materialize(job).params
    assert isinstance(params, LazyTensors)
    one = pickle.dumps(params.part(["1.weight"]))
    assert len(one) < 4096 and "3.weight" not in params.part(["1.weight"])
    assert torch.equal(pickle.loads(one)["1.weight"], params["1.weight"])


def test_a_rank_makes_one_parameter_at_a_time() -> None:
    """The most bytes beyond the states of the rank are those of the largest parameter, and its first values."""
    job = unusual_job(
        lambda: torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(8))
    )
    params = materialize(job).params
    counter = MemoryCounter()
    with counter.during(0):
        for name in params:
            assert params[name].shape == (256, 256)
    largest = 4 * 256 * 256
    assert largest <= counter.peak <= 1.1 * largest
    held = MemoryCounter()  # the control: all at once
    with held.during(0):
        assert len([params[name] for name in params]) == 8
    assert held.peak >= 8 * largest


@pytest.mark.long
def test_a_seeded_job_trains_as_one_device_does() -> None:
    """It does so in this process, in processes, and by `piper verify`."""
    job = seeded_job("gpt")
    assert verify_strategy(job, LAYOUTS["1F1B"]).equal
    compiled = piper.compile(job, LAYOUTS["GPipe x replicas"])
    plan = compiled.plan
    expected = reference.reference(job, replicas=plan.replicas, microbatches=plan.microbatches)
    run = piper.execute(compiled, steps=3, launcher="processes", memory=False, gradients=True)
    assert_parity(run, expected)
    wrong = reference.reference(
        replace(job, init="model"), replicas=plan.replicas, microbatches=plan.microbatches
    )
    with pytest.raises(AssertionError, match="not what one device computes"):
        assert_parity(run, wrong)


def test_a_state_dict_has_the_tensors_that_no_rank_holds() -> None:
    state = materialize(unusual_job())
    expected = whole(unusual_job())
    found = state.state_dict({"cut.weight": torch.ones(8, 8)})
    assert torch.equal(found["cut.weight"], torch.ones(8, 8)) and "order" not in found
    assert torch.equal(found["tied.weight"], expected["turned.weight"]) and torch.equal(
        found["bare"], torch.zeros(3)
    )
    assert all(type(t) is torch.Tensor for t in found.values())
    assert torch.equal(state.state_dict({})["cut.weight"], expected["cut.weight"])


def reads_a_value() -> torch.nn.Module:
    return torch.nn.Linear(2, int(torch.rand(()).item() * 10) + 1)


def asks_a_tensor() -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    if layer.weight.sum() > 0:
        torch.nn.init.zeros_(layer.weight)
    return layer


def counts() -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.weight.data[: len(torch.nonzero(layer.weight > 0))] = 0
    return layer


def draws_its_own() -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return layer


def truncates_its_own() -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    torch.nn.init.trunc_normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return layer


def calls_numpy() -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.weight.data.numpy()[0] = 1
    return layer


def on_meta() -> torch.nn.Module:
    return torch.nn.Linear(2, 2, device="meta")


def fails() -> torch.nn.Module:
    raise KeyError("width")


def gives_none() -> None:
    return None


@each_case(
    ("model", "says"),
    [
        (
            reads_a_value,
            r"reads values of a tensor "
            r"\(aten\._local_scalar_dense.*test_seeded_init\.py:\d+\).*init='model'",
        ),
        (asks_a_tensor, r"reads values of a tensor.*test_seeded_init\.py:\d+\)"),
        (counts, r"reads values of a tensor \(aten\.nonzero.*test_seeded_init\.py:\d+\)"),
        (draws_its_own, r"a torch\.Generator of its own.*test_seeded_init\.py:\d+\)"),
        (truncates_its_own, r"a torch\.Generator of its own"),
        (calls_numpy, r"test_seeded_init\.py:\d+\).*init='model'"),
        (on_meta, r"makes 'weight' on device meta"),
        (fails, r"raised KeyError: 'width' \(.*test_seeded_init\.py:\d+\)"),
        (gives_none, r"returned a NoneType; an nn\.Module is needed"),
    ],
)
def test_constructors_that_cannot_be_recorded_are_refused_by_name(model: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        materialize(unusual_job(model))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_arrays_of_other_libraries_are_part_of_the_recording(dtype: str) -> None:
    job = unusual_job(Foreign, precision=Precision(params=dtype))
    assert differing(each_alone(job), whole(job)) == set()
    assert differing(each_alone(job, backwards=False), whole(job)) == set()


def test_a_constructor_that_sets_torchs_default_dtype_makes_the_same_elsewhere() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        state, expected = materialize(seeded_job("gpt")), whole(seeded_job("gpt"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(t, expected[n]) for n, t in state.params.items())
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.long
@each_case("start", range(0, 48, 16))
def test_random_constructors_are_recorded_exactly(start: int) -> None:
    for program in range(start, start + 16):
        job = unusual_job(partial(Shuffled, program))
        assert differing(each_alone(job), whole(job)) == set(), program


def test_negative_control_random_constructors_find_a_fill_that_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "_FILLS", recorder._FILLS | {"aten::add_"})
    jobs = [unusual_job(partial(Shuffled, program)) for program in range(20)]
    assert any(differing(each_alone(job), whole(job)) for job in jobs)
