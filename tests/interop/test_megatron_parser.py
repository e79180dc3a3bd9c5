"""Megatron-LM's own parser derives the same numbers from its functional tests, and takes exports.

PIPER_MEGATRON names a checkout of Megatron-LM, PIPER_MEGATRON_PYTHON an interpreter of Python 3.12 or later with torch,
triton and einops.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from packages.interop.tests.megatron_jobs import LAYOUTS, described, job_with
from piper_interop import Asked, Imported, export_job, import_job
from piper_interop.megatron.degrees import layers_of_stages, tokens_of
from piper_interop.megatron.reader import read
from piper_interop.megatron.table import STAND_INS, TABLE
from piper_interop.neutral.options import row_of
from tests.interop.megatron_census import attempt, cases, devices

CHECKOUT, PYTHON = (
    os.environ.get(name, "") for name in ("PIPER_MEGATRON", "PIPER_MEGATRON_PYTHON")
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (CHECKOUT and PYTHON),
        reason="PIPER_MEGATRON and PIPER_MEGATRON_PYTHON name no Megatron-LM",
    ),
]
LEAST = 213
"""Imports of functional tests with all stand-ins, 80 % of 266, of which there were 223 in November 2026."""


def ask(folder: Path, questions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the options of Megatron's parser, and its answers."""
    asked, answered = folder / "questions.json", folder / "answers.json"
    asked.write_text(json.dumps(questions))
    script = Path(__file__).parent / "megatron_answers.py"
    subprocess.run(
        [PYTHON, str(script), CHECKOUT, str(asked), str(answered)], check=True, capture_output=True
    )
    return dict(json.loads(answered.read_text()))


def words_of(arguments: dict[str, Any]) -> list[str]:
    """Return the words that the functional tests' script makes of a file: [a b] are two, without the brackets."""
    words: list[str] = []
    for name, value in arguments.items():
        words.append(name)
        for item in [] if value is True else value if isinstance(value, list) else [value]:
            text = str(item)
            several = isinstance(value, list) or (" " in text and text[0] + text[-1] == "[]")
            words += text.strip("[]").split() if several else [text]
    return words


def derived(job: Imported) -> dict[str, Any]:
    """Return the numbers of an import under the names of Megatron's answer."""
    plan, sizes = job.described.layout, job.described.sizes.fields
    latent = "latent" in sizes
    grows = (
        job.foreign.get("step-batch-size-schedule") is not None
    )  # which Megatron's parser does not resolve
    return {
        "dp": plan.replicas,
        "global_batch": None if grows else job.described.global_batch,
        "microbatches": None if grows else job.described.microbatches,
        "chunks": plan.chunks,
        "layers": list(layers_of_stages(job.foreign)),
        "hidden": sizes["hidden"],
        "channels": None if latent else sizes.get("head_dim", sizes["width"] // sizes["heads"]),
        "vocab": sizes["vocab"],
        "group": plan.group or plan.pp,
    }


def test_derived_numbers_are_those_of_megatron(tmp_path: Path) -> None:
    jobs, questions = [], []
    for path, arguments in cases(Path(CHECKOUT)):
        number = devices(arguments)
        job = attempt(path, number, list(STAND_INS))
        if isinstance(job, Imported):
            jobs.append((path, job))
            vocabulary = tokens_of(job.foreign)
            questions.append(
                {"arguments": words_of(arguments), "devices": number, "vocabulary": vocabulary}
            )
    assert len(jobs) >= LEAST
    answers = ask(tmp_path, questions)["answers"]
    wrong, refused, agreed = [], [], 0
    for (path, job), answer in zip(jobs, answers, strict=True):
        if "error" in answer:  # Megatron does not take it here: a library or a file is missing
            refused.append(f"{path.parent.name}: {answer['error']}")
            continue
        ours = derived(job)
        differences = {
            k: (v, answer[k]) for k, v in ours.items() if v is not None and v != answer[k]
        }
        wrong += [f"{path.parent.name}: {differences}"] if differences else []
        agreed += 1
    assert not wrong, "\n".join(wrong)
    assert agreed >= LEAST * 3 // 4, "\n".join(refused)


def test_every_option_has_a_row(tmp_path: Path) -> None:
    names = ask(tmp_path, [])["options"]
    assert len(names) > 800
    missing = [
        name for name in names if not row_of(TABLE, name.removeprefix("--").replace("_", "-"))
    ]
    assert missing == []


def test_exports_are_taken(tmp_path: Path) -> None:
    jobs = [described(), *(job_with(layout) for layout in LAYOUTS)]
    texts = [export_job("megatron", job).files["megatron.args"] for job in jobs]
    questions = [
        {
            "arguments": text.split(),
            "devices": job.layout.devices,
            "vocabulary": job.sizes.fields["vocab"],
        }
        for job, text in zip(jobs, texts, strict=True)
    ]
    for job, text, answer in zip(jobs, texts, ask(tmp_path, questions)["answers"], strict=True):
        assert "error" not in answer, (answer, text)
        again = import_job("megatron", text, Asked(devices=job.layout.devices))
        ours = derived(again)
        assert {k: v for k, v in ours.items() if v is not None} == {
            k: answer[k] for k, v in ours.items() if v is not None
        }
    assert read(texts[0], Asked(devices=8)).values["bf16"].value is True
