"""Numbers that a run is given are checked."""

import pytest

from packages.runtime.tests.chains import chain, run
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case


@each_case("timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_that_is_no_time_is_refused(timeout_s: float) -> None:
    plan, job = chain()
    with pytest.raises(JobError, match=r"timeout_s=.*above 0"):
        run(plan, job, steps=1, timeout_s=timeout_s)
