"""What `shard` cannot do is refused by one message, in Python and on the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import piper
from piper import Mesh, Strategy, recipes
from piper_compiler.directives.shard import Shard
from piper_ir.ground.errors import CompileError, DirectiveError
from piper_ir.ground.select import where
from tests.helpers import compositions, parity
from tests.helpers.cases import each_case
from tests.helpers.command_line import command, fails
from tests.helpers.compositions import Composition
from tests.helpers.source_tree import ROOT

ANY: Any = piper.shard
"""Takes arguments that a type checker would refuse."""
ANY_SEQUENCE: Any = "yes"
PAIR = Mesh(tp=2)
CASE = Composition("gpt_untied", microbatches=2)

REFUSED: list[tuple[Callable[[], Any], Mesh, str]] = [
    (
        lambda: ANY(where(), hidden="tp"),
        PAIR,
        "hidden='tp': it says .* use stream=.rows., .* condition 15",
    ),
    (
        lambda: ANY(where(), over=5),
        PAIR,
        r"shard\(where\(\), over=5\) at .*: over=5; one of cp, dp, .* condition 2",
    ),
    (lambda: ANY(where(), over=("tp", "dp")), PAIR, "over=.*tp.*; one of cp, dp"),
    (lambda: ANY(where(), over=["tp", "dp"]), PAIR, "over=.*tp.*; one of cp, dp"),
    (lambda: ANY(where(), over="tp.0"), PAIR, "over='tp.0'; one of cp, dp"),
    (lambda: ANY(where(), over="xp"), Mesh(), "over='xp'; one of cp, dp"),
    (lambda: ANY(where(), stream=None), PAIR, 'stream=None; "", "tokens" or "rows" is accepted'),
    (lambda: ANY(where(), stream=["tokens"]), PAIR, r"stream=\['tokens'\]; "),
    (lambda: ANY(where(), keep="yes"), PAIR, "keep='yes'; True or False is accepted"),
    (lambda: ANY(where(), keep=1), PAIR, "keep=1; True or False is accepted"),
    (
        lambda: ANY(where(), index=5),
        PAIR,
        "index=5; the name of an index, or a tuple of names, is accepted",
    ),
    (
        lambda: ANY(where(), index=["heads"]),
        PAIR,
        r"index=\['heads'\]; the name of an index, or a tuple of names, is accepted",
    ),
    (
        lambda: ANY(where(), attention="rings"),
        PAIR,
        'attention=\'rings\'; "heads", "ring" or "gather" is accepted',
    ),
    (
        lambda: ANY(where(), index="tokens", order="zag"),
        PAIR,
        'order=\'zag\'; "zigzag" or "blocks" is accepted',
    ),
    (
        lambda: ANY(where(), attention="ring"),
        PAIR,
        "attention='ring' says how the tokens of attention are shared; write index=",
    ),
    (
        lambda: ANY(where(), order="blocks"),
        PAIR,
        "order='blocks' says how the tokens of attention are shared; write index=",
    ),
    (
        lambda: recipes.tensor_parallel(sequence=ANY_SEQUENCE),
        PAIR,
        r"sequence='yes'\): True or False is accepted",
    ),
    (
        lambda: ANY(where(), sms=4),
        PAIR,
        'channel and sms are for exchanges between chunks: use stream="rows" or cut=True',
    ),
    (lambda: ANY(where(), cut=1), PAIR, r"cut=1; True or False is accepted \[shard condition 14\]"),
    (
        lambda: ANY(where(), cut=True, stream="tokens"),
        PAIR,
        "cut=True and stream='tokens': only sums are made between chunks",
    ),
    (
        lambda: ANY(where(), cut=True, index="tokens"),
        PAIR,
        "cut=True and index='tokens': only sums are made between chunks",
    ),
    (
        lambda: ANY(where(), cut=True, keep=True),
        PAIR,
        "cut=True and keep=True: only sums are made between chunks",
    ),
    (
        lambda: (piper.shard(where(), cut=True), piper.shard(where(), over="cp", index="tokens")),
        Mesh(tp=2, cp=2),
        r"cut=True beside shard\(where\(\), over='cp', index='tokens'\): only one of the two can "
        r"be",
    ),
    (lambda: ANY(where(), pieces=0), PAIR, "pieces=0; a number from 1 on is accepted"),
    (lambda: ANY(where(), pieces="2"), PAIR, "pieces='2'; a number from 1 on is accepted"),
    (
        lambda: ANY(where(), pieces=2),
        PAIR,
        r'pieces=2: tokens are gathered .* write it with stream="tokens", .* \[shard condition 16\]',
    ),
    (
        lambda: ANY(where(), stream="tokens", pieces=3),
        PAIR,
        "pieces=3: a device has 4 tokens along tp, which are not 3 equal pieces; 2 would be",
    ),
    (
        lambda: ANY(where(), beside=True),
        PAIR,
        r'beside=True; True or False .* with stream="rows" alone \[shard condition 17\]',
    ),
    (lambda: ANY("x"), PAIR, r"the selection is 'x'; where\(\) is accepted"),
    (
        lambda: piper.shard(where(layer=0)),
        PAIR,
        "of 10 nodes are selected; devices share all chunks or none",
    ),
    (
        lambda: (piper.shard(where()), piper.shard(where())),
        PAIR,
        r"shard\(where\(\)\) shares the same already, over tp",
    ),
    (
        lambda: (piper.shard(where()), piper.shard(where(), over="cp")),
        Mesh(tp=2, cp=2),
        r"over='cp'\).*: shard\(where\(\)\) shares the same already, over tp; keep one of the two "
        r"\[shard condition "
        r"5\]",
    ),
    (
        lambda: (piper.shard(where(), over="dp"), recipes.data_parallel()),
        Mesh(dp=2),
        r"replicate.*devices share the chunks over dp \(by shard\).*\[replicate condition 9\]",
    ),
    (
        lambda: (piper.shard(where(), over="pp"), recipes.one_f_one_b(pp=2, microbatches=2)),
        Mesh(pp=2),
        r"place.*devices share the chunks over pp \(by shard\).*\[place condition 7\]",
    ),
    (
        lambda: (piper.split(where(), microbatches=2), piper.shard(where())),
        PAIR,
        "another directive stands before it",
    ),
]


@each_case(("directives", "mesh", "message"), REFUSED)
def test_what_is_wrong_is_one_message(
    directives: Callable[[], Any], mesh: Mesh, message: str
) -> None:
    compositions.captured(CASE.model)
    with pytest.raises(DirectiveError, match=message):
        piper.compile(compositions.job_of(CASE), Strategy(mesh, (directives(),)))


ELSEWHERE = {
    4: "a program without code",
    8: "names",
    9: "tokens",
    10: "optimizers",
    12: "experts",
    13: "dropless mixtures",
}
"""The conditions that need a program or a job to be seen, each with its test below, in
tests/parity/test_tensor_parallel.py or in tests/cli/test_experts_refused.py."""


def conditions(text: str) -> dict[int, str]:
    """The numbered conditions in a text; a line that goes on is put in one piece."""
    found = re.findall(r"^ ?(\d+)\. (.*(?:\n {3,}.*)*)", text, re.MULTILINE)
    return {int(number): " ".join(said.split()) for number, said in found}


def test_conditions_are_those_of_the_document() -> None:
    written = conditions(str(inspect.getmodule(Shard).__doc__).split("Legality")[1])
    section = (ROOT / "docs" / "shard.md").read_text().split("## Conditions")[1].split("\n## ")[0]
    assert list(written) == list(range(1, len(written) + 1)) and conditions(section) == written


def test_every_condition_is_refused() -> None:
    compositions.captured(CASE.model)
    seen = set()
    for directives, mesh, _ in REFUSED:
        with pytest.raises(DirectiveError) as caught:
            piper.compile(compositions.job_of(CASE), Strategy(mesh, (directives(),)))
        seen |= set(map(int, re.findall(r"\[shard condition (\d+)\]", str(caught.value))))
    written = conditions(str(inspect.getmodule(Shard).__doc__).split("Legality")[1])
    assert seen | ELSEWHERE.keys() == written.keys() and not seen & {8, 9, 10, 12, 13}


TOKENS = piper.shard(where(), over="cp", index="tokens")


@each_case(
    ("model", "mesh", "directive", "message"),
    [
        (
            "gpt_untied",
            PAIR,
            piper.shard(where(), index="heads_"),
            "there is no such index; there is vocab, heads, hidden",
        ),
        (
            "gpt_untied",
            PAIR,
            piper.shard(where(), index="width"),
            r"^shard\(where\(\), index='width'\) at test_shard_refused.py:\d+: .*"
            r"devices cannot share it in .*: it passes between chunks",
        ),
        (
            "gpt_untied",
            Mesh(tp=5),
            piper.shard(where(), index="hidden"),
            "5 devices cannot share 64 evenly; 4 can",
        ),
        (
            "gpt_untied",
            Mesh(tp=5),
            piper.shard(where(), stream="tokens"),
            "8 tokens cannot be shared by 5 devices",
        ),
        ("gpt_untied", Mesh(cp=5), TOKENS, "8 tokens cannot be shared by 5 devices"),
        (
            "gpt_untied",
            Mesh(cp=2, tp=8),
            (
                piper.shard(where(), stream="tokens"),
                piper.shard(where(), over="cp", index="tokens", order="zigzag"),
            ),
            "each has two blocks; a multiple of 32 tokens would be accepted",
        ),
        (
            "opaque",
            PAIR,
            piper.shard(where(), stream="tokens"),
            'opaque region, .* and stream="tokens" shares them; leave',
        ),
        (
            "opaque",
            Mesh(cp=2),
            TOKENS,
            r"opaque region, .* and shard\(index=\"tokens\", over='cp'\) shares them; leave",
        ),
    ],
)
def test_what_a_model_does_not_have_is_refused(
    model: str, mesh: Mesh, directive: Any, message: str
) -> None:
    compositions.captured(model)
    with pytest.raises(DirectiveError, match=message):
        piper.compile(compositions.job_of(replace(CASE, model=model)), Strategy(mesh, (directive,)))


def test_an_optimizer_of_whole_parameters_is_refused() -> None:
    compositions.captured(CASE.model)
    job = compositions.job_of(replace(CASE, optimizer="adafactor"))
    with pytest.raises(
        CompileError, match=r"a part of parameter 'embed.weight' \(by shard\), and Adafactor .*"
    ):
        piper.compile(job, Strategy(PAIR, (piper.shard(where()),)))
    piper.compile(job, Strategy(Mesh(cp=2), (TOKENS,)))  # which has all parameters whole


def test_devices_along_an_axis_without_shard_have_nothing_to_do() -> None:
    compositions.captured(CASE.model)
    with pytest.raises(
        CompileError,
        match="the mesh has tp=2 but no directive uses tp; shard or replicate over it, place on it",
    ):
        piper.compile(compositions.job_of(CASE), Strategy(PAIR))


@pytest.mark.parametrize(
    ("axis", "stream"),
    [
        pytest.param(axis, stream, marks=[pytest.mark.long] * (axis + stream != "cptokens"))
        for axis in ("cp", "ep", "dp", "rep", "pp")
        for stream in ("", "tokens")
    ],
)
def test_every_axis_may_be_shared(axis: str, stream: str) -> None:
    """An axis is a name: devices along any of them do as those along tp."""
    compositions.captured(CASE.model)
    made = piper.compile(
        compositions.job_of(CASE),
        Strategy(Mesh(**{axis: 2}), (piper.shard(where(), over=axis, stream=stream),)),
    )
    assert made.plan.shared == (axis,)
    c = Composition(CASE.model, rows=4)
    found = compositions.run(c, made.plan)
    parity.assert_parity(found, compositions.expected(c))


def test_an_axis_of_one_device_changes_nothing() -> None:
    compositions.captured(CASE.model)
    job = compositions.job_of(CASE)
    plans = [
        piper.compile(job, Strategy(Mesh(tp=1), shards)).plan
        for shards in ((), (piper.shard(where()),))
    ]
    assert plans[0].key == plans[1].key


SCRIPT = """
import piper
job = piper.models.job(piper.models.GPTConfig(layers=2, width=16, heads=2, vocab=32, length=8), global_batch=4)
strategy = piper.Strategy(piper.Mesh(tp=2), [piper.shard(piper.where(), stream="columns")])
"""


def test_the_command_says_it_in_one_message(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    fails(
        command("verify", path),
        'train.py:4: stream=\'columns\'; "", "tokens" or "rows" is accepted',
    )
