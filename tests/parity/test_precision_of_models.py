"""A job's precision decides dtypes of states, losses, buffers and batches, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import piper
from piper import Job, Mesh, Precision, Strategy, models
from piper.api.captures.capturing import captured_job
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import CaptureError, JobError
from piper_ir.plan.plan import Plan
from piper_ir.verify import check
from tests.helpers import parity
from tests.helpers.cases import each_case

BF16 = Precision(params="float32", compute="bfloat16")
ROWS, WIDTH, CLASSES = 8, 16, 5


class Routed(nn.Module):
    """Layers with a frozen one, a table in a buffer, and a router that computes in the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.0, 1.0, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.router = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        share = self.router(x.to(self.router.weight.dtype)).softmax(-1)
        return self.head((x * share * self.table).to(x.dtype))


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))[
        rows.start : rows.stop
    ]
    return x, (torch.arange(rows.start, rows.stop) + step) % CLASSES


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


def job(precision: Precision | str = BF16, **more: Any) -> Job:
    fields: dict[str, Any] = {"model": Routed, "loss": F.cross_entropy, **more}
    return Job(batch=batch, optimizer=adamw, global_batch=ROWS, precision=precision, **fields)


def plan_of(work: Job, **axes: int) -> Plan:
    pieces = (
        piper.split(piper.where(), microbatches=2),
        *(piper.recipes.data_parallel() if axes else ()),
    )
    return piper.compile(work, Strategy(Mesh(**axes), pieces)).plan


def sizes(plan: Plan) -> dict[str, int]:
    """Bytes of the state of rank 0 by category."""
    found: dict[str, int] = {}
    for state in plan.roles[0].states:
        found[state.category] = found.get(state.category, 0) + state.nbytes
    return found


@pytest.mark.long
def test_a_rank_has_parameters_twice_and_all_else_in_the_dtype_of_the_update() -> None:
    narrow, wide = plan_of(job()), plan_of(job(Precision(params="float32")))
    assert check(narrow) == []
    trained = sum(b.numel for b in narrow.buckets)
    frozen = 2 * (WIDTH * WIDTH + WIDTH)
    assert sizes(narrow) == {
        **{"param": 2 * trained + frozen, "master": 4 * trained, "grad": 4 * trained},
        **{"optim": 8 * trained + 4, "buffer": 4 * WIDTH},
    }
    assert "master" not in sizes(wide) and sizes(wide)["optim"] == 2 * sizes(wide)["grad"] + 4


def test_losses_are_float32_and_values_bfloat16() -> None:
    chunks = plan_of(job()).chunks
    kinds = {(o.kind, o.spec.dtype) for c in chunks for o in c.outputs}
    assert kinds == {("value", "bfloat16"), ("loss", "float32"), ("weight", "float32")}
    assert {c.inputs[k].spec.dtype for c in chunks for k in c.steps["W"].accumulates} == {
        "bfloat16"
    }


def halved(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(output, targets, reduction="none")
    return (0.5 * each.view(-1)).sum(), torch.ones_like(each).sum()


@pytest.mark.long
def test_what_a_model_makes_of_a_float32_loss_is_float32() -> None:
    """Where chunks are cut behind the loss, the next one reads it as it is."""

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            with piper.region(part=0):
                each = F.cross_entropy(
                    x, torch.zeros(x.shape[0], dtype=torch.int64), reduction="none"
                )
            with piper.region(part=1):
                return 2.0 * each

    work = job(model=Ends, loss=lambda output, _: output.mean())
    plan = plan_of(work)
    assert check(plan) == []
    ends = {c.id: [i.spec.dtype for i in c.inputs if i.kind == "value"] for c in plan.chunks}
    assert list(ends.values())[-1] == ["float32"]
    run = piper.execute(
        piper.compile(work, Strategy(Mesh(), ())), steps=1, launcher="inline", memory=False
    )
    plain = parity.reference(work, steps=1)
    assert run.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)


@pytest.mark.long
def test_pairs_of_sum_and_weight_are_float32() -> None:
    chunks = plan_of(job(loss=halved)).chunks
    kinds = {(o.kind, o.spec.dtype) for c in chunks for o in c.outputs}
    assert kinds == {("value", "bfloat16"), ("loss", "float32"), ("weight", "float32")}


def test_the_loss_of_bfloat16_logits_has_more_than_three_digits() -> None:
    run = piper.execute(
        piper.compile(job(), Strategy(Mesh(), ())), steps=1, launcher="inline", memory=False
    )
    assert run.losses[0] != float(torch.tensor(run.losses[0]).bfloat16())


@pytest.mark.long
def test_buffers_stay_as_the_model_made_them() -> None:
    for precision in (BF16, Precision(params="bfloat16")):
        assert [b.spec.dtype for b in captured_job(job(precision)).program.buffers] == ["float32"]
    wide = captured_job(job(Precision(params="float64"))).program
    assert [b.spec.dtype for b in wide.buffers] == ["float64"], "which is there to compare"
    inside = captured_job(job(Precision(params="float64", compute="float32"))).program
    assert [b.spec.dtype for b in inside.buffers] == ["float32"]


KEPT = replace(BF16, keep={"*router.*": "float32", "head.*": "bfloat16"})


def test_kept_parameters_compute_in_their_own_dtype_and_share_no_bucket_with_others() -> None:
    plan = plan_of(job(KEPT), dp=2)
    assert check(plan) == []
    dtypes = {p.name: p.spec.dtype for p in plan.params}
    assert {n for n, d in dtypes.items() if d == "float32"} == {"router.weight"}
    (kept,) = [b for b in plan.buckets if "router.weight" in b.params]
    assert (
        kept.params == ("router.weight",) and not kept.mastered and kept.compute_dtype == "float32"
    )
    assert all(b.mastered for b in plan.buckets if b is not kept)


@pytest.mark.long
def test_kept_parameters_train_as_in_a_plain_loop() -> None:
    """The model computes in float32 inside of float64, with one parameter that stays in float64."""
    work = job(
        Precision(params="float64", compute="float32", keep={"router.*": "float64"}), clip_norm=0.1
    )
    pieces = (piper.split(piper.where(), microbatches=2), *piper.recipes.data_parallel())
    run = piper.execute(
        piper.compile(work, Strategy(Mesh(dp=2), pieces)),
        steps=2,
        launcher="inline",
        memory=False,
        gradients=True,
    )
    parity.assert_parity(
        run,
        parity.reference(work, replicas=2, microbatches=2, steps=2),
        parity.FLOAT32,
        parameters=False,
    )


def test_a_state_dict_has_the_dtype_of_the_update_and_frozen_parameters_every_digit() -> None:
    work = job()
    found = piper.execute(
        piper.compile(work, Strategy(Mesh(), ())), steps=2, launcher="inline", memory=False
    ).state_dict()
    with torch.random.fork_rng():
        torch.manual_seed(work.seed)
        start = Routed().state_dict()
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert torch.equal(found["layers.1.weight"], start["layers.1.weight"])
    assert not torch.equal(found["layers.0.weight"], found["layers.0.weight"].bfloat16().float())


@pytest.mark.long
def test_a_file_of_weights_is_not_rounded(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = Routed().state_dict()
    torch.save(state, tmp_path / "weights.pt")
    still = job(init=tmp_path / "weights.pt", loss=lambda output, targets: 0.0 * output.sum())
    still = replace(still, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    found = piper.execute(
        piper.compile(still, Strategy(Mesh(), ())), steps=1, launcher="inline", memory=False
    ).state_dict()
    assert all(torch.equal(found[n], t) for n, t in state.items())


@pytest.mark.long
def test_another_precision_is_another_capture() -> None:
    kinds = [BF16, KEPT, Precision(params="bfloat16"), Precision()]
    assert len({id(captured_job(job(p))) for p in kinds}) == len(kinds)
    assert captured_job(job(BF16)) is captured_job(job(replace(BF16, reduce="float32")))
    narrow = captured_job(job(replace(BF16, reduce="bfloat16")))
    assert narrow is captured_job(job(Precision(params="bfloat16"))), (
        "what is updated is not captured"
    )


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "float16 for all": (lambda: Precision("float16"), JobError, r"compute='float16'\) computes in it"),
    "float16 of bfloat16": (
        lambda: Precision("bfloat16", keep={"a": "float16"}), JobError, r"keep\['a'\] is float16, which lacks the range"
    ),
    "a short name": (lambda: Precision(compute="bf16"), JobError, r"compute='bf16'.*did you mean "
                                                                  r"'bfloat16'\?"),
    "wider than the update": (
        lambda: Precision(params="bfloat16", compute="float32"), JobError, r"compute is float32, "
                                                                           r"which is "
                                                                           r"wider.*params='float32'"
    ),
    "a wider exception": (lambda: Precision(keep={"*": "float64"}), JobError, r"keep\['\*'\] is "
                                                                              r"float64, which is "
                                                                              r"wider"),
    "a list of exceptions": (lambda: Precision(keep=["a"]), JobError, r"a dict of patterns"),  # type: ignore[arg-type]  # on purpose
    "master": (lambda: Precision(master="float32"), JobError, r"no argument "
                                                              r"'master'"),  # type: ignore[call-arg]  # on purpose
    "no such parameter": (
        lambda: captured_job(job(replace(BF16, keep={"*.ruoter.*": "float32"}))),
        CaptureError, r"'\*\.ruoter\.\*'.*layers\.0\.weight",
    ),
}  # fmt: skip


@each_case("name", REFUSED)
def test_what_is_refused_by_name(name: str) -> None:
    make, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        make()


@pytest.mark.long
@pytest.mark.parametrize("size", ["gpt", "moe"])
def test_jobs_of_models_compute_in_bfloat16_and_update_in_float32(size: str) -> None:
    config = {
        "gpt": models.GPTConfig(layers=2, width=16, heads=2, vocab=32, length=8),
        "moe": models.MoEConfig(
            layers=2,
            width=16,
            heads=4,
            kv_heads=2,
            hidden=24,
            vocab=32,
            length=8,
            experts=4,
            top_k=2,
        ),
    }[size]
    work = models.job(config, global_batch=4)
    plan = plan_of(work)
    assert check(plan) == [] and {b.dtype for b in plan.buckets} == {"float32"}
    wide = {p.name for p in plan.params if p.spec.dtype == "float32"}
    assert all("router" in name for name in wide) and bool(wide) == (size == "moe")
    assert models.job(config, global_batch=4, precision="float64").precision == Precision(
        params="float64"
    )
    assert models.job(config, global_batch=4, precision=BF16).precision is BF16


class Fixed(nn.Module):
    """A product with a table that is not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("table", torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x @ self.table)
        return out


class Added(Fixed):
    """A sum into the elements of an index, of a table that is not cast."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h.index_add(1, torch.tensor([0]), self.table[:1, :1].expand(len(h), 1))


@each_case(("model", "op"), [(Fixed, "mm"), (Added, "index_add")])
def test_a_buffer_that_meets_activations_in_another_dtype_is_said_to_be_cast(
    model: type[nn.Module], op: str
) -> None:
    these = rf"{op}\.default takes tensors of one dtype, and these are bfloat16 and float32"
    said = rf"{these} at .*self\.table.*Cast where they meet: self\.table\.to"
    with pytest.raises(CaptureError, match=said):
        captured_job(job(model=model))


def test_a_plan_with_masters_is_written_and_read() -> None:
    plan = plan_of(job(KEPT), dp=2)
    assert loads(Plan, dumps(plan)).key == plan.key


def test_a_name_is_one_dtype_for_all() -> None:
    named = job("bfloat16")
    assert named.precision == Precision(params="bfloat16") and named == job(named.precision)
    assert replace(named, seed=1).precision == named.precision
    assert replace(named, precision="float64").precision == Precision(params="float64")
