"""Values of the wrong kind are refused by name, in Python and on the command line; none is a traceback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper import models, recipes
from piper.api.ground.results import new_folder
from piper.api.problems.fixed_trial import FixedTrial
from piper.cli.options import searchers
from piper_ir.ground.errors import (
    ClusterError,
    DirectiveError,
    JobError,
    PiperError,
    PlanError,
    TuneError,
)
from tests.helpers.cases import each_case
from tests.helpers.command_line import command, fails

PROGRAM = piper.synthetic(stages=2, F=1.0, I=1.0, W=1.0, params=64)
STRATEGY = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))
COMPILED = piper.compile(PROGRAM, STRATEGY)
PLAN = COMPILED.plan
H100 = piper.load_cluster("h100x2")
HUGE = 10**400
MANY = "9" * 5000
ANY: Any = piper
"""Takes arguments that a type checker would refuse."""


def tuned(**arguments: Any) -> Any:
    return piper.tune(
        PROGRAM,
        lambda trial: STRATEGY,
        **{"cluster": "h100x2", "trials": 1, "workers": 0} | arguments,
    )


def gpipe(**arguments: Any) -> Any:
    return recipes.gpipe(**arguments)


def compiled(**arguments: Any) -> Any:
    return piper.compile(PROGRAM, STRATEGY, **arguments)


def decoder(**fields: Any) -> Any:
    return models.DecoderConfig(**{"layers": 2, "width": 8, "heads": 2, "hidden": 4} | fields)


def experts(**fields: Any) -> Any:
    return models.Experts(**{"number": 4, "top_k": 1, "hidden": 4} | fields)


CALLS: list[tuple[Callable[[], object], type[PiperError], str]] = [
    (
        lambda: replace(H100, slow_ranks={"1": 2.0}),
        ClusterError,
        "slow_ranks: '1' stands here; a whole number from 0 on",
    ),
    (
        lambda: replace(H100, slow_ranks={1.5: 2.0}),
        ClusterError,
        "slow_ranks: 1.5 stands here; a whole number",
    ),
    (
        lambda: replace(H100, slow_ranks={True: 2.0}),
        ClusterError,
        "slow_ranks: True stands here; a whole number",
    ),
    (
        lambda: replace(H100, slow_ranks={0: HUGE}),
        ClusterError,
        "slow_ranks.0: an integer of 1329 bits stands here",
    ),
    (
        lambda: replace(H100.device, memory_bandwidth=HUGE),
        ClusterError,
        "memory_bandwidth: an integer of 1329 bits",
    ),
    (
        lambda: ANY.Cluster(((1, "h100"),), H100.network),
        ClusterError,
        r"nodes\[0\]: .*\(how many, piper\.Device\), is needed",
    ),
    (lambda: ANY.Cluster((H100.device,), H100.network), ClusterError, r"nodes\[0\]: a Device"),
    (lambda: ANY.Cluster(3, H100.network), ClusterError, "nodes: a int stands here"),
    (
        lambda: ANY.Cluster(H100.nodes, 3),
        ClusterError,
        r"network: a int stands here; a piper\.Network",
    ),
    (
        lambda: ANY.Cluster(((HUGE, H100.device),), H100.network),
        ClusterError,
        "an integer of 1329 bits stands here",
    ),
    (
        lambda: ANY.load_cluster(None),
        ClusterError,
        "a NoneType names no cluster; a name such as h100x8",
    ),
    (
        lambda: piper.load_cluster(f"h100x{MANY}"),
        ClusterError,
        r"cluster h100x9+\.\.\.: at most \d+ devices",
    ),
    (lambda: piper.load_cluster(f"h100x8*{MANY}"), ClusterError, "at most"),
    (lambda: piper.load_cluster("h100x²"), ClusterError, "unknown cluster"),
    (lambda: ANY.simulate(PLAN, 3), PiperError, "a int names no cluster"),
    (lambda: ANY.why(PLAN, 3), PiperError, "a int names no cluster"),
    (lambda: ANY.simulate(PLAN, steps="2"), PlanError, r"simulate\(steps='2'\): at least one step"),
    (lambda: ANY.why(PLAN, draws="2"), PlanError, r"why\(draws='2'\)"),
    (
        lambda: ANY.simulate(PLAN, cluser="h100x2"),
        PlanError,
        "no argument 'cluser'; did you mean 'cluster'",
    ),
    (
        lambda: ANY.why(PLAN, cluser="h100x2"),
        PlanError,
        "no argument 'cluser'; did you mean 'cluster'",
    ),
    (
        lambda: ANY.execute(PLAN, steps=1),
        JobError,
        "a Plan stands here; the result of piper.compile",
    ),
    (lambda: ANY.execute(COMPILED, 3, steps=1), JobError, "a int stands in place of a piper.Job"),
    (lambda: ANY.simulate(COMPILED, H100), PlanError, r"simulate: a Compiled stands .*\.plan is"),
    (lambda: ANY.why(None, H100), PlanError, "why: a NoneType stands here"),
    (lambda: ANY.save_strategy(3, "x"), DirectiveError, "save_strategy: a int stands here"),
    (lambda: models.hugging_face(ANY), JobError, "hugging_face: .*; a DecoderConfig is needed"),
    (lambda: recipes.gpipe(pp=2), DirectiveError, "gpipe: microbatches=, or rows= of a microbatch"),
    (
        lambda: gpipe(microbatch=2),
        DirectiveError,
        "'microbatch'; it takes pp, microbatches, at, rows",
    ),
    (
        lambda: recipes.scheduled([], microbatches=1),
        DirectiveError,
        "scheduled: None stands",
    ),
    (lambda: compiled(options={"fuse": True}), PiperError, "the options are a dict; piper.Options"),
    (
        lambda: ANY.Options(recv_ahead="2"),
        PiperError,
        r"recv_ahead='2'\): an integer of at least 0",
    ),
    (lambda: ANY.Options(device="tpu"), PiperError, r"device='tpu'\): 'cpu', 'cuda' or ''"),
    (lambda: ANY.tag(torch.nn.ReLU(), {"...": 0}), PiperError, r"tag '\.\.\.': 0 stands here"),
    (lambda: decoder(latent={"kv_rank": 2}), JobError, r"latent=.*: piper\.models\.Latent or None"),
    (lambda: decoder(experts={"number": 2}), JobError, r"experts=.*: piper\.models\.Experts or"),
    (lambda: decoder(head=2), JobError, "no argument 'head'; did you mean 'heads'"),
    (lambda: experts(capacity_factor="1"), JobError, r"capacity_factor='1'\): a positive number"),
    (lambda: experts(clamp="7"), JobError, r"clamp='7'\): a positive number"),
    (lambda: experts(scale="1"), JobError, r"scale='1'\): a number from 0 on"),
    (lambda: experts(hiden=2), JobError, "no argument 'hiden'; did you mean 'hidden'"),
    (lambda: ANY.compare(1, 2), PlanError, r"compare: a int was given; two results of piper\.why"),
    (lambda: tuned(trial=1), TuneError, "no argument 'trial'; did you mean 'trials'"),
    (lambda: tuned(timeout_s="5"), TuneError, r"tune\(timeout_s='5'\): seconds above 0"),
    (lambda: tuned(timeout_s=float("nan")), TuneError, r"tune\(timeout_s=nan\)"),
    (lambda: tuned(cluster=3), ClusterError, "a int names no cluster"),
    (lambda: searchers("²"), JobError, "--workers ²: a number of processes"),
    (lambda: searchers(MANY), JobError, "a number of processes"),
    (lambda: FixedTrial({"m": "²"}, "-p").suggest_int("m", 1, 4), JobError, "an integer in 1..4"),
    (lambda: FixedTrial({"m": "--2"}, "-p").suggest_int("m", 1, 4), JobError, "an integer in 1..4"),
    (lambda: FixedTrial({"m": MANY}, "-p").suggest_int("m", 1, 4), JobError, "an integer in 1..4"),
]


@each_case(("call", "kind", "says"), CALLS)
def test_a_wrong_value_is_refused_by_name(
    call: Callable[[], object], kind: type[PiperError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        call()


def test_paths_may_be_texts(tmp_path: Path) -> None:
    path, costs = f"{tmp_path}/costs.json", piper.Costs(rows=3)
    piper.save_costs(path, costs)
    assert piper.load_costs(path) == piper.load_costs(Path(path)) == costs
    file = tmp_path / "lab.toml"
    file.write_text('device = "h100-80g-sxm"\nnodes = { count = 1, devices = 2 }\n')
    assert (
        piper.simulate(PLAN, file).step_s
        == piper.simulate(PLAN, str(file)).step_s
        == piper.why(PLAN, file).step_s
    )


def test_other_folders_beside_those_of_results_are_no_numbers(tmp_path: Path) -> None:
    for name in ("run-²", "run-007", f"run-{'9' * 200}"):
        (tmp_path / name).mkdir()
    assert new_folder(tmp_path, "run").name == "run-008"


@each_case(
    "value",
    [
        "devices = 8, count = 1" + "0" * 400,
        "devices = 8, count = 1" + "0" * 5000,
        'devices = 8, count = "1"',
    ],
)
def test_a_number_that_no_cluster_has_is_one_message_of_the_command(
    value: str, tmp_path: Path
) -> None:
    file = tmp_path / "big.toml"
    file.write_text(f'device = "h100-80g-sxm"\nnodes = {{ {value} }}\n')
    fails(command("simulate", "examples/own_model.py", "--cluster", file), str(file))
