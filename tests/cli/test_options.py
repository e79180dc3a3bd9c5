"""What Python functions say, as the command line says it."""

from __future__ import annotations

import pytest

from piper.cli.messages import in_flags
from piper.cli.options import check_drawn, searchers
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case


@each_case(
    ("said", "shown"),
    [
        (
            'cluster="local" starts a Ray, launcher="processes" needs none',
            "--address local starts a Ray, --launcher processes needs none",
        ),
        ("with cluster=HOST:PORT, or hand it in", "with --address HOST:PORT, or hand it in"),
        (
            "execute(cluster='h:1'): launcher \"inline\" runs here",
            '--address h:1: launcher "inline" runs here',
        ),
        (
            "for 4 s (timeout_s); give a larger timeout_s",
            "for 4 s (--timeout-s); give a larger --timeout-s",
        ),
        ("Set memory_limit to that", "Set --memory-limit to that"),
        ("memory_limit='x': bytes", "--memory-limit x: bytes"),
        ("the cluster is a: leave confirm out", "the cluster is a: leave --confirm out"),
        ("in this process (workers=0)", "in this process (--workers 0)"),
        (
            'workers="local" starts a Ray, workers=1 needs none',
            "--workers local starts a Ray, --workers 1 needs none",
        ),
        ("profile(rows=[9]): 9 is no number", "--rows [9]: 9 is no number"),
        ("tune(objective='period'): no", "--objective period: no"),
        (
            "cannot go on; give restarts of at least 1",
            "cannot go on; give --restarts of at least 1",
        ),
        (
            "Options(kernels='triton'): 'eager' and 'inductor' are accepted",
            "--kernels triton: 'eager' and 'inductor' are accepted",
        ),
        (
            "Options(cuda_graph=True): condition 3: leave offload out, or leave cuda_graph out",
            "--cuda-graph: condition 3: leave offload out, or leave --cuda-graph out",
        ),
        ('launcher="emulated" any cluster to imitate', "--emulate CLUSTER any cluster to imitate"),
    ],
)
def test_arguments_become_flags(said: str, shown: str) -> None:
    assert in_flags(said) == shown


@each_case(
    "said",
    [
        "Job.batch(step=0, rows=range(0, 2)) returned a list",
        "partition(stages=2)",
        "or piper.execute(cluster=...)",
        "storage locked",
    ],
)
def test_what_is_no_argument_of_a_command_stays(said: str) -> None:
    assert in_flags(said) == said


def test_an_argument_that_is_no_option_of_the_command_stays() -> None:
    said = "zero_bubble(memory_limit=nan): a number is needed; tune(workers=9): too many"
    assert (
        in_flags(said, {"workers"})
        == "zero_bubble(memory_limit=nan): a number is needed; --workers 9: too many"
    )
    assert in_flags("execute(cluster='h:1'): no", {"address"}) == "--address h:1: no"
    assert in_flags("execute(cluster='h:1'): no", {"cluster"}) == "execute(cluster='h:1'): no"


def test_tune_takes_addresses_as_workers() -> None:
    assert [searchers(w) for w in ("3", "ray", "local", "h:1")] == [3, "ray", "local", "h:1"]
    with pytest.raises(JobError, match="--workers many: a number of processes, ray, local or"):
        searchers("many")


def test_show_refuses_options_of_what_it_does_not_draw() -> None:
    check_drawn("zbv", of_files=(None, None), of_recipes=(4, None))
    check_drawn(None, of_files=("h100x8", None), of_recipes=(None, None))
    with pytest.raises(JobError, match="leave out --strategy, --costs and --cluster"):
        check_drawn("zbv", of_files=("h100x8", None), of_recipes=(None, None))
    with pytest.raises(JobError, match="belong to --recipe"):
        check_drawn(None, of_files=(None, None), of_recipes=(None, 8))
