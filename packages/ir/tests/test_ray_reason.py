"""The reason in Ray's long texts."""

from __future__ import annotations

from piper_ir.tools import ray_reason

LOW = """\
Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.2, ID: ab12) where the task (actor ID: cd34, pid=77, memory used=9.1GB) was running was \
15.2GB / 16.0GB (0.95), which exceeds the limit of 0.95. Ray killed this worker.
To adjust the kill threshold, set RAY_memory_usage_threshold when starting Ray."""
DEAD = "The actor died unexpectedly before finishing this task.\n\tclass_name: RankActor\n\tactor_id: cd34\n\tip: 10.0.0.2\n"
TRACEBACK = """\
ray::task() (pid=7, ip=10.0.0.2)
Traceback (most recent call last):
  File "x.py", line 3, in task
ValueError: a bad space
"""


def test_a_worker_that_was_killed_for_memory_is_said_to_be() -> None:
    told = (
        "Task was killed due to the node running low on memory (15.2GB / 16.0GB (0.95)); put fewer "
        "ranks on a node, or"
    )
    assert ray_reason(RuntimeError(LOW)).startswith(told)
    assert ray_reason(RuntimeError(DEAD + LOW)).startswith(told)
    worker = (
        "The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY Worker exit "
        "detail: " + LOW
    )
    assert ray_reason(RuntimeError(DEAD + worker)).startswith(f"NODE_OUT_OF_MEMORY: {told}")


def test_other_reasons_stand_first_and_those_of_code_last() -> None:
    assert ray_reason(
        RuntimeError(DEAD + "The actor is dead because its node has died.\nSee the logs")
    ).endswith("its node has died.")
    assert (
        ray_reason(RuntimeError("Failed to set up runtime environment.\nno such file: env.yml\n"))
        == "no such file: env.yml"
    )
    assert ray_reason(RuntimeError(TRACEBACK)) == "ValueError: a bad space"
    assert ray_reason(
        RuntimeError("The actor died unexpectedly before finishing this task.")
    ).startswith("The actor died")
    assert ray_reason(TimeoutError()) == "TimeoutError"
