"""Ask the real parsers of other systems, in interpreters of their own that environment variables name."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

SECONDS = 300


def answer(variable: str, program: str, question: Any, **environment: str) -> Any:
    """Return the JSON that a program prints in another interpreter, whose standard input has a question as JSON.

    The test is skipped if the variable names no interpreter, and fails if the program does.
    """
    interpreter = os.environ.get(variable, "")
    if not interpreter:
        pytest.skip(f"{variable} names no interpreter that has the system")
    result = subprocess.run(
        [interpreter, "-c", program],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": "", **environment},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
