"""Dropless mixtures train what one device trains, under every schedule, with the memory that the plan says."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
import piper.models.mixture
from piper import Mesh, Precision, Strategy, models, recipes
from piper.api.compiling.compiling import Compiled
from piper.models.mixture import ExpertLayer
from piper_capture.torch_api import replacements
from piper_ir.ground.errors import PiperWarning, SelectorError
from piper_ir.ground.sizes import bind
from piper_ir.verify import verify
from piper_simulator.metrics import model_flops
from tests.helpers import expert_loops, parity
from tests.helpers.cases import each_case
from tests.helpers.memory_judge import lies

SIZES = models.Experts(number=4, top_k=2, hidden=24)
CONFIG = models.DecoderConfig(
    layers=4, width=16, heads=4, kv_heads=2, head_dim=6, hidden=24, vocab=32, length=8, qk_norm=True, experts=SIZES
)  # fmt: skip
SCHEDULES: dict[str, tuple[Mesh, Any]] = {
    "gpipe": (Mesh(pp=2), lambda: recipes.gpipe(pp=2, microbatches=4)),
    "1f1b": (Mesh(pp=2), lambda: recipes.one_f_one_b(pp=2, microbatches=4)),
    "interleaved": (Mesh(pp=2), lambda: recipes.interleaved(pp=2, microbatches=4)),
    "zb_h1": (Mesh(pp=2), lambda: recipes.zb_h1(pp=2, microbatches=4)),
    "zbv": (Mesh(pp=2), lambda: recipes.zbv(pp=2, microbatches=4)),
    "dualpipe": (Mesh(pp=2), lambda: recipes.dualpipe(pp=2, microbatches=4)),
    "dualpipe_v": (Mesh(pp=2), lambda: recipes.dualpipe_v(pp=2, microbatches=4)),
    "one row": (Mesh(), lambda: [piper.split(piper.where(), microbatches=8)]),
    "zero3": (Mesh(dp=2), lambda: [piper.split(piper.where(), microbatches=2), *recipes.data_parallel(zero=3)]),
    "recompute inputs": (Mesh(pp=2), lambda: [*recipes.zbv(pp=2, microbatches=4), piper.recompute(piper.where(), keep="inputs")]),
    "recompute products": (
        Mesh(pp=2), lambda: [*recipes.one_f_one_b(pp=2, microbatches=2), piper.recompute(piper.where(), keep="products")],
    ),
    "tp": (Mesh(tp=2), lambda: [piper.shard(piper.where()), piper.split(piper.where(), microbatches=2)]),
    "tp, tokens": (
        Mesh(tp=2, pp=2), lambda: [piper.shard(piper.where(), stream="tokens"), *recipes.zbv(pp=2, microbatches=2)],
    ),
}  # fmt: skip
LONG = (
    "gpipe",
    "interleaved",
    "zb_h1",
    "dualpipe",
    "dualpipe_v",
    "zero3",
    "recompute products",
    "one row",
    "tp",
)


@functools.cache
def job(**changes: Any) -> piper.Job:
    return models.job(
        replace(CONFIG, **changes), global_batch=8, precision="float64", lr=0.01, clip_norm=0.05
    )


@functools.cache
def compiled(schedule: str) -> Compiled:
    mesh, directives = SCHEDULES[schedule]
    return piper.compile(job(), Strategy(mesh, tuple(directives())))


def assert_trained(made: Compiled, work: piper.Job) -> None:
    """AssertionError where a run differs from one device, or from the plan in a byte of memory."""
    verify(made.plan)
    found = piper.execute(made, steps=2, launcher="inline", gradients=True)
    plan = made.plan
    expected = parity.reference(
        work, replicas=plan.replicas, microbatches=plan.microbatches, steps=2
    )
    parity.assert_parity(found, expected)
    assert not lies(plan, found.memory)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "schedule", [pytest.param(s, marks=[pytest.mark.long] * (s in LONG)) for s in SCHEDULES]
)
def test_it_trains_what_one_device_trains(schedule: str) -> None:
    assert_trained(compiled(schedule), job())


def looped(self: ExpertLayer, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
    """The same by a plain loop over experts."""
    share, chosen = share.flatten(0, 1), chosen.flatten(0, 1)
    tokens, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    for expert in range(self.config.number):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        hidden = F.silu(tokens[token] @ self.gate[expert]) * (tokens[token] @ self.up[expert])
        out = out.index_add(0, token, hidden @ self.down[expert] * share[token, choice, None])
    return out.view_as(x)


def test_a_plan_is_a_plain_loop_over_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge runs the module as it is, which calls the ops; here it runs the loop in their place."""
    found = piper.execute(compiled("1f1b"), steps=2, launcher="inline", gradients=True)
    monkeypatch.setattr(ExpertLayer, "dropless", looped)
    parity.assert_parity(found, parity.reference(job(), replicas=1, microbatches=4, steps=2))


def test_negative_control_a_loop_without_shares_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = piper.execute(compiled("1f1b"), steps=2, launcher="inline", gradients=True)
    routed = ExpertLayer.routed

    def equal(self: ExpertLayer, x: Tensor) -> tuple[Tensor, Tensor]:
        share, chosen = routed(self, x)
        return torch.full_like(share, 0.5), chosen

    monkeypatch.setattr(ExpertLayer, "routed", equal)
    expected = parity.reference(job(), replicas=1, microbatches=4, steps=2)
    assert any(
        "experts" in d.name or "gate" in d.name
        for d in parity.differences(parity.RunOutcome.of(found), expected)
    )


def test_no_token_is_dropped() -> None:
    """With places for all tokens a mixture with a capacity computes the same."""
    torch.manual_seed(3)
    dropless, full = (
        ExpertLayer(16, SIZES).double().requires_grad_(False),
        ExpertLayer(16, replace(SIZES, capacity_factor=4.0)).double(),
    )
    full.requires_grad_(False).load_state_dict(dropless.state_dict())
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    assert float((dropless(x) - full(x)).abs().max()) < 1e-12
    bounded = ExpertLayer(16, replace(SIZES, capacity_factor=0.5)).double().requires_grad_(False)
    bounded.load_state_dict(dropless.state_dict())
    assert float((dropless(x) - bounded(x)).abs().max()) > 1e-4


@pytest.mark.long
def test_experts_without_tokens_have_zeros_as_gradients() -> None:
    """At most 8 of 16 experts are chosen in a layer: two microbatches of one row of 4 tokens."""
    config = replace(CONFIG, layers=1, length=4).with_experts(number=16, top_k=1)
    work = models.job(config, global_batch=2, precision="float64", lr=0.01)
    made = piper.compile(work, Strategy(Mesh(), [piper.split(piper.where(), microbatches=2)]))
    found = piper.execute(made, steps=1, launcher="inline", gradients=True)
    parity.assert_parity(found, parity.reference(work, microbatches=2, steps=1))
    gradients = parity.RunOutcome.of(found).gradients[0][0]
    for name in ("gate", "up", "down"):
        grad = gradients[f"layers.0.feed_forward.{name}"]
        empty = [e for e in range(16) if not grad[e].any()]
        assert grad.shape[0] == 16 and 8 <= len(empty) < 16


def test_steps_and_peaks_are_affine_in_the_rows() -> None:
    program = compiled("one row").program
    chunk = next(c for c in program.chunks if c.id == "layer1")
    for step, of in chunk.steps.items():
        for kernel in of.cost.kernels:
            one, two, three = (bind(kernel.bytes, rows) for rows in (1, 2, 3))
            assert three - two == two - one, (step, kernel.op)
    ops = Counter(k.op for k in chunk.steps["F"].cost.kernels for _ in range(k.count))
    assert ops["grouped_mm"] == 3 and ops["route"] == ops["unroute"] == 1


def test_model_flops_count_the_experts_that_a_token_visits() -> None:
    plan = compiled("1f1b").plan
    experts = CONFIG.layers * SIZES.number * 3 * CONFIG.width * SIZES.hidden
    active = models.parameter_count(CONFIG) - experts // 2
    attention = 12 * CONFIG.layers * CONFIG.heads * 6 * CONFIG.length
    assert model_flops(plan, CONFIG.length) == (6 * active + attention) * 8 * CONFIG.length


def test_devices_that_share_experts_add_up_tokens_and_not_choices() -> None:
    """As in a dense layer: an all-reduce of the tokens for attention, one for the experts, likewise in I, where the
    shares' gradient of two numbers per token is one more."""
    chunk = next(c for c in compiled("tp").plan.chunks if c.id == "layer1")
    tokens = 4 * CONFIG.length * 8  # rows x length x bytes of float64
    sizes = {step: sorted(c.nbytes for c in sig.collectives) for step, sig in chunk.steps.items()}
    assert sizes["F"] == [tokens * CONFIG.width] * 2
    assert sizes["I"] == [tokens * SIZES.top_k, *[tokens * CONFIG.width] * 2]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bfloat16", Precision(params="float32", compute="bfloat16")])
def test_bfloat16_is_near_float64(precision: Any) -> None:
    strategy = Strategy(
        Mesh(), [piper.split(piper.where(), microbatches=2), piper.split_backward(piper.where())]
    )
    one = replace(CONFIG, layers=1)
    small = models.job(one, global_batch=8, precision=precision, lr=0.01)
    found = piper.execute(
        piper.compile(small, strategy), steps=1, launcher="inline", gradients=True
    )
    exact = parity.reference(
        models.job(one, global_batch=8, precision="float64", lr=0.01), microbatches=2, steps=1
    )
    assert found.losses[0] == pytest.approx(exact.losses[0], rel=2e-2)
    mine = {
        name: grad
        for by in parity.RunOutcome.of(found).gradients.values()
        for name, grad in by[0].items()
    }
    for name, grad in exact.gradients[0].items():
        if "feed_forward" in name and "router" not in name:
            assert (
                float(F.cosine_similarity(mine[name].double().flatten(), grad.flatten(), dim=0))
                > 0.99
            ), name


# --- experts of other libraries


def test_a_loop_over_experts_runs_as_it_is_and_says_so() -> None:
    """A replacement would let devices share it; without one autograd runs it, and what it keeps depends on values."""
    work = expert_loops.job(expert_loops.untagged)
    with pytest.warns(
        PiperWarning, match=r"LoopedExperts\).* opaque, .*expert_loops.py.*shard leaves it whole"
    ):
        made = piper.compile(work, Strategy(Mesh(), recipes.zbv(pp=1, microbatches=2)))
    found = piper.execute(made, steps=2, launcher="inline", gradients=True)
    parity.assert_parity(found, parity.reference(work, replicas=1, microbatches=2, steps=2))


def test_a_replacement_makes_the_loop_static() -> None:
    """The judge runs the loop; the parameters' names stay."""
    work = expert_loops.job(expert_loops.tagged)
    made = piper.compile(work, Strategy(Mesh(), recipes.zbv(pp=1, microbatches=2)))
    assert_trained(made, work)
    assert {p.name for p in made.program.params} == dict(
        expert_loops.untagged().named_parameters()
    ).keys()


def test_devices_share_the_hidden_units_of_a_replaced_loop() -> None:
    work = expert_loops.job(expert_loops.tagged)
    made = piper.compile(
        work,
        Strategy(
            Mesh(tp=2), [piper.shard(piper.where()), piper.split(piper.where(), microbatches=2)]
        ),
    )
    layouts = {p.name.rpartition(".")[2]: p.layout for p in made.plan.params}
    assert layouts["gate_up_proj"][0].outer == 2 and layouts["down_proj"][0].dim == 2
    assert_trained(made, work)


class BiasedExperts(nn.Module):
    """GPT-OSS: biases, gate and up in turn, and a bound on both."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(torch.randn(3, *s)) for s in ((4, 12), (6, 4))
        )
        self.gate_up_proj_bias, self.down_proj_bias = (
            nn.Parameter(torch.randn(3, n)) for n in (12, 4)
        )
        self.has_bias = self.is_transposed = True

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both[..., ::2].clamp(max=1.0), both[..., 1::2].clamp(-1.0, 1.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        made = self._apply_gate(
            torch.einsum("nw,ewh->neh", x, self.gate_up_proj) + self.gate_up_proj_bias
        )
        each = torch.einsum("neh,ehw->new", made, self.down_proj) + self.down_proj_bias
        return (
            each * torch.zeros(len(x), 3, dtype=x.dtype).scatter(1, chosen, share)[..., None]
        ).sum(1)


def test_experts_with_biases_are_replaced() -> None:
    module, x = BiasedExperts().double(), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    share, chosen = torch.rand(5, 3, dtype=torch.float64).topk(2, -1)
    leaves = (x, *module.parameters())
    assert not replacements._not_gated(module)
    found, expected = (
        (y := run(module, x, chosen, share), *torch.autograd.grad(y.square().sum(), leaves))
        for run in (replacements.gated_experts, BiasedExperts.forward)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    module.down_proj_bias = nn.Parameter(torch.randn(3, 5))
    assert "biases are not [experts, outputs]" in replacements._not_gated(module)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what a test registers, on which the captures of all later tests would depend."""
    monkeypatch.setattr(replacements, "_KNOWN", dict(replacements._KNOWN))


def with_replacement() -> Any:
    return piper.tag(
        expert_loops.LoopedMixture(), {"layers.*.experts": dict(replace="of_the_user")}
    )


@pytest.mark.long
@pytest.mark.usefixtures("registry")
def test_a_function_of_the_user_is_registered_by_name() -> None:
    """One that is registered anew is captured anew."""

    @piper.replacement("of_the_user")
    def first(module: Any, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        return x * share.sum(-1, keepdim=True)

    work = expert_loops.job(with_replacement)
    wrong = piper.compile(work, Strategy(Mesh(), ()))

    @piper.replacement("of_the_user")
    def second(module: Any, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        rows, counts = torch.ops.piper.route(x, chosen, expert_loops.EXPERTS)
        both = torch.ops.piper.grouped_mm(rows, counts, module.gate_up_proj.transpose(1, 2))
        gate, up = both.chunk(2, dim=-1)
        made = torch.ops.piper.grouped_mm(
            module.act_fn(gate) * up, counts, module.down_proj.transpose(1, 2)
        )
        return torch.ops.piper.unroute(made, chosen, share)

    right = piper.compile(work, Strategy(Mesh(), ()))
    expected = parity.reference(work, steps=1)
    found, other = (
        piper.execute(made, steps=1, launcher="inline", gradients=True) for made in (right, wrong)
    )
    parity.assert_parity(found, expected)
    assert parity.differences(parity.RunOutcome.of(other), expected)


@each_case(
    ("pattern", "name", "message"),
    [
        ("layers.0.experts", "nothing", "no replacement 'nothing'; known are 'gated_experts'"),
        ("layers.0.experts", 3, "no replacement 3"),
        (
            "layers.0.router",
            "gated_experts",
            r"module 'layers.0.router' \(Linear\): it has no gate_up_proj",
        ),
    ],
)
def test_a_replacement_that_cannot_be_is_refused(pattern: str, name: Any, message: str) -> None:
    with pytest.raises(SelectorError, match=message):
        piper.tag(expert_loops.LoopedMixture(), {pattern: dict(replace=name)})


@each_case(
    ("attribute", "value", "message"),
    [
        ("has_gate", False, "its experts have no gate"),
        ("is_transposed", True, "do not fit together"),
        ("_is_expert_parallel", True, "transformers has cut its experts"),
    ],
)
def test_experts_of_another_form_are_refused(attribute: str, value: bool, message: str) -> None:
    model = expert_loops.LoopedMixture()
    setattr(model.layers[1].experts, attribute, value)
    with pytest.raises(SelectorError, match=message):
        piper.tag(model, expert_loops.TAGS)


@pytest.mark.usefixtures("registry")
def test_two_tags_that_disagree_are_refused() -> None:
    piper.replacement("another")(lambda module, *args: args[0])
    with pytest.raises(SelectorError, match=r"disagree for module 'layers.1.experts'"):
        piper.tag(
            expert_loops.LoopedMixture(),
            {**expert_loops.TAGS, "layers.1.experts": dict(replace="another")},
        )


def mixture(family: str, implementation: str) -> Any:
    """A small model of Hugging Face's, as it comes, with its experts tagged."""
    transformers = pytest.importorskip(
        "transformers", reason="Hugging Face's modules: transformers is not installed"
    )
    sizes = dict(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        num_experts_per_tok=2, intermediate_size=24, attn_implementation="sdpa", max_position_embeddings=16,
    )  # fmt: skip
    if family == "mixtral":
        config, kind = (
            transformers.MixtralConfig(num_local_experts=4, **sizes),
            transformers.MixtralForCausalLM,
        )
    else:
        config = transformers.Qwen3MoeConfig(
            num_experts=4, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True, **sizes
        )
        kind = transformers.Qwen3MoeForCausalLM
    config._experts_implementation = implementation
    return piper.tag(
        kind(config), {"model.layers.*.mlp.experts": dict(experts=0, replace="gated_experts")}
    )


def text(step: int, rows: range) -> Any:
    tokens = torch.stack(
        [
            torch.randint(32, (9,), generator=torch.Generator().manual_seed(100 * step + r))
            for r in rows
        ]
    )
    return {"input_ids": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


def of_logits(out: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.reshape(-1, 32), targets.reshape(-1))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_of_hugging_face_train_as_they_do(family: str) -> None:
    """The judge runs their own loop. Routers compute in float32 inside, so the tolerance is that of float32."""
    pytest.importorskip(
        "transformers", reason="Hugging Face's modules: transformers is not installed"
    )
    work = piper.Job(
        functools.partial(mixture, family, "eager"), text, of_logits, expert_loops.optimizer, global_batch=4,
        precision=Precision(params="float64"), tokens_per_row=8,
    )  # fmt: skip
    shared = [*recipes.expert_parallel(bound=0.8), *recipes.data_parallel(over=("ep",))]
    for mesh, directives in ((Mesh(pp=2), []), (Mesh(pp=2, ep=2), shared)):
        made = piper.compile(
            work,
            Strategy(
                mesh, [*directives[:1], *recipes.one_f_one_b(pp=2, microbatches=2), *directives[1:]]
            ),
        )
        found = piper.execute(made, steps=2, launcher="inline", gradients=True)
        expected = parity.reference(work, replicas=made.plan.replicas, microbatches=2, steps=2)
        parity.assert_parity(found, expected, parity.FLOAT32)
        assert not lies(made.plan, found.memory)
    grouped = replace(work, model=functools.partial(mixture, family, "grouped_mm"))
    assert (
        piper.compile(grouped, Strategy(Mesh(), ())).program.key
        == piper.compile(work, Strategy(Mesh(), ())).program.key
    )
