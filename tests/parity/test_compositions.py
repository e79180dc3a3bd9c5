"""Random compositions of model, mesh and directives, each verified and compared with one device: 200 in `make test`,
1,000 in `make test-long`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from piper_ir.verify import verify
from tests.faults import runtime_faults as faults
from tests.helpers import compositions, models, parity
from tests.helpers.compositions import Composition, fitted

EXAMPLES = max(150, settings.default.max_examples)
STEPS = 2
"""One update between two gradients: what is left over from the first step shows in the second."""

seen: Counter[str] = Counter()
MODELS = sorted(models.CASES.keys() - {"gpt_refilled"})
"""Without one that is another again but for its batch function, which tests/faults/mutants.py tries."""


@st.composite
def drawn(draw: st.DrawFn) -> Composition:
    """Any composition that the language can say and the models allow."""
    c = Composition(
        model=draw(st.sampled_from(MODELS)),
        pp=draw(st.integers(1, 4)),
        dp=draw(st.sampled_from((1, 1, 2, 3))),
        microbatches=draw(st.integers(1, 5)),
        schedule=draw(
            st.sampled_from(
                ("gpipe", "1f1b", "default", "random", "random", *sorted(compositions.PIPELINES))
            )
        ),
        placement=draw(st.sampled_from(("recipe", "chunks", "v", "shared", "random", "random"))),
        backward=draw(st.sampled_from(("whole", "split", "mixed"))),
        overlap=draw(st.booleans()),
        rows=draw(st.sampled_from((1, 2, 2, 2, 3))),
        optimizer=draw(st.sampled_from(sorted(compositions.OPTIMIZERS))),
        clip=draw(st.sampled_from((None, None, 0.05))),
        scheduler=draw(st.booleans()),
        bucket_mb=draw(st.sampled_from((25, 0.001, 0.003))),
        shared_streams=draw(st.booleans()),
        fuse=draw(st.booleans()),
        recv_ahead=draw(st.sampled_from((1, 2, 3, 5))),
        seed=draw(st.integers(0, 2**20)),
    )
    if c.model == "keywords" and c.rows * c.microbatches * c.dp == 1:  # its one row weighs nothing
        c = replace(c, microbatches=2)
    return fitted(c)


@settings(
    max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(drawn())
# some of many orders and models, which are not drawn for certain
@example(Composition("gpt", pp=2, microbatches=2, schedule="gpipe"))
@example(Composition("llama", pp=2, microbatches=4, schedule="1f1b"))
def test_a_random_composition_trains_what_one_device_trains(c: Composition) -> None:
    plan = compositions.compiled(c).plan
    verify(plan)
    run = compositions.run(c, plan, steps=STEPS)
    parity.assert_parity(run, compositions.expected(c, STEPS), label=repr(c))
    words = (
        c.model,
        c.placement,
        c.schedule,
        c.backward,
        f"overlap {c.overlap}",
        f"world {plan.mesh.world}",
        c.optimizer,
    )
    seen.update((*words, f"fuse {c.fuse}"))


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(drawn())
def test_a_fault_in_a_random_composition_is_seen(c: Composition) -> None:
    """The control of the test above: in each of these the last microbatch's gradients come too late."""
    with faults.inject("lose_last_gradient"):
        run = compositions.run(c, steps=1)
    assert parity.differences(parity.RunOutcome.of(run), compositions.expected(c, 1))


def test_the_compositions_were_not_all_alike() -> None:
    """Runs after the test above: every placement, schedule and several sizes have been there, and nearly every model:
    Hypothesis does not draw evenly from a list of fourteen."""
    if seen:  # not when the test above was deselected
        wanted = {
            *compositions.OPTIMIZERS,
            "v",
            "shared",
            "random",
            "chunks",
            "gpipe",
            "1f1b",
            "default",
            "split",
            "mixed",
            "overlap True",
            "world 1",
            "world 6",
        }
        assert wanted <= seen.keys(), sorted(wanted - seen.keys())
        assert len(set(MODELS) - seen.keys()) <= 3, sorted(set(MODELS) - seen.keys())
