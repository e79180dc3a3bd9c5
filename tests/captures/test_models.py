"""piper.models: sizes as published, plans without a device, and small ones that train what one device trains."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import piper
from piper import models
from piper.models.mixture import ExpertLayer
from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import bind
from piper_ir.verify import verify
from piper_simulator.metrics import model_flops
from tests.helpers import parity
from tests.helpers.cases import each_case

SMALL: dict[str, models.DecoderConfig] = {
    "gpt": models.GPTConfig(layers=4, width=16, heads=2, vocab=32, length=8),
    "llama": models.LlamaConfig(layers=4, width=16, heads=4, kv_heads=2, hidden=24, vocab=32, length=8),
    "moe": models.MoEConfig(
        layers=4, width=16, heads=4, kv_heads=2, head_dim=6, hidden=24, vocab=32, length=8, qk_norm=True,
        experts=4, top_k=2, capacity_factor=1.0,
    ),
}  # fmt: skip

PUBLISHED = {
    "gpt3-175b": "175",
    "llama2-7b": "6.74",
    "llama2-13b": "13.0",
    "llama2-70b": "69.0",
    "llama3.2-1b": "1.24",
    "llama3.2-3b": "3.21",
    "qwen3-8b": "8.2",
    "qwen3-32b": "32.8",
    "qwen3-30b-a3b": "30.5",
    "qwen3-235b-a22b": "235",
    "mixtral-8x7b": "46.7",
    "mixtral-8x22b": "141",
    "deepseek-v2": "236",
    "deepseek-v3": "671",
    "gpt-neox-20b": "20.555",
    "nemotron-15b": "15.6",
    "nemotron-340b": "341",
    "gemma2-27b": "27.2",
    "bloom-176b": "176.247",
    "llama3-8b": "8.03",
    "llama3-70b": "70.6",
    "llama3-405b": "406",
    "qwen3-moe-1b": "1",
    "qwen3-moe-9b": "9",
}
"""10^9 parameters as their authors say, in as many digits, by the sources that stand beside the presets; Llama 2 and 3.2
by their published weights, the mixtures of arXiv 2606.11169 by their names."""


def rounded(count: int, digits: str) -> str:
    """A count in 10^9 with as many decimals as `digits` has."""
    return f"{count / 1e9:.{len(digits.partition('.')[2])}f}"


@pytest.mark.long
@each_case("name", models.PRESETS)
def test_a_preset_has_as_many_parameters_as_was_published(name: str) -> None:
    assert rounded(models.parameter_count(models.preset(name)), PUBLISHED[name]) == PUBLISHED[name]


@pytest.mark.long
def test_negative_control_twice_the_layers_are_another_count() -> None:
    for name in models.PRESETS:
        config = models.preset(name)
        count = models.parameter_count(replace(config, layers=2 * config.layers))
        assert rounded(count, PUBLISHED[name]) != PUBLISHED[name], name


@pytest.mark.long
def test_model_flops_of_a_mixture_are_those_of_its_active_parameters() -> None:
    """Half of the numbers of experts: top 2 of 4, with as many places as are taken. The embedding counts, the field's
    way."""
    config = SMALL["moe"]
    assert config.experts is not None
    work = models.job(config, global_batch=4, precision="float64")
    plan = piper.compile(
        work, piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=2),))
    ).plan
    experts = config.layers * config.experts.number * 3 * config.width * config.experts.hidden
    active = models.parameter_count(config) - experts // 2
    attention = 12 * config.layers * config.heads * 6 * config.length
    assert model_flops(plan, config.length) == (6 * active + attention) * 4 * config.length


def test_counts_by_hand() -> None:
    """Llama 3 8B, part by part; a tied embedding counts once."""
    width, hidden, grouped, vocab = 4096, 14_336, 1024, 128_256
    block = 2 * width * width + 2 * width * grouped + 3 * width * hidden + 2 * width
    assert (
        models.parameter_count(models.preset("llama3-8b")) == 32 * block + 2 * vocab * width + width
    )
    gpt = SMALL["gpt"]
    assert models.parameter_count(replace(gpt, tied=False)) - models.parameter_count(gpt) == 32 * 16


@pytest.mark.long
def test_the_counts_of_a_program_are_those_of_the_module() -> None:
    for config in SMALL.values():
        work = models.job(config, global_batch=2, precision="float64")
        program = piper.compile(work, piper.Strategy(piper.Mesh(pp=1), ())).program
        assert sum(int(bind(p.spec.numel, 0)) for p in program.params) == models.parameter_count(
            config
        )


PLANS = {
    "1f1b": (dict(pp=2, dp=2), lambda: piper.recipes.one_f_one_b(pp=2, microbatches=4)),
    "interleaved": (dict(pp=2), lambda: piper.recipes.interleaved(pp=2, chunks=2, microbatches=4)),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "schedule"), list(product(SMALL, PLANS)))
def test_a_small_one_trains_what_one_device_trains(name: str, schedule: str) -> None:
    axes, recipe = PLANS[schedule]
    work = models.job(SMALL[name], global_batch=16, precision="float64", lr=0.01, clip_norm=0.05)
    mesh = piper.Mesh(**axes)
    strategy = piper.Strategy(
        mesh, (*recipe(), *(piper.recipes.data_parallel(bucket_mb=0.002) if "dp" in axes else ()))
    )
    compiled = piper.compile(work, strategy)
    verify(compiled.plan)
    run = piper.execute(compiled, steps=parity.STEPS, launcher="inline", gradients=True)
    parity.assert_parity(run, parity.reference(work, replicas=axes.get("dp", 1), microbatches=4))


@pytest.mark.long
def test_a_preset_is_simulated_without_a_device() -> None:
    """Two layers of it here; benchmarks/scale_cell.py captures whole ones."""
    work = models.job(replace(models.preset("llama3-8b"), layers=2), global_batch=8)
    strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=4))
    simulation = piper.simulate(piper.compile(work, strategy).plan, "h100x8")
    assert simulation.tokens_per_s == pytest.approx(8 * 8192 / simulation.period_s)
    assert simulation.mfu is not None and 0.1 < simulation.mfu < 0.8


def test_jobs_of_equal_sizes_share_a_capture() -> None:
    first, second = (
        models.job(replace(SMALL["gpt"]), global_batch=n, precision="float64") for n in (4, 8)
    )
    assert first.model is second.model or first.model == second.model
    assert piper.compile(first, one()).code is piper.compile(second, one()).code


def one() -> piper.Strategy:
    return piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=2),))


def test_a_row_of_tokens_is_the_same_in_every_range() -> None:
    work = models.job(SMALL["gpt"], global_batch=8)
    tokens, targets = work.batch(3, range(0, 8))
    assert tokens.shape == (8, 8) and int(tokens.min()) >= 0 and int(tokens.max()) < 32
    assert torch.equal(work.batch(3, range(5, 7))[0], tokens[5:7])
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not torch.equal(work.batch(4, range(0, 8))[0], tokens)


def by_loops(experts: ExpertLayer, x: Tensor) -> tuple[Tensor, int]:
    """The mixture token by token, and how many choices found their expert full."""
    out, dropped = torch.zeros_like(x), 0
    share, chosen = experts.routed(x)
    for row in range(x.shape[0]):
        taken = [0] * experts.config.number
        for t, k in product(range(x.shape[1]), range(experts.config.top_k)):
            e = int(chosen[row, t, k])
            if taken[e] == experts.config.capacity(x.shape[1]):
                dropped += 1
                continue
            taken[e] += 1
            hidden = torch.nn.functional.silu(x[row, t] @ experts.gate[e]) * (
                x[row, t] @ experts.up[e]
            )
            out[row, t] += share[row, t, k] * (hidden @ experts.down[e])
    return out, dropped


@pytest.mark.parametrize(("factor", "drops"), [(0.5, True), (1.0, True), (4.0, False)])
def test_experts_are_what_loops_over_tokens_compute(factor: float, drops: bool) -> None:
    """Values and gradients; tokens that find an expert full among them."""
    config = models.Experts(number=4, top_k=2, hidden=12, capacity_factor=factor)
    torch.manual_seed(0)
    experts = ExpertLayer(8, config).double()
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    found: list[list[Tensor]] = []
    for compute in (experts, lambda x: by_loops(experts, x)[0]):
        x = torch.randn(
            3, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        y = compute(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *experts.parameters()])])
    assert (by_loops(experts, x)[1] > 0) == drops
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "heads"),
    [
        pytest.param(6_144, 64, id="22B"),
        pytest.param(12_288, 96, id="175B", marks=pytest.mark.long),
    ],
)
def test_attention_written_out_saves_what_was_published(width: int, heads: int) -> None:
    """s b h (34 + 5 a s / h) bytes per layer: Korthikanti et al., arXiv 2205.05198, equation 2 and table 3."""
    length, config = (
        2_048,
        models.GPTConfig(
            layers=1, width=width, heads=heads, vocab=64, attention="math", dropout=0.1
        ),
    )
    saved = {
        att: bytes_saved(replace(config, attention=att, dropout=p))
        for att, p in (("math", 0.1), ("fused", 0.0))
    }
    published = length * width * (34 + 5 * heads * length / width)
    assert saved["math"] == pytest.approx(published, rel=0.01)
    assert (
        saved["fused"] < 0.5 * published
    )  # negative control: without masks and T x T numbers it is far from that


def bytes_saved(config: models.DecoderConfig) -> int:
    """The bytes of one row that live from F of a layer to its backward, its input among them; nothing is allocated."""
    work = models.job(config, global_batch=2)
    program = piper.compile(work, piper.Strategy(piper.Mesh())).program
    layer = next(c for c in program.chunks if c.id == "layer0")
    read = {port for step in ("I", "W") for port in layer.steps[step].reads}
    values = {f"in{k}" for k, given in enumerate(layer.inputs) if given.kind == "value"}
    return sum(
        bind(spec.nbytes, 1)
        for name, spec in layer.ports.items()
        if name.startswith("saved") or name in values & read
    )


@pytest.mark.long
def test_dropout_and_attention_written_out_train_what_one_device_trains() -> None:
    config = replace(SMALL["gpt"], layers=2, attention="math", dropout=0.2)
    work = models.job(config, global_batch=8, precision="float64")
    strategy = piper.Strategy(
        piper.Mesh(pp=2, dp=2),
        (*piper.recipes.one_f_one_b(pp=2, microbatches=2), *piper.recipes.data_parallel()),
    )
    run = piper.execute(
        piper.compile(work, strategy), steps=parity.STEPS, launcher="inline", gradients=True
    )
    parity.assert_parity(run, parity.reference(work, replicas=2, microbatches=2))
    other = models.job(replace(config, dropout=0.0), global_batch=8, precision="float64")
    with pytest.raises(AssertionError):
        parity.assert_parity(run, parity.reference(other, replicas=2, microbatches=2))


def test_rows_never_compete_for_an_expert() -> None:
    sizes = SMALL["moe"].experts
    assert sizes is not None
    experts = ExpertLayer(16, sizes).double()
    x = torch.randn(4, 8, 16, dtype=torch.float64)
    torch.testing.assert_close(experts(x)[1:2], experts(x[1:2]), rtol=1e-12, atol=1e-14)


@each_case(
    ("make", "message"),
    [
        (lambda: models.preset("gpt5"), "unknown model 'gpt5'; known are gpt3-175b"),
        (lambda: models.job(7, global_batch=1), "a preset's name or a DecoderConfig"),
        (lambda: models.GPTConfig(layers=0, width=8, heads=2), "layers=0"),
        (lambda: models.GPTConfig(layers=1, width=9, heads=2), "width=9.*multiple of heads=2"),
        (lambda: replace(SMALL["gpt"], attention="flash"), "attention='flash'.*'fused' or 'math'"),
        (lambda: replace(SMALL["gpt"], dropout=1.0), "dropout=1.0.*below 1"),
        (lambda: replace(SMALL["llama"], kv_heads=3), "heads=4.*multiple of kv_heads=3"),
        (lambda: replace(SMALL["llama"], head_dim=5), "heads of 5 elements"),
        (lambda: SMALL["moe"].with_experts(top_k=5), "top_k=5.*there are 4 experts"),
        (lambda: SMALL["moe"].with_experts(capacity_factor=0.0), "capacity_factor=0.0"),
        (lambda: SMALL["gpt"].with_experts(top_k=1), r"with_experts\(top_k\): .* has no experts"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make: object, message: str) -> None:
    with pytest.raises(JobError, match=message):
        make()  # type: ignore[operator]  # the functions above
