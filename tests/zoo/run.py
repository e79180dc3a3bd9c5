"""Install the packages into an environment of their own, try the models, write the table: `python -m tests.zoo.run`.

The environment sees this one's packages, torch and Piper among them, and adds what it lacks; no package may bring
another torch.
A model is tried in a process that is forked when its library has been imported, with a time limit. Results are lines of
JSON, and a model that has one is not tried again, so that a run that is stopped goes on where it was:

    python -m tests.zoo.run                       try what has no result yet, then write docs/models.md
    python -m tests.zoo.run transformers/gpt2     try these models (patterns are allowed), whether they have one or not
    python -m tests.zoo.run --new 'timm/*'        of these, what has no result yet
    python -m tests.zoo.run --table               write the table only
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "zoo"
RESULTS = HOME / "results.jsonl"
LIMIT_S = 900
REPLICAS = (1, 2)
"""A model is tried on so many replicas; the second takes a second, since the model is captured once for both."""

PACKAGES = ("transformers", "diffusers", "peft", "timm", "accelerate")
OF_TITAN = (
    "tensorboard", "absl-py", "pyarrow", "multiprocess", "dill", "xxhash", "tyro", "docstring-parser", "shtab", "typeguard",
    "torchdata", "datasets", "fsspec", "pandas",
)  # fmt: skip
ALONE = ("torchvision==0.28.*", "torchtitan==0.2.2", *OF_TITAN)
"""These packages are installed alone: what they ask for is a torch of another build, or more than their models need."""
LIBRARIES = ("transformers", "torchvision", "timm", "diffusers")
LISTS = ("titan", "hugging_face", "vision", "diffusion", "others", "modalities")


def main(argv: list[str] | None = None) -> int:
    """Install what is missing, then go on in the environment; `--inside` says that this is it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="patterns of LIBRARY/MODEL")
    parser.add_argument("--table", action="store_true", help="write the table only")
    parser.add_argument(
        "--new", action="store_true", help="of the patterns, only what has no result yet"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.table:
        if not options.inside:
            words = [*(["--new"] if options.new else []), *options.models]
            return subprocess.run(
                [installed(), "-m", "tests.zoo.run", "--inside", *words], cwd=ROOT, env=seen()
            ).returncode
        HOME.mkdir(parents=True, exist_ok=True)
        try_all(options.models, again=bool(options.models) and not options.new)
    from tests.zoo.table import write_table

    write_table(results(), ROOT / "docs" / "models.md")
    return 0


def installed() -> str:
    """Return the interpreter of the environment, which is made where it is not there yet."""
    python = HOME / "venv" / "bin" / "python"
    done = HOME / "venv" / ".installed"
    if done.exists():
        return str(python)
    venv.create(HOME / "venv", with_pip=True)
    site = next((HOME / "venv" / "lib").glob("python*/site-packages"))
    outer = sysconfig.get_paths()["purelib"]
    (site / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    import torch

    held = HOME / "constraints.txt"
    held.write_text(f"torch=={torch.__version__}\n" + (ROOT / "constraints.txt").read_text())
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(held), *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    done.touch()
    return str(python)


def seen() -> dict[str, str]:
    """Return this process's environment, in which Piper is found as it is here, and nothing is asked of the network."""
    paths = [str(ROOT), *(p for p in sys.path if p)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "PIPER_CACHE": "",
        "OMP_NUM_THREADS": "1",
    }


def results() -> list[dict[str, Any]]:
    """Return the latest result of each model and number of replicas."""
    if not RESULTS.exists():
        return []
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return list({(line["model"], line["dp"]): line for line in lines}.values())


def try_all(patterns: list[str], *, again: bool) -> None:
    """Try the models that match, those with a result `again` or not; each result is written when it is there."""
    from tests.zoo import judge

    judge.warm_up()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    done = set() if again else {(line["model"], line["dp"]) for line in results()}
    for entry in listed():
        wanted = not patterns or any(fnmatch.fnmatch(entry.name, pattern) for pattern in patterns)
        replicas = [n for n in REPLICAS if (entry.name, n) not in done]
        for line in apart(entry, replicas) if wanted and replicas else ():
            line["commit"] = commit
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def listed() -> Iterator[Any]:
    """Yield the entries of all lists, taking turns between libraries, so that a run that is stopped has some of
    each."""
    each = [import_module(f"tests.zoo.{name}").entries() for name in LISTS]
    for turn in zip_longest(*each):
        yield from (entry for entry in turn if entry is not None)


def apart(entry: Any, replicas: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield what a process of its own says of a model; it is forked, so that libraries are imported once."""
    from tests.zoo import judge
    from tests.zoo.vision import prepare

    prepare()
    if entry.library in LIBRARIES:
        import_module(entry.library)
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)

    def tell() -> None:
        for line in judge.tried(entry, replicas):
            its.send(line)

    child = context.Process(target=tell, daemon=False)
    child.start()
    its.close()
    try:
        for number in replicas:
            why = f"no result after {LIMIT_S} s"
            try:
                if mine.poll(LIMIT_S):
                    yield mine.recv()
                    continue
            except EOFError:
                why = "the process ended without a result"
            yield {"model": entry.name, "dp": number, "outcome": "failed", "why": why}
            return
    finally:
        child.kill()
        child.join()


if __name__ == "__main__":
    sys.exit(main())
