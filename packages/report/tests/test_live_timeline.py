"""The interactive timeline: its data are the trace's spans, and a reader's mouse and keys do what they should."""

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests import samples
from packages.report.tests.browser import Browser, Tab, browser, chromium
from piper_ir.ground.trace import Trace
from piper_ir.plan.plan import Plan
from piper_report import write_beside, write_report
from piper_report.facts.phases import kinds
from piper_report.facts.results import load
from piper_report.facts.transfers import communication_axes
from piper_report.figures import live_timeline as module
from piper_report.figures.live_timeline import MARK, TimelineStep, live_timeline
from piper_report.pages.answers import answers_of
from piper_simulator import simulate

LABELS = "Array.from(document.querySelectorAll('canvas')).map(c => c.getAttribute('aria-label'))"


def data_of(traces: list[Trace], plan: Plan | None) -> dict[str, Any]:
    timeline = live_timeline([TimelineStep("", traces, plan)])
    assert timeline is not None and "ranks are not" not in timeline.note
    assert (module.HOLLOW in timeline.note) == ('"wait": [' in json.dumps(timeline.data))
    decoded: dict[str, Any] = json.loads(json.dumps(timeline.data))
    return decoded


def bars(data: dict[str, Any], panel: int) -> set[tuple[Any, ...]]:
    """Each bar as (rank's name, stream, name, start, end, microbatch, phase, bytes, axis), times in ticks."""
    drawn = set()
    for lane in data["panels"][panel]["lanes"]:
        at = 0
        columns = [lane[c] for c in ("gap", "width", "what", "mb")]
        assert len({len(c) for c in columns}) == 1
        for gap, width, index, mb in zip(*columns, strict=True):
            start, what = at + gap, data["whats"][index]
            at = start + width
            name = what["name"].replace(MARK, str(mb))
            axis = data["axes"][what["axis"]] if what["axis"] >= 0 else ""
            rank = data["ranks"][lane["rank"]]["name"]
            phase = data["phases"][what["phase"]]["name"]
            drawn.add((rank, lane["stream"], name, start, at, mb, phase, what["bytes"], axis))
    return drawn


@pytest.mark.parametrize("kind", ["by rank", "executed"])
def test_the_bars_are_the_spans(kind: str) -> None:
    plan, trace = samples.plan(), samples.simulation().trace
    if kind == "executed":
        trace = samples.executed(trace)
    trace = replace(trace, waits=(samples.span(0, "batch", 0, "wait", 0.0, 1e-4),))
    data = data_of([replace(trace, kind="executed")], plan)
    labels, axes, tick = kinds(trace, plan), communication_axes(plan), data["tick"]
    expected = {
        (
            f"rank {s.rank} ({plan.role_of(s.rank).role})", s.stream, s.name, round(s.start / tick), round(s.end / tick),
            labels[s].mb, module.PHASES[labels[s].phase], s.bytes, axes.get((plan.role_of(s.rank).role, s.instr), ""),
        )
        for s in trace.spans
    }  # fmt: skip
    drawn = bars(data, 0)
    assert {b for b in drawn if b[1] != "batch"} == expected and len(expected) == len(trace.spans)
    assert [b[2:5] for b in drawn if b[1] == "batch"] == [("wait", 0, round(1e-4 / tick))]
    assert {b[-1] for b in drawn} == {"", "pp", "dp"} and tick <= 1e-9


def test_without_a_plan_names_decide() -> None:
    data = data_of([samples.simulation().trace], None)
    assert data["axes"] == [] and {p["name"] for p in data["phases"]} >= {
        "forward",
        "communication",
    }


def test_equal_ranks_are_there_once_unless_something_was_measured() -> None:
    made, plan = samples.simulation(), samples.plan()
    assert [r["name"] for r in data_of([made.trace], plan)["ranks"]] == [
        "ranks 0-1 (pp0)",
        "ranks 2-3 (pp1)",
    ]
    both = data_of([made.role_trace, samples.executed(made.trace)], plan)
    assert len(both["ranks"]) == 4 and [p["title"] for p in both["panels"]] == [
        "predicted",
        "measured",
    ]
    assert {lane["rank"] for lane in both["panels"][0]["lanes"]} == {0, 1, 2, 3}


def test_a_measured_transfer_waits_until_all_its_ends_are_there() -> None:
    measured = samples.executed(samples.simulation().trace)
    data = data_of([measured], samples.plan())
    waits = [w for lane in data["panels"][0]["lanes"] for w in lane.get("wait", ())]
    assert max(waits) * data["tick"] == pytest.approx(2e-4, rel=1e-3)
    assert all(
        "wait" not in lane for lane in data["panels"][0]["lanes"] if lane["stream"] == "compute"
    )


@pytest.mark.long
def test_many_thousand_ranks_are_a_small_page(tmp_path: Path) -> None:
    plan = samples.plan_of(pp=16, dp=1024, microbatches=64)
    samples.write_simulation_by_role(tmp_path, plan)
    html = write_report(tmp_path).html.read_bytes()
    assert b"16,384 ranks" in html and len(html) < 5_000_000
    assert html.count(b'"shown":true') == 8 and html.count(b'"shown":false') == 8


def test_bars_over_the_most_are_left_out_by_rank_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = samples.executed(samples.simulation().trace)
    own = sum(s.rank == 0 for s in trace.spans)
    monkeypatch.setattr(module, "MOST_BARS", 2 * own)
    timeline = live_timeline([TimelineStep("", [trace], samples.plan())])
    assert timeline is not None and len(timeline.data["ranks"]) == 2
    assert f"{2 * own} bars are here; 2 ranks are not" in timeline.note


def test_two_folders_have_four_panels(tmp_path: Path) -> None:
    for name in "ab":
        samples.whole_folder(tmp_path / name)
    html = write_beside(tmp_path / "a", tmp_path / "b").html.read_text()
    titles = re.findall(r'"title":"([^"]+)"', html)
    assert titles == ["a, predicted", "a, measured", "b, predicted", "b, measured"]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = samples.whole_folder(tmp_path_factory.mktemp("whole") / "run")
    return write_report(folder).html


def test_the_policy_allows_the_script_of_the_page_alone(html: Path) -> None:
    text = html.read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.S)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Security-Policy" content="([^"]+)"', text)
    assert f"script-src &#39;sha256-{digest}&#39;" in policy.replace("'", "&#39;").replace("+", "+")
    assert text.count("<script") == 2, "the script and its data"


def test_a_run_begins_with_its_loss_and_a_plan_with_whether_it_fits(
    html: Path, tmp_path: Path
) -> None:
    text = html.read_text(encoding="utf-8")
    assert re.findall(r'<section id="(\w+)">', text)[0] == "training"
    run = answers_of(load(html.parent.parent))
    assert [(a.name, a.value) for a in run][:1] == [("loss", "0.5")]
    assert run[0].detail == "after step 5; 3 at first"
    mfu = next(a for a in run if a.name == "model FLOP utilisation")
    assert mfu.detail == "measured"
    samples.write_simulation(tmp_path)
    plan = answers_of(load(tmp_path))
    assert [a.name for a in plan][:2] == ["memory", "step in steady state"]
    table = {
        "title": "llama on h100x8: 1 strategy",
        "columns": ["", "strategy", "s/step"],
        "rows": [["1", "dp=4, tp=2", "2 s"]],
        "notes": ["the first is alone", "warning: on a new device"],
    }
    (tmp_path / "answer.json").write_text(json.dumps(table))
    page = write_report(tmp_path).html.read_text(encoding="utf-8")
    assert re.findall(r'<section id="(\w+)">', page)[0] == "strategies"
    assert "dp=4, tp=2" in page and '<p class="warning">warning: on a new device</p>' in page
    too_large = samples.plan_of(activation=60 << 30)
    samples.write_simulation(tmp_path, simulate(too_large, "h100x8"), too_large)
    first = answers_of(load(tmp_path))[0]
    assert first.value == "does not fit" and first.bad and "79.65 GiB" in first.detail


needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="no chromium on PATH (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def tab(chrome: Browser, html: Path) -> Iterator[Tab]:
    with chrome.tab(html, 1000, 1100) as opened:
        opened.value("document.querySelector('#timeline').scrollIntoView()")
        opened.screenshot(whole=False)  # a frame later the browser knows what lies below the mouse
        yield opened


WHOLE = [
    "predicted: 16 rows from 0 s to 13.9 ms, 56 bars drawn",
    "measured: 16 rows from 0 s to 17.38 ms, 56 bars drawn",
]


def place(tab: Tab) -> tuple[float, float]:
    """The middle of the first lane of compute."""
    box = tab.value(
        "(r => [r.left, r.top, r.width])(document.querySelector('canvas').getBoundingClientRect())"
    )
    return box[0] + box[2] / 2, box[1] + 24 + 24 + 9


@needs_chromium
def test_the_wheel_zooms_around_the_pointer_and_a_double_click_shows_all(tab: Tab) -> None:
    assert tab.value(LABELS) == WHOLE
    x, y = place(tab)
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-800)
    low, high = map(float, re.findall(r"([\d.]+) ms", tab.value(LABELS)[0]))
    assert 4 < low < 6 < high < 8.5
    tab.mouse("mousePressed", x, y, button="left", clickCount=1)
    tab.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    tab.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    moved, _ = map(float, re.findall(r"([\d.]+) ms", tab.value(LABELS)[0]))
    assert moved - low == pytest.approx(100 * (high - low) / 763, rel=0.02), (
        "drag to the left: later"
    )
    for count in (1, 2):
        tab.mouse("mousePressed", x, y, button="left", clickCount=count)
        tab.mouse("mouseReleased", x, y, button="left", clickCount=count)
    assert tab.value(LABELS) == WHOLE


@needs_chromium
def test_a_bar_tells_what_it_is(tab: Tab) -> None:
    x, y = place(tab)
    tab.mouse("mouseMoved", x - 20, y)
    text = tab.value("document.querySelector('.tip').innerText")
    assert tab.value("document.querySelector('.tip').hidden") is False
    assert re.search(r"stage0\.I@0\+1", text) and "backward" in text and "2 ms" in text
    tab.mouse("mouseMoved", x - 20, y + 400 if y < 600 else y - 60)
    tab.mouse("mouseMoved", 5, 5)
    assert tab.value("document.querySelector('.tip').hidden") is True


@needs_chromium
def test_keys_zoom_and_move(tab: Tab) -> None:
    tab.value("document.querySelector('.bars').focus()")
    for key in ("+", "+", "ArrowRight"):
        tab.key(key)
    low, high = map(float, re.findall(r"([\d.]+) ms", tab.value(LABELS)[0]))
    span = 13.9 * 0.49
    assert high - low == pytest.approx(span, rel=2e-3)
    assert low == pytest.approx((13.9 - span) / 2 + 0.2 * span, rel=2e-3)
    tab.key("0")
    assert tab.value(LABELS) == WHOLE


@needs_chromium
def test_filters_hide_kinds_axes_and_ranks_and_scales_can_be_one(tab: Tab) -> None:
    def click(text: str) -> list[str]:
        tab.value(
            f"Array.from(document.querySelectorAll('.filters label')).find(x => x.innerText.includes('{text}')).click()"
        )
        return [label.split(": ")[1] for label in tab.value(LABELS)]

    assert [label.partition(" from")[0] for label in click("dp")] == ["12 rows"] * 2
    assert [label.partition(" from")[0] for label in click("communication")] == ["4 rows"] * 2
    assert all("2 rows" in label or "3 rows" in label for label in click("rank 1 "))
    assert "3 rows from 0 s to 17.38 ms" in click("one for all")[0]
