"""Protect that a DecoderConfig builds the decoder that it describes, and refuses by name what it cannot build."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from piper import models
from piper.models import DecoderConfig, Experts, Latent
from piper.models.mixture import ExpertLayer
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case
from tests.helpers.decoders import BASE, DECODERS, LATENT, MIXTURE

State = Mapping[str, Tensor]


class Plainly:
    """Compute a decoder head by head and token by token, from the formulas of the papers."""

    def __init__(self, config: DecoderConfig, state: State) -> None:
        self.config, self.state = config, state

    def logits(self, tokens: Tensor, types: Tensor) -> Tensor | tuple[Tensor, ...]:
        by_row = [self.row(*row) for row in zip(tokens, types, strict=True)]
        each = tuple(torch.stack(predicted) for predicted in zip(*by_row, strict=True))
        return each if len(each) > 1 else each[0]

    def row(self, tokens: Tensor, types: Tensor) -> list[Tensor]:
        config, state = self.config, self.state
        x = torch.stack([state["tokens.weight"][t] for t in tokens])
        if config.positions == "learned":
            x = x + state["positions.weight"][: len(tokens)]
        if config.token_types:
            x = x + torch.stack([state["types.weight"][t] for t in types])
        if config.embedding_norm:
            x = self.norm(x, "embedding_norm")
        for layer in range(config.layers):
            x = self.block(x, layer)
        read = [self.norm(x, "norm")]
        for k in range(config.mtp):
            read.append(self.further(read[-1], tokens, k))
        results = [self.predicted(x) for x in read]
        if config.pooled_classes:
            results.append(
                self.product(self.product(read[0][0], "pooled.dense").tanh(), "pooled.head")
            )
        return results

    def further(self, x: Tensor, tokens: Tensor, k: int) -> Tensor:
        """The tokens of a further prediction: behind the last one of a row stands the first."""
        at, length = f"mtp.{k}", len(tokens)
        ahead = [self.state["tokens.weight"][tokens[(i + k + 1) % length]] for i in range(length)]
        both = (
            self.norm(x, f"{at}.norm_tokens"),
            self.norm(torch.stack(ahead), f"{at}.norm_embedding"),
        )
        made = torch.cat(both, -1) @ self.state[f"{at}.project.weight"].T
        return self.norm(self.block(made, self.config.layers + k, f"{at}.block"), f"{at}.norm")

    def predicted(self, x: Tensor) -> Tensor:
        config, state = self.config, self.state
        if config.head_transform:
            y = self.product(x, "transform.dense")
            x = self.norm(y * (1 + (y / math.sqrt(2)).erf()) / 2, "transform.norm")
        head = "tokens" if config.tied else "head"
        y = x @ state[f"{head}.weight"].T
        y = y + state["head.bias"] if config.head_bias else y
        return config.logit_cap * (y / config.logit_cap).tanh() if config.logit_cap else y

    def block(self, x: Tensor, layer: int, at: str = "") -> Tensor:
        at, config = at or f"layers.{layer}", self.config
        before, after = config.norms != "after", config.norms != "before"

        def behind(y: Tensor, name: str) -> Tensor:
            return self.norm(y, f"{at}.{name}") if after else y

        read = self.norm(x, f"{at}.norm1") if before else x
        attended = behind(self.attention(read, layer, f"{at}.attention"), "after1")
        if not (config.parallel and config.parallel_norms == 1):
            middle = x if config.parallel else x + attended
            read = self.norm(middle, f"{at}.norm2") if before else middle
        mixture = config.experts is not None and layer >= config.dense_layers
        fed = (
            self.mixture(read, f"{at}.feed_forward")
            if mixture
            else self.fed(read, f"{at}.feed_forward")
        )
        return x + attended + behind(fed, "after2")

    def product(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.state[f"{name}.weight"].T
        return y + self.state[f"{name}.bias"] if f"{name}.bias" in self.state else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + self.config.eps).sqrt()
        return x * self.state[f"{name}.weight"] + self.state.get(f"{name}.bias", torch.zeros(()))

    def activation(self, x: Tensor) -> Tensor:
        match self.config.activation:
            case "silu":
                return x / (1 + (-x).exp())
            case "gelu":
                return x * (1 + (x / math.sqrt(2)).erf()) / 2
            case "gelu_tanh":
                return x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2
            case "quick_gelu":
                return x / (1 + (-1.702 * x).exp())
            case "relu":
                return x.clamp(min=0)
            case _:
                return x.clamp(min=0) ** 2

    def fed(self, x: Tensor, name: str) -> Tensor:
        up = self.product(x, f"{name}.up")
        gated = f"{name}.gate.weight" in self.state
        hidden = (
            self.activation(self.product(x, f"{name}.gate")) * up if gated else self.activation(up)
        )
        return self.product(hidden, f"{name}.down")

    def mixture(self, x: Tensor, name: str) -> Tensor:
        return torch.stack([self.token_of_mixture(token, name) for token in x])

    def token_of_mixture(self, token: Tensor, name: str) -> Tensor:
        experts, state = self.config.experts, self.state
        assert experts is not None
        scores = self.product(token, f"{name}.router")
        scores = scores.softmax(0) if experts.score == "softmax" else scores.sigmoid()
        size, best = experts.number // experts.groups, 2 if experts.score == "sigmoid" else 1
        of_group = [
            float(scores[g * size : (g + 1) * size].sort(descending=True)[0][:best].sum())
            for g in range(experts.groups)
        ]
        groups = sorted(range(experts.groups), key=lambda g: -of_group[g])[: experts.top_groups]
        allowed = [e for e in range(experts.number) if e // size in groups]
        chosen = sorted(allowed, key=lambda e: -float(scores[e]))[: experts.top_k]
        whole = sum(scores[e] for e in chosen) if experts.normalized else 1
        y = torch.zeros_like(token)
        none = torch.zeros(experts.number, 1)
        for e in chosen:

            def product(x: Tensor, part: str, e: int = e) -> Tensor:
                bias = state.get(f"{name}.{part}_bias", none)
                return x @ state[f"{name}.{part}"][e] + bias[e]

            up = product(token, "up")
            if self.config.gated:
                gate = product(token, "gate")
                if bound := experts.clamp:
                    gate, up = gate.clamp(max=bound), 1 + up.clamp(-bound, bound)
                hidden = self.activation(gate) * up
            else:
                hidden = self.activation(up)
            y = y + experts.scale * scores[e] / whole * product(hidden, "down")
        if experts.shared_hidden:
            shared = self.fed(token, f"{name}.shared")
            gate = (
                self.product(token, f"{name}.shared_gate").sigmoid() if experts.shared_gate else 1
            )
            y = y + gate * shared
        return y

    def attention(self, x: Tensor, layer: int, name: str) -> Tensor:
        config = self.config
        q, k, v = self.latent(x, name) if config.latent else self.heads(x, name)
        groups, results = config.heads // len(k), []
        for h in range(config.heads):
            scores = q[h] @ k[h // groups].T / math.sqrt(q[h].shape[-1])
            for i in range(len(x)):
                for j in range(len(x)):
                    if config.positions == "alibi":
                        scores[i, j] -= slope(h, config.heads) * (i - j)
                    window = config.window_of(layer) or len(x)
                    if config.causal and (j > i or i - j >= window):
                        scores[i, j] = -math.inf
            powers = scores.exp()
            total = powers.sum(-1, keepdim=True)
            if config.sinks:
                total = total + self.state[f"{name}.sinks"][h].exp()
            results.append(powers / total @ v[h // groups])
        return self.product(torch.cat(results, -1), f"{name}.out")

    def heads(self, x: Tensor, name: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        config, dim = self.config, self.config.dim_of_head
        q, k, v = (self.product(x, f"{name}.{p}") for p in "qkv")
        if config.qk_norm and config.qk_norm_over == "all":
            q, k = self.norm(q, f"{name}.norm_q"), self.norm(k, f"{name}.norm_k")
        of_queries, of_keys = list(q.split(dim, -1)), list(k.split(dim, -1))
        if config.qk_norm and config.qk_norm_over == "head":
            of_queries = [self.norm(t, f"{name}.norm_q") for t in of_queries]
            of_keys = [self.norm(t, f"{name}.norm_k") for t in of_keys]
        turned = int(dim * config.rotary_part) if config.positions == "rotary" else 0
        of_queries, of_keys = (
            [torch.cat([self.turned(t[:, :turned]), t[:, turned:]], -1) for t in heads]
            for heads in (of_queries, of_keys)
        )
        return of_queries, of_keys, list(v.split(dim, -1))

    def latent(self, x: Tensor, name: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        sizes = self.config.latent
        assert sizes is not None
        if sizes.q_rank is None:
            q = self.product(x, f"{name}.q")
        else:
            small = self.norm(self.product(x, f"{name}.q_down"), f"{name}.norm_q")
            q = self.product(small, f"{name}.q_up")
        down = self.product(x, f"{name}.kv_down")
        turned = self.turned(down[:, sizes.kv_rank :])
        up = self.product(self.norm(down[:, : sizes.kv_rank], f"{name}.norm_kv"), f"{name}.kv_up")
        nope = sizes.nope_dim
        both = up.split(nope + sizes.value_dim, -1)
        queries = [
            torch.cat([t[:, :nope], self.turned(t[:, nope:])], -1)
            for t in q.split(nope + sizes.rope_dim, -1)
        ]
        keys = [torch.cat([t[:, :nope], turned], -1) for t in both]
        return queries, keys, [t[:, nope:] for t in both]

    def turned(self, x: Tensor) -> Tensor:
        """Elements k and k + half of token p are turned by p x theta ** (-k / half)."""
        half, y = x.shape[-1] // 2, x.clone()
        for p in range(len(x)):
            for k in range(half):
                angle = p * self.config.theta ** (-k / half)
                a, b = x[p, k], x[p, k + half]
                y[p, k] = a * math.cos(angle) - b * math.sin(angle)
                y[p, k + half] = b * math.cos(angle) + a * math.sin(angle)
        return y


def slope(head: int, heads: int) -> float:
    """The slopes of ALiBi: with six heads those of four, and the first and third of eight."""
    return {
        4: [2**-2, 2**-4, 2**-6, 2**-8],
        6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    }[heads][head]


def drawn(config: DecoderConfig) -> models.Decoder:
    """A decoder in float64, angles among it, with numbers that tell its parts apart."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        model = config.build().double()
    finally:
        torch.set_default_dtype(before)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model


ALL_ROOM = [n for n, d in DECODERS.items() if d.experts is None or not d.experts.capacity_factor]
"""The decoders whose experts leave no token out."""


@each_case("name", ALL_ROOM)
def test_a_decoder_is_what_the_formulas_of_the_papers_give(name: str) -> None:
    config = DECODERS[name]
    model = drawn(config)
    tokens = torch.randint(0, config.vocab, (2, config.length))
    types = torch.randint(0, max(config.token_types, 1), (2, config.length))
    expected = Plainly(config, model.state_dict()).logits(tokens, types)
    with torch.no_grad():
        output = model(tokens, types) if config.token_types else model(tokens)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for predicted in (expected,) if isinstance(expected, Tensor) else expected:
        assert float(predicted.std()) > 0.1


def test_the_loss_of_further_tokens_token_by_token() -> None:
    """Equations 24 and 25 of DeepSeek-V3's report: of T tokens, the last k have no token k behind the next one."""
    config = replace(DECODERS["MTP"], mtp_weight=0.7)
    model, rows, length = drawn(config), 3, config.length
    tokens, targets = (torch.randint(0, config.vocab, (rows, length)) for _ in range(2))
    expected = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        output = model(tokens)
        for row in range(rows):
            for ahead, logits in enumerate(output):
                weight = 0.7 / config.mtp if ahead else 1.0
                for i in range(length - ahead):
                    scores = logits[row, i].log_softmax(-1)
                    expected -= weight * scores[targets[row, i + ahead]] / (rows * length)
        loss = models.job(config, global_batch=4).loss
        assert callable(loss)
        torch.testing.assert_close(loss(output, targets), expected, rtol=1e-12, atol=0)


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("Mistral", dict(window=4)),
    "window_every": ("Gemma 3", dict(window_every=1)),
    "theta": ("Llama", dict(theta=1e3)),
    "rotary_part": ("Nemotron", dict(rotary_part=1.0)),
    "parallel": ("Phi", dict(parallel_norms=2)),
    "activation": ("Phi", dict(activation="gelu")),
    "eps": ("Llama", dict(eps=1e-2)),
    "causal": ("GPT-2", dict(causal=False)),
    "scale": ("DeepSeek-V3", dict(experts=replace(MIXTURE, number=8, groups=4, top_groups=2, score="sigmoid",
                                                  shared_hidden=12))),
    "groups": ("DeepSeek-V3", dict(experts=replace(MIXTURE, number=8, score="sigmoid", scale=2.5, shared_hidden=12))),
}  # fmt: skip


@each_case("field", CHANGES)
def test_negative_control_every_field_is_seen(field: str) -> None:
    name, changes = CHANGES[field]
    config = DECODERS[name]
    model = drawn(config)
    tokens = torch.randint(0, config.vocab, (2, config.length))
    other = drawn(replace(config, **changes))
    other.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        assert float((other(tokens) - model(tokens)).abs().max()) > 1e-6


def test_an_encoder_has_the_parameters_of_the_published_one() -> None:
    """BERT large: 336,226,108, as transformers 5.23's BertForPreTraining and MegatronBertForPreTraining have."""
    assert (
        models.parameter_count(models.BERTConfig(layers=24, width=1_024, heads=16)) == 336_226_108
    )


def test_the_loss_of_an_encoder_token_by_token() -> None:
    """The mean over the masked tokens of all rows, which have different numbers of them, and that over rows."""
    job = models.job(DECODERS["BERT"], global_batch=6, precision="float64")
    (tokens, types), (targets, classes) = job.batch(1, range(6))
    wanted = targets != -100
    assert len({int(n) for n in wanted.sum(1)}) > 1 and (tokens[wanted] == 31).all()
    model = drawn(DECODERS["BERT"])
    with torch.no_grad():
        logits, of_rows = model(tokens, types)
        found = [
            logits[row, i].log_softmax(-1)[targets[row, i]] for row, i in wanted.nonzero().tolist()
        ]
        ordered = [of_rows[row].log_softmax(-1)[classes[row]] for row in range(6)]
        expected = -torch.stack(found).mean() - torch.stack(ordered).mean()
        assert callable(job.loss)
        torch.testing.assert_close(
            job.loss((logits, of_rows), (targets, classes)), expected, rtol=1e-12, atol=0
        )
    (again, _), _ = job.batch(1, range(2, 4))
    assert torch.equal(again, tokens[2:4])  # a row is the same in every range


def test_parameters_by_hand() -> None:
    """DeepSeek-V3: 671B, as arXiv 2412.19437 says; its block's parts one by one."""
    config = DecoderConfig(
        layers=61, width=7_168, heads=128, hidden=18_432, vocab=129_280, length=4_096, dense_layers=3,
        latent=Latent(q_rank=1_536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        experts=Experts(
            number=256, top_k=8, hidden=2_048, shared_hidden=2_048, score="sigmoid", groups=8, top_groups=4, scale=2.5
        ),
    )  # fmt: skip
    attention = (
        7_168 * 1_536 + 1_536 + 1_536 * 128 * 192 + 7_168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7_168
    )  # fmt: skip
    mixture = 257 * 3 * 7_168 * 2_048 + 256 * 7_168
    total = 61 * (attention + 2 * 7_168) + 3 * 3 * 7_168 * 18_432 + 58 * mixture
    total += 2 * 129_280 * 7_168 + 7_168
    assert models.parameter_count(config) == total
    assert round(total / 1e9) == 671


def test_a_balanced_mixture_returns_its_loss_once_for_each_mixture() -> None:
    experts = replace(MIXTURE, balance=0.1, score="sigmoid")
    config = replace(BASE, layers=3, dense_layers=1, experts=experts)
    model = drawn(config)
    tokens = torch.randint(0, 32, (3, 8))
    with torch.no_grad():
        logits, balance = model(tokens)
        plain = drawn(replace(config, experts=replace(experts, balance=0.0)))
        torch.testing.assert_close(logits, plain(tokens))
    assert balance.shape == (3,)
    evenly = ExpertLayer(16, experts).double()
    torch.nn.init.zeros_(evenly.router.weight)
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    alike = evenly.scored(x)
    each = torch.arange(16).view(8, 2).remainder(4).expand(3, 8, 2)
    torch.testing.assert_close(evenly.balance(alike, each), torch.ones(3, dtype=torch.float64))


@each_case(
    ("config", "changes", "message"),
    [
        (BASE, dict(layers=0), "layers=0"),
        (BASE, dict(width=18), "width=18.*multiple of heads=4"),
        (BASE, dict(kv_heads=3), "heads=4.*multiple of kv_heads=3"),
        (BASE, dict(head_dim=5), "heads of 5 elements, of which 5 are turned"),
        (BASE, dict(rotary_part=0.3), "of which 1 are turned"),
        (BASE, dict(rotary_part=1.5), "rotary_part=1.5.*a share above 0"),
        (BASE, dict(rotary_part=0.5, positions="none"), "rotary_part=0.5.*positions='rotary'"),
        (BASE, dict(activation="swish"), "activation='swish'.*'silu', 'gelu'"),
        (BASE, dict(gated="yes"), "gated='yes'.*True or False"),
        (BASE, dict(attention="flash"), "attention='flash'.*'fused' or 'math'"),
        (BASE, dict(dropout=1.0), "dropout=1.0.*below 1"),
        (BASE, dict(logit_cap=0.0), "logit_cap=0.0.*above 0"),
        (BASE, dict(logit_cap="x"), "logit_cap=.x..*above 0"),
        (BASE, dict(mtp_weight="x"), "mtp_weight=.x..*above 0"),
        (BASE, dict(eps=0), "eps=0.*above 0"),
        (BASE, dict(parallel=True, norms="after"), "norms='before' is needed"),
        (BASE, dict(parallel_norms=2), "parallel_norms=2.*parallel=True"),
        (BASE, dict(parallel=True, parallel_norms=3), "parallel_norms=3.*1 or 2"),
        (BASE, dict(window_every=2), "window_every=2.*needs a window"),
        (BASE, dict(window=2, positions="alibi"), "window=2.*'rotary', 'learned' or 'none'"),
        (BASE, dict(sinks=True, latent=LATENT, kv_heads=None), "sinks=True.*without `latent`"),
        (BASE, dict(qk_norm_over="all"), "qk_norm_over='all'.*qk_norm=True"),
        (
            BASE,
            dict(qk_norm=True, qk_norm_over="all", norm="layernorm"),
            "qk_norm_over='all'.*norm='rmsnorm'",
        ),
        (BASE, dict(latent=LATENT), "head_dim and kv_heads follow"),
        (BASE, dict(latent=LATENT, kv_heads=None, qk_norm=True), "qk_norm=False and attention_bias='none'"),
        (BASE, dict(latent=LATENT, kv_heads=None, positions="learned"), "positions='rotary'"),
        (BASE, dict(dense_layers=1), "dense_layers=1.*needs `experts`"),
        (BASE, dict(dense_layers=2, experts=MIXTURE), "dense_layers=2.*from 0 to 1"),
        (BASE, dict(mlp_bias=True, experts=MIXTURE), "mlp_bias=True.*Experts.bias=True"),
        (BASE, dict(causal=False, window=3), "causal=False.*window"),
        (BASE, dict(pooled_classes=2, mtp=1), "pooled_classes=2.*without mtp"),
        (BASE, dict(token_types=-1), "token_types=-1"),
        (MIXTURE, dict(bias="yes"), "bias='yes'.*True or False"),
        (MIXTURE, dict(clamp=0.0), "clamp=0.0.*positive number"),
        (BASE, dict(gated=False, experts=replace(MIXTURE, clamp=7.0)), "gated=False.*needs one"),
        (MIXTURE, dict(top_k=5), "top_k=5.*there are 4 experts"),
        (MIXTURE, dict(groups=3), "number=4.*multiple of groups=3"),
        (MIXTURE, dict(groups=2, top_groups=3), "top_groups=3.*there are 2 groups"),
        (MIXTURE, dict(groups=4), "top_k=2.*1 groups of 1 have fewer"),
        (MIXTURE, dict(groups=4, top_groups=2, score="sigmoid"), "groups of at least two"),
        (MIXTURE, dict(capacity_factor=0.0), "capacity_factor=0.0"),
        (MIXTURE, dict(shared_hidden=-1), "shared_hidden=-1.*from 0 on"),
        (MIXTURE, dict(shared_gate=True), "shared_gate=True.*shared_hidden is needed"),
        (MIXTURE, dict(balance=-1.0), "balance=-1.0"),
        (LATENT, dict(rope_dim=3), "rope_dim=3"),
        (LATENT, dict(q_rank=0), "q_rank=0"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused_by_name(
    config: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        replace(config, **changes)
