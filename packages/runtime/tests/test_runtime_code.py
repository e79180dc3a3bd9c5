"""Step code from source, values freed at their last use, and seeds of random operations."""

import traceback

import pytest
import torch

from packages.runtime.tests.chains import chain
from packages.runtime.tests.handmade import CODE
from piper_ir.ground.errors import FormatError
from piper_runtime import rng_seed
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.binding.rank_state import RankJob
from piper_runtime.rank.job.job import materialize
from piper_runtime.rank.values.code import LoadedSteps, ShippedCode, load_step, used_code


def test_source_and_constants_make_a_function_whose_lines_show_in_tracebacks() -> None:
    step = load_step(
        ShippedCode(
            "def step(args):\n    x, = args\n    return (x + C.to(DEVICE),)", {"C": torch.ones(1)}
        )
    )
    assert step([torch.ones(1)])[0].item() == 2
    with pytest.raises(ValueError, match="unpack") as caught:
        step([])
    assert "x, = args" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1", "no function `step"),
        ("op = torch.ops.piper.no_such_op.default", r"no_such_op.*import the module"),
    ],
)
def test_unusable_source_is_refused(source: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        load_step(ShippedCode(source))


def test_a_store_without_the_code_is_refused_and_code_is_loaded_once() -> None:
    steps = LoadedSteps(CODE)
    assert steps("plain", "F") is steps("plain", "F")
    with pytest.raises(FormatError, match=r"no step I of code 'plain\.first'"):
        steps("plain.first", "I")


def test_a_role_uses_the_code_of_its_chunks_only() -> None:
    plan, _ = chain()
    codes = [set(used_code(plan, role)) for role in plan.roles]
    assert {c for c, _ in codes[0]} == {"plain", "plain.first"} and {c for c, _ in codes[1]} == {
        "plain",
        "head.mean",
    }


def test_a_dying_input_reaches_the_code_as_the_only_reference() -> None:
    """The code drops its argument and sees whether the storage is gone."""
    source = """
import weakref
def step(args):
    w, y, g = args
    args.clear()
    dz = torch.ops.aten.tanh_backward(g, y)
    seen = weakref.ref(g.untyped_storage()); del g, y
    GONE.append(seen() is None)
    return (torch.mm(dz, w.t()), dz)
"""
    gone: list[bool] = []
    code = CODE | {"plain": CODE["plain"] | {"I": ShippedCode(source, {"GONE": gone})}}
    plan, job = chain(pp=1, microbatches=1)
    state = materialize(job)
    rank = Rank(
        plan, 0, code, RankJob(job.batch, job.optimizer, None, 0), state.params, state.buffers
    )
    with torch.no_grad():
        rank.begin(0)
        for entry in rank.entries:
            assert entry.work is not None
            entry.work()
    assert gone == [True, True] and rank.store.values == {}


def test_seeds_depend_on_everything_that_they_should_and_are_fixed_for_good() -> None:
    base = (3, 1, 8, 2)
    seeds = {
        rng_seed(*base),
        rng_seed(4, 1, 8, 2),
        rng_seed(3, 2, 8, 2),
        rng_seed(3, 1, 9, 2),
        rng_seed(3, 1, 8, "layer2"),
    }
    assert len(seeds) == 5 and all(0 <= s < 2**63 for s in seeds)
    assert rng_seed(0, 0, 0, 0) == 8662518681111019217
