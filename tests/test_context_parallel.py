"""Devices that share the tokens of all ops compute what one device computes: context parallelism by heads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import piper
from piper import Mesh, recipes
from piper_compiler import Strategy
from piper_ir.errors import DirectiveError
from piper_ir.select import where
from piper_runtime.launch.processes import Pool
from tests import parity, shared_jobs
from tests.test_memory_truth import lies

TOKENS = piper.shard(where(), over="cp", index="tokens")
HEADS = piper.shard(where(), over="tp")
BOTH = piper.shard(where(), over="tp", stream="tokens")
CASES: dict[str, tuple[str, Mesh, list[Any]]] = {
    "cp": ("gpt", Mesh(cp=2), [TOKENS]),
    "more devices than heads of keys": ("few_kv_heads", Mesh(cp=4), [TOKENS]),
    "tp": ("llama", Mesh(cp=2, tp=2), [HEADS, TOKENS]),
    "tp and its tokens, 1f1b": ("gpt", Mesh(cp=2, tp=2, pp=2), [BOTH, TOKENS, recipes.one_f_one_b(pp=2, microbatches=2)]),
    "zero 3": ("llama", Mesh(cp=2, tp=2, dp=2), [HEADS, TOKENS, recipes.data_parallel(zero=3)]),
    "recompute": ("few_kv_heads", Mesh(cp=2), [TOKENS, piper.recompute(where(layer=piper.ANY), keep="inputs")]),
    "zbv": ("llama", Mesh(cp=2, pp=2, dp=2), [TOKENS, recipes.zbv(pp=2, microbatches=2), recipes.data_parallel(zero=2)]),
}


def compiled(name: str, mesh: Mesh, directives: list[Any]) -> Any:
    return piper.compile(shared_jobs.job(name), Strategy(mesh, directives))


@pytest.mark.parametrize("case", CASES)
def test_shared_tokens_are_one_device(case: str) -> None:
    name, mesh, directives = CASES[case]
    made = compiled(name, mesh, directives)
    found = shared_jobs.run(made)
    shared_jobs.assert_equal(name, made, found)
    assert not lies(made.plan, found.memory)


def test_in_processes(pool: Pool) -> None:
    made = compiled("gpt", Mesh(cp=2, tp=2), [HEADS, TOKENS])
    found = shared_jobs.run(made, launcher="processes", pool=pool)
    shared_jobs.assert_equal("gpt", made, found)
    assert not lies(made.plan, found.memory)


def test_a_layer_exchanges_four_times_in_each_direction() -> None:
    """Queries, keys, values and the result of attention; in the backward their gradients. Nothing else crosses."""
    made = compiled("llama", Mesh(cp=2), [TOKENS])
    chunk = next(c for c in made.plan.chunks if c.id == "layer1")
    inside = {step: Counter(c.kind for c in sig.collectives) for step, sig in chunk.steps.items()}
    assert inside == {"F": Counter(all_to_all=4), "I": Counter(all_to_all=4), "W": Counter()}


def test_gradients_of_all_weights_are_sums_over_tokens() -> None:
    made = compiled("gpt", Mesh(cp=2), [TOKENS])
    assert {p.summed for p in made.plan.params} == {("cp",)} and not any(p.layout for p in made.plan.params)
    assert {b.over for b in made.plan.buckets} == {("cp",)}


def test_tokens_of_another_device_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each device takes the other one's tokens, positions are wrong."""
    made = compiled("gpt", Mesh(cp=2), [TOKENS])
    exported = type(made.code).export

    def swap(code: Any) -> Any:
        return replace(code, source=code.source.replace("PLACE['cp']", "(1 - PLACE['cp'])", 1))

    def swapped(store: Any, codes: Any, rows: int) -> Any:
        return {k: {step: swap(code) for step, code in v.items()} for k, v in exported(store, codes, rows).items()}

    monkeypatch.setattr(type(made.code), "export", swapped)
    found = shared_jobs.run(made)
    wrong = parity.differences(parity.RunOutcome.of(found), shared_jobs.expected("gpt", 1, 1, made.plan.chunks[-1].id))
    assert wrong


def test_another_way_of_attention_is_refused() -> None:
    ring = piper.shard(where(), over="cp", index="tokens", attention="ring")
    with pytest.raises(DirectiveError, match="attention='ring'; \"heads\" is accepted"):
        compiled("gpt", Mesh(cp=2), [ring])
