"""Job(init=path): files give each rank the boxes that it holds, and train like one device from the same files."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import piper
from piper import Mesh, Precision, Strategy, recipes
from piper.api.reference import reference
from piper.api.reference.reference_weights import load_weights
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import JobError
from piper_runtime import Job
from piper_runtime.launch.ground.request import Attempt, make_requests
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.rank import materialize
from piper_runtime.rank.values.store import Store
from piper_runtime.weights import LazyTensors, flat_range, safetensors_file
from tests.helpers.cases import each_case
from tests.helpers.models import CASES
from tests.helpers.parity import assert_parity
from tests.helpers.safetensors_writer import write_folder, write_safetensors
from tests.helpers.seeded_models import seeded_job, unusual_job

PIPELINE = Strategy(Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=2))


def state_of(name: str) -> dict[str, Tensor]:
    """The state of another seed than the jobs'; a tied tensor once, as Hugging Face saves it."""
    torch.manual_seed(99)
    model = CASES[name].model()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t.detach().clone() for n, t in model.state_dict().items() if n in named}


def differing(job: Job, expected: dict[str, Tensor]) -> set[str]:
    state = materialize(job)
    both = {**state.params, **state.buffers}
    return {n for n, t in expected.items() if not torch.equal(both[n], t.to(both[n].dtype))}


@each_case("name", ["gpt", "gpt_untied", "llama", "buffers", "frozen", "opaque", "deep"])
def test_files_and_folders_give_their_tensors(name: str, tmp_path: Path) -> None:
    state = state_of(name)
    for path in (
        write_safetensors(tmp_path / "x.safetensors", state),
        write_folder(tmp_path / "folder", state, shards=3),
    ):
        job = seeded_job(name, init=path)
        assert differing(job, state) == set()
        kept = {n: t for n, t in materialize(seeded_job(name)).buffers.items() if n not in state}
        assert (
            differing(job, kept) == set()
        )  # what files do not hold is as the constructor makes it


@each_case("kind", ["file", "folder", "torch"])
def test_names_are_changed_by_patterns(kind: str, tmp_path: Path) -> None:
    state = state_of("llama")
    theirs = {f"model.{n}": t for n, t in state.items()} | {"model.rotary": torch.zeros(3)}
    if kind == "torch":
        torch.save(theirs, path := tmp_path / "x.pt")
    else:
        path = (
            write_folder(tmp_path / "x", theirs)
            if kind == "folder"
            else write_safetensors(tmp_path / "x.safetensors", theirs)
        )
    job = seeded_job("llama", init=path, rename={"model.rotary": None, "model.*": "*"})
    assert differing(job, state) == set()
    model = reference.constructed(job)
    load_weights(model, job)  # the judge's own reading
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    with pytest.raises(JobError, match=r"embed\.weight"):
        materialize(replace(job, rename={}))


def test_a_plan_from_files_trains_as_one_device_does(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "folder", {f"m.{n}": t for n, t in state_of("gpt").items()})
    job = seeded_job("gpt", init=path, rename={"m.*": "*"})
    assert verify_strategy(job, PIPELINE).equal
    run = piper.execute(
        piper.compile(job, PIPELINE), steps=2, launcher="processes", memory=False, gradients=True
    )
    assert_parity(run, reference.reference(job, microbatches=2, steps=2))
    with pytest.raises(AssertionError, match="not what one device"):
        assert_parity(run, reference.reference(seeded_job("gpt"), microbatches=2, steps=2))


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    found: list[int] = []
    read = safetensors_file.read_bytes

    def counted(path: str, spans: Any, into: memoryview) -> None:
        found.append(len(into))
        read(path, spans, into)

    monkeypatch.setattr(safetensors_file, "read_bytes", counted)
    yield found


def test_a_rank_reads_what_it_holds_and_no_more(tmp_path: Path, count: list[int]) -> None:
    state = {n: t.double() for n, t in state_of("gpt").items()}
    job = seeded_job("gpt", init=write_folder(tmp_path / "folder", state))
    compiled = piper.compile(job, PIPELINE)
    plan, code = compiled.plan, compiled.code
    assert code is not None
    exported = code.export([c.code for c in plan.chunks], plan.rows)
    attempt = Attempt(plan, exported, job, materialize(job), RunOptions(steps=1))
    requests = make_requests(attempt)
    total = 0
    for rank in range(2):
        request = pickle.loads(pickle.dumps(requests[rank]))
        assert len(pickle.dumps(request.params)) < 20_000
        count.clear()
        store = Store(plan, rank, request.params, request.buffers)
        assert sum(count) == sum(t.nbytes for t in store.params.values())
        total += sum(count)
    assert (
        total == sum(t.nbytes for t in state.values()) + state["embed.weight"].nbytes
    )  # the tied one is on both


@pytest.mark.parametrize("zero", [1, 3])
def test_ranks_that_share_states_read_their_parts(
    zero: int, tmp_path: Path, count: list[int]
) -> None:
    """Together they read each parameter once; the parts of others come with the gather of a step."""
    state = {n: t.double() for n, t in state_of("gpt").items()}
    job = seeded_job("gpt", init=write_folder(tmp_path / "folder", state))
    plan = piper.compile(
        job, piper.Strategy(piper.Mesh(dp=4), piper.recipes.data_parallel(zero=zero))
    ).plan
    params = materialize(job).params
    read = []
    for rank in range(4):
        count.clear()
        store = Store(plan, rank, params, {})
        assert all(store.own_masters[b.id].numel() * 4 == b.numel for b in plan.buckets)
        read.append(sum(count))
    assert sum(read) == sum(t.nbytes for t in state.values()) and max(read) <= 1.05 * sum(read) / 4


def test_a_shard_reads_its_range_of_each_parameter(tmp_path: Path, count: list[int]) -> None:
    torch.manual_seed(3)
    state = {"weight": torch.randn(64, 48), "bias": torch.randn(64)}
    path = write_safetensors(
        tmp_path / "x.safetensors", {"w": state["weight"].t().contiguous(), "bias": state["bias"]}
    )
    rename = {"w": piper.models.Into("weight", transposed=True)}
    params = materialize(
        unusual_job(lambda: torch.nn.Linear(48, 64), init=path, rename=rename)
    ).params
    count.clear()
    for shards in (1, 3, 4, 7):
        size = -(-64 * 48 // shards)
        count.clear()
        for shard in range(shards):
            start, stop = min(shard * size, 64 * 48), min((shard + 1) * size, 64 * 48)
            assert torch.equal(
                flat_range(params, "weight", start, stop), state["weight"].view(-1)[start:stop]
            )
            assert torch.equal(
                flat_range(dict(params), "weight", start, stop),
                state["weight"].view(-1)[start:stop],
            )
            assert torch.equal(
                flat_range(params, "bias", shard, shard + 9), state["bias"][shard : shard + 9]
            )
    count.clear()
    flat_range(params, "weight", 480, 960)
    assert sum(count) == 4 * 480
    made = materialize(seeded_job("gpt")).params
    assert torch.equal(flat_range(made, "embed.weight", 7, 29), made["embed.weight"].view(-1)[7:29])


def test_floating_numbers_are_cast_to_the_dtype_of_the_job(tmp_path: Path) -> None:
    wide = {n: t.double() + 1e-12 for n, t in state_of("gpt").items()}
    path = write_safetensors(tmp_path / "x.safetensors", wide)
    found = materialize(seeded_job("gpt", init=path)).params
    assert all(torch.equal(t, wide[n]) for n, t in found.items())
    narrow = materialize(
        seeded_job("gpt", init=path, precision=Precision(params="bfloat16"))
    ).params
    assert all(torch.equal(t, wide[n].bfloat16()) for n, t in narrow.items())


@pytest.mark.long
def test_the_state_dict_of_a_run_from_files_is_whole(tmp_path: Path) -> None:
    state = state_of("frozen")
    path = write_safetensors(tmp_path / "x.safetensors", state)
    run = piper.execute(
        piper.compile(seeded_job("frozen", init=path), PIPELINE),
        steps=1,
        launcher="inline",
        memory=False,
    )
    found = run.state_dict()
    assert found.keys() == state.keys()
    assert torch.equal(found["unused.weight"], state["unused.weight"].double())
    assert torch.equal(found["embed.weight"], state["embed.weight"].double())
    assert not torch.equal(found["head.weight"], state["head.weight"].double())


@each_case(
    ("change", "says"),
    [
        (lambda s: s.pop("norm.bias"), r"the files lack 'norm\.bias' of the model"),
        (lambda s: s.update(more=torch.zeros(2)), "the model has no place for 'more' of the files"),
        (
            lambda s: s.update({"norm.bias": torch.zeros(15)}),
            r"'norm\.bias' has shape \[16\], .* of the files has \[15\]",
        ),
        (
            lambda s: s.update({"norm.bias": torch.zeros(16).int()}),
            r"'norm\.bias' is torch\.float64, .* is torch\.int32",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(change: Any, says: str, tmp_path: Path) -> None:
    state = state_of("gpt")
    change(state)
    path = write_safetensors(tmp_path / "x.safetensors", state)
    with pytest.raises(JobError, match=rf"^Job\(init='.*x\.safetensors'\): {says}"):
        materialize(seeded_job("gpt", init=path))


def test_paths_that_are_none_and_renames_without_a_path_are_refused(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "x.safetensors", "no such file or folder"),
        (tmp_path, "it has nothing"),
    ):
        with pytest.raises(JobError, match=rf"Job\(init=.*{says}"):
            materialize(seeded_job("gpt", init=path))
    with pytest.raises(
        JobError, match="no such file; give 'model', 'seeded' or the path of weights"
    ):
        materialize(seeded_job("gpt", init="Seeded"))
    with pytest.raises(
        JobError, match=r"Job\(init='seeded', rename=\.\.\.\): rename is for the names in files"
    ):
        seeded_job("gpt", rename={"a": "b"})
    with pytest.raises(JobError, match=r"Job\(rename=\.\.\.\): .* a name of the model, or None"):
        seeded_job("gpt", init="x.safetensors", rename={"a": 3})
    assert hash(seeded_job("gpt", init="x", rename={"a": "b"}))


def bytes_read() -> int:
    """The bytes that this process has read by system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize(("kind", "least", "most"), [("file", 1.0, 1.05), ("seeded", 0.0, 0.05)])
def test_the_system_reads_what_a_rank_holds(
    kind: str, least: float, most: float, tmp_path: Path
) -> None:
    """Layer 2 of eight, of files and as the recorded constructor makes it."""
    sizes = piper.models.LlamaConfig(
        layers=8, width=64, heads=4, kv_heads=2, hidden=256, vocab=100, length=8
    )
    init = "seeded"
    if kind == "file":
        state = {n: torch.zeros_like(t) for n, t in sizes.build().state_dict().items()}
        init = str(write_safetensors(tmp_path / "zeros.safetensors", state))
    job = replace(piper.models.job(sizes, global_batch=2, precision="float32"), init=init)
    params = materialize(job).params
    assert isinstance(params, LazyTensors)
    part = params.part([name for name in params if name.startswith("layers.1.")])
    before = bytes_read()
    own = {name: part[name] for name in part}
    share = (bytes_read() - before) / sum(t.nbytes for t in own.values())
    assert len(own) > 5 and least <= share <= most


@pytest.mark.long
def test_a_profile_makes_the_weights_of_the_job(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", state_of("gpt"))
    assert piper.profile(seeded_job("gpt", init=path), PIPELINE, repeats=2).steps
