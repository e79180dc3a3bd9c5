"""Compare the speed of this tree with that of another commit, by pairs in turn.

git worktree add ../before COMMIT
python benchmarks/compare_trees.py ../before                      all cases, nine pairs each
python benchmarks/compare_trees.py ../before --pairs 5 compile     some cases

One process per tree serves both sides of every pair, so a machine that changes its speed slows both. Times are CPU
seconds of the process, without garbage of the call before. A ratio above 1 means that this tree is faster.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _timed(call: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    call()
    return time.process_time() - begin


@cache
def _layers(microbatches: int) -> tuple[Any, Any]:
    """Return 24 layers of 30 parameters each on 8 stages, and 1F1B for them."""
    from packages.compiler.tests.compile_cases import layered
    from piper_compiler import Strategy, recipes
    from piper_ir.ground.mesh import Mesh

    return layered(24), Strategy(Mesh(pp=8), recipes.one_f_one_b(pp=8, microbatches=microbatches))


@cache
def _preset(name: str, dp: int) -> tuple[Any, Any]:
    """Return a preset and 1F1B on 16 stages times dp replicas, with 128 microbatches."""
    import piper
    from piper import models
    from piper_compiler import Strategy, recipes
    from piper_ir.ground.mesh import Mesh

    job = models.job(name, global_batch=128 * dp)
    directives = [
        *recipes.one_f_one_b(pp=16, microbatches=128),
        *recipes.data_parallel(over=("dp",)),
    ]
    strategy = Strategy(Mesh(pp=16, dp=dp), directives)
    piper.compile(job, strategy)  # later calls find the capture
    return job, strategy


@cache
def _score_case(gpt: bool) -> tuple[Any, Any, int | None, Any]:
    """Return program, strategy, batch and cluster of a plan of about 5,000 instructions, 1F1B with 8 stages.

    It has a chunk of given seconds per stage, or is a captured GPT whose gradients are reduced in buckets.
    """
    from piper import models
    from piper.api.captures.capturing import captured_job
    from piper_compiler import Strategy, recipes, synthetic
    from piper_ir.ground.mesh import Mesh
    from piper_simulator import load_cluster

    pipeline = recipes.one_f_one_b(pp=8, microbatches=112)
    if not gpt:
        program = synthetic(stages=8, F=3, I=4, W=2, params=100)
        return program, Strategy(Mesh(pp=8), pipeline), None, None
    sizes = models.GPTConfig(layers=24, width=64, heads=2, vocab=256, length=32)
    both = (*pipeline, *recipes.data_parallel(bucket_mb=0.1))
    program = captured_job(models.job(sizes, global_batch=448)).program
    return program, Strategy(Mesh(pp=8, dp=2), both), 448, load_cluster("h100x8*2")


def _score(gpt: bool) -> float:
    """Take a strategy to period, makespan and peaks, as the tuner does."""
    from piper_compiler import compile_program
    from piper_ir.tools import no_garbage_collection
    from piper_simulator import DeviceModel, step_and_period_alone

    program, strategy, batch, cluster = _score_case(gpt)

    def scored() -> None:
        with no_garbage_collection():
            lowered = compile_program(program, strategy, global_batch=batch)
            model = DeviceModel(lowered.plan, cluster, None)
            step_and_period_alone(lowered.prepared, model, lowered.plan)

    return _timed(scored)


def _compile(microbatches: int) -> float:
    from piper_compiler import compile_program

    return _timed(partial(compile_program, *_layers(microbatches)))


def _verify(microbatches: int) -> float:
    from piper_compiler import compile_program
    from piper_ir.verify import verify

    return _timed(partial(verify, compile_program(*_layers(microbatches)).plan))


def _compile_preset(name: str, dp: int) -> float:
    import piper

    return _timed(partial(piper.compile, *_preset(name, dp)))


def _verify_preset(name: str, dp: int) -> float:
    import piper
    from piper_ir.verify import verify

    return _timed(partial(verify, piper.compile(*_preset(name, dp)).plan))


def _capture_transformers(layers: int) -> float:
    """Trace a Llama of transformers' with the widths of 8B."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM

    from piper_capture import trace

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=layers, use_cache=False)

    def batch(rows: range) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tokens = torch.zeros(len(rows), 129, dtype=torch.long)
        return {"input_ids": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    return _timed(partial(trace, partial(LlamaForCausalLM, config), batch, loss))


@cache
def _trained(kind: str) -> tuple[Any, Any]:
    """Return a job of a small model, and a strategy: one device, tensor parallelism, or dropless experts."""
    from piper import models
    from piper_compiler import Strategy, recipes, replicate, shard
    from piper_ir.ground.mesh import Mesh
    from piper_ir.ground.select import where

    sizes: dict[str, Any] = {"layers": 4, "width": 256, "heads": 4, "vocab": 1024, "length": 128}
    if kind == "experts":
        config = models.MoEConfig(
            **sizes, kv_heads=4, hidden=256, experts=8, top_k=2, capacity_factor=None
        )
        both = (*recipes.expert_parallel(bound=2.0), replicate(where(), over=("ep",)))
        strategy = Strategy(Mesh(ep=2), both)
    else:
        config = models.GPTConfig(**sizes)
        strategy = Strategy(Mesh())
        if kind == "tensor":
            strategy = Strategy(Mesh(tp=2), [shard(where(), over="tp")])
    return models.job(config, global_batch=8), strategy


def _train(kind: str) -> float:
    """Run six steps in this process: their kernels, and the work of the runtime between them."""
    import piper

    compiled = piper.compile(*_trained(kind))
    return _timed(
        partial(piper.execute, compiled, steps=6, launcher="inline", memory=False, trace=False)
    )


def _tune() -> float:
    """Score twenty strategies of a captured GPT, drawn by the sampler with a seed."""
    import piper
    from piper import models
    from piper_compiler import Strategy, recipes
    from piper_ir.ground.mesh import Mesh

    config = models.GPTConfig(layers=8, width=256, heads=4, vocab=1024, length=128)
    job = models.job(config, global_batch=64)

    def strategy(trial: Any) -> Strategy:
        m = trial.suggest_categorical("m", [4, 8, 16])
        bucket = trial.suggest_float("bucket_mb", 1.0, 64.0)
        zero = trial.suggest_int("zero", 0, 2)
        pipeline = recipes.one_f_one_b(pp=4, microbatches=m)
        return Strategy(
            Mesh(pp=4, dp=2), [*pipeline, *recipes.data_parallel(zero=zero, bucket_mb=bucket)]
        )

    return _timed(partial(piper.tune, job, strategy, cluster="h100x8", trials=20, seed=1))


CASES: dict[str, Callable[[], float]] = {
    "score a plan of 8 stages": partial(_score, False),
    "score a plan of a GPT of 24 layers": partial(_score, True),
    "compile 24 layers, m=32": partial(_compile, 32),
    "compile 24 layers, m=128": partial(_compile, 128),
    "verify 24 layers, m=128": partial(_verify, 128),
    "compile GPT-3 175B on 1,024": partial(_compile_preset, "gpt3-175b", 64),
    "verify GPT-3 175B on 1,024": partial(_verify_preset, "gpt3-175b", 64),
    "compile Llama 405B on 16,384": partial(_compile_preset, "llama3-405b", 1024),
    "train a GPT on one device": partial(_train, "one"),
    "train a GPT, tp=2": partial(_train, "tensor"),
    "train dropless experts, ep=2": partial(_train, "experts"),
    "tune, 20 trials": _tune,
}
"""The cases by name; each returns the CPU seconds of one run."""
if find_spec("transformers") is not None:
    CASES["trace Llama 8B of transformers"] = partial(_capture_transformers, 32)
    CASES["trace Llama 70B's layers of transformers"] = partial(_capture_transformers, 80)


class Side:
    """Hold a process that runs cases in a tree."""

    def __init__(self, tree: Path) -> None:
        sources = [tree, tree / "src", *sorted((tree / "packages").glob("*/src"))]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--serve"]
        self._process = subprocess.Popen(
            command, cwd=tree, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, case: str) -> float:
        """Run a case once and return its CPU seconds; EOFError if the process died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(case, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.removeprefix("seconds "))
        raise EOFError(f"the process that ran {case!r} has ended")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Run the cases that are named on standard input, and print their seconds."""
    sys.path[0] = os.getcwd()  # the tree's own benchmarks, not those beside this file
    for line in sys.stdin:
        print(f"seconds {CASES[line.strip()]()!r}", flush=True)


def compare(before: Side, now: Side, case: str, pairs: int) -> str:
    """Return a line with the medians of a case, and the median of its pairs' ratios with its 95 % interval."""
    from benchmarks.measure import median_interval  # not where cases of another tree run

    before.seconds(case), now.seconds(case)
    pairs_s = []
    for k in range(pairs):
        first, second = (before, now) if k % 2 else (now, before)
        a, b = first.seconds(case), second.seconds(case)
        pairs_s.append((a, b) if first is before else (b, a))
    ratio, low, high = median_interval([a / b for a, b in pairs_s])
    times = " ".join(f"{1e3 * median(side):8.1f} ms" for side in zip(*pairs_s, strict=True))
    return f"{case:36} {times}  ratio {ratio:.2f} ({low:.2f} to {high:.2f})"


def main(argv: list[str] | None = None) -> int:
    """Print a line per case."""
    parser = argparse.ArgumentParser(
        description="Compare the speed of this tree with that of another commit."
    )
    parser.add_argument("before", type=Path, nargs="?", help="a tree of the other commit")
    parser.add_argument(
        "cases", nargs="*", help="the beginnings of the cases' names; all by default"
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(argv)
    if options.serve:
        serve()
        return 0
    sys.path.insert(0, str(ROOT))
    if options.before is None or not (options.before / "packages").is_dir():
        parser.error("give a tree of the other commit: git worktree add ../before COMMIT")
    sides = Side(options.before.resolve()), Side(ROOT)
    try:
        for case in CASES:
            if not options.cases or case.startswith(tuple(options.cases)):
                print(compare(*sides, case, options.pairs), flush=True)
    finally:
        for side in sides:
            side.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
