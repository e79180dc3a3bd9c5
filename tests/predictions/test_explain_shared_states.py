"""What piper explain says of states that ranks share beside parameters whose gradients devices add up."""

from __future__ import annotations

import pytest

from piper import Mesh, recipes
from piper.views.explained.explain import explain
from tests.helpers import shared_jobs


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 3])
def test_sums_of_buckets_beside_shared_states(zero: int) -> None:
    """With tokens in parts, the gradients of norms are all-reduced along tp, by a collective that reads no value."""
    made = shared_jobs.compiled(
        "llama", Mesh(tp=2, dp=2), recipes.data_parallel(zero=zero), stream="tokens"
    )
    said = explain(made)
    assert "shared states: what a step gathers and scatters" in said
