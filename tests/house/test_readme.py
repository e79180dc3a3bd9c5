"""README's example runs as it stands, its commands exist, and its first screen has what a newcomer looks for."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    shown = re.search(r"```\n(0\..*?)```", README, re.DOTALL).group(1)
    (step_s, losses), (said_step_s, said_losses) = done.stdout.splitlines(), shown.splitlines()
    assert float(step_s) == float(said_step_s)
    for loss, said in zip(
        losses.strip("[]").split(","), said_losses.strip("[]").split(","), strict=True
    ):
        assert abs(float(loss) - float(said)) < 1e-5


def test_links_and_commands_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
    help_text = subprocess.run(
        [sys.executable, "-m", "piper", "--help"], capture_output=True, text=True, timeout=60
    ).stdout
    for command in set(re.findall(r"^piper (\w+)", README, re.MULTILINE)):
        assert command in help_text, command


def test_the_first_screen_has_a_picture_the_commands_and_an_example() -> None:
    screen = README.splitlines()[:28]
    (picture,) = re.findall(r"^!\[[^]]+\]\((.+\.png)\)$", "\n".join(screen), re.MULTILINE)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")
    makefile = (ROOT / "Makefile").read_text()
    targets = [line.split()[1] for line in screen if line.startswith("make ")]
    assert targets == ["run", "test"] and all(f"\n{t}: " in makefile for t in targets)
    assert "```python" in screen


def test_the_glossary_is_linked() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "docs/architecture.md"):
        assert "glossary.md)" in (ROOT / name).read_text(), name
