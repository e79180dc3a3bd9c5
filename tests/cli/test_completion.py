"""What a shell completes, and what a terminal shows while something takes long."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from pathlib import Path

from piper.cli.completion import asked_parameters, clusters, one_of, recipe_names
from piper_ir.tools import clear_line, shown_while_working, working
from tests.helpers.command_line import command

SPACE = """
raise SystemExit("a file is not run to complete a word")
def job(trial):
    return trial.suggest_int("rows", 1, 8)
def strategy(trial):
    trial.suggest_categorical("pp", (1, 2)), trial.suggest_categorical("kind", KINDS), trial.other("no", 1)
"""


def test_clusters_and_recipes_have_their_names(tmp_path: Path) -> None:
    assert {"cpu-local", "h100x8", "a100x8"} <= set(clusters("")) and clusters("h1") == ["h100x8"]
    assert clusters("h100x8@e") == ["h100x8@eager"]
    (tmp_path / "lab.toml").touch()
    assert clusters(f"{tmp_path}/") == [f"{tmp_path}/lab.toml"]
    assert "one_f_one_b" in recipe_names("one") and one_of("ray", "inline")("r") == ["ray"]


def test_the_parameters_of_a_file_are_read_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "space.py"
    file.write_text(SPACE)
    assert asked_parameters(file) == {"rows": (), "pp": (1, 2), "kind": ()}
    file.write_text("not python (")
    assert asked_parameters(file) == {} == asked_parameters(tmp_path / "none.py")


def completed(words: str, folder: Path, script: str = "") -> list[str]:
    """Return what bash is told when somebody presses the key after these words: in this process, or by a script."""
    env = {
        "_PIPER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1),
    }  # fmt: skip
    if script:
        return subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | env,
            cwd=folder,
            capture_output=True,
            text=True,
        ).stdout.split()
    with contextlib.chdir(folder):
        return command(prog_name="piper", env=env).stdout.split()


def test_a_shell_is_told_values(tmp_path: Path) -> None:
    (tmp_path / "space.py").write_text(SPACE)
    script = "from piper.cli.commands import app; app(prog_name='piper')"
    parameters = completed("piper simulate space.py -p ", tmp_path, script)
    assert parameters == ["rows=", "pp=", "kind="]
    assert completed("piper simulate space.py -p pp=", tmp_path) == ["pp=1", "pp=2"]
    objectives = completed("piper tune space.py --objective d", tmp_path)
    assert objectives == ["dollars_per_token"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_work_is_named_on_a_terminal_and_the_line_is_removed() -> None:
    stream = Terminal()
    with (
        shown_while_working(stream, patience_s=0.01),
        working("compiling"),
        working("capturing the model"),
    ):
        end = time.monotonic() + 10
        while "capturing the model, 0 s" not in stream.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        clear_line()
    assert "capturing the model, 0 s" in stream.getvalue() and stream.getvalue().endswith(
        "\r\x1b[K"
    )


def test_long_work_is_named_in_a_pipe_by_lines_while_it_goes_on_and_when_it_is_done() -> None:
    stream = io.StringIO()
    with shown_while_working(stream, pipe_s=0.02), working("searching") as name:
        name("candidate 12 of 40")
        end = time.monotonic() + 10
        while (
            "candidate 12 of 40, 0 s so far\n" not in stream.getvalue() and time.monotonic() < end
        ):
            time.sleep(0.01)
    lines = stream.getvalue().splitlines()
    assert (
        lines[0] == "candidate 12 of 40, 0 s so far"
        and lines[-1] == "candidate 12 of 40: done in 0 s"
    )
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_nothing_is_shown_early_or_by_a_library() -> None:
    early, plain = Terminal(), io.StringIO()
    with shown_while_working(early, patience_s=60), working("compiling"):
        time.sleep(0.05)
    with shown_while_working(plain, patience_s=0.01), working("compiling"):
        time.sleep(0.05)
    with working("compiling"):
        clear_line()
    assert early.getvalue() == plain.getvalue() == ""
