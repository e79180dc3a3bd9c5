"""The report as files, and the page as a reader's browser shows it."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from packages.report.tests import samples
from packages.report.tests.browser import Browser, browser, chromium
from piper_ir.ground.codec import dumps
from piper_ir.ground.errors import OutputError
from piper_report import Report, write_report
from piper_report.figures.style import house_style, new_figure, panels, picture
from piper_report.pages.page import PageSection, page
from piper_report.tables.tables import Column, sheet
from tests.helpers.cases import each_case

FIGURES = {"timeline", "memory", "loss", "step_time", "history", "pareto", "parameters"}
TABLES = {
    "headline", "ranks", "sources", "stages", "memory_lines", "owners", "steps", "confirmed", "rejected", "rules",
    "trials", "costs",
}  # fmt: skip
SIZES = {"laptop": (1280, 800), "phone": (390, 844)}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report(samples.whole_folder(tmp_path_factory.mktemp("whole") / "run-001"))


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return report.html.read_text(encoding="utf-8")


@pytest.mark.long
def test_all_figures_and_tables_are_written_beside_the_page(report: Report) -> None:
    assert report.html.name == "report.html" and report.html.parent.name == "report"
    assert {p.stem for p in report.figures} == FIGURES and {p.stem for p in report.tables} == TABLES
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in report.figures)
    assert {p.name for p in report.html.parent.iterdir()} == {
        p.name for p in (report.html, *report.figures, *report.tables)
    }
    for path in report.tables:
        assert len(pandas.read_csv(path)) > 0, path


def test_the_page_holds_everything_and_asks_for_nothing(html: str) -> None:
    assert (
        set(re.findall(r'id="figure-(\w+)"', html)) == FIGURES
        and set(re.findall(r'id="table-(\w+)"', html)) == TABLES
    )
    sources = re.findall(r'(?:src|href)="([^"]{1,40})', html)
    assert all(s.startswith(("data:image/", "data:,", "#")) for s in sources), sources
    assert "<script src" not in html and "@import" not in html and "url(" not in html
    assert len(html.encode()) < 3 << 20


def test_words_of_others_are_text_not_markup(html: str) -> None:
    assert "&lt;b&gt;8 rows&lt;/b&gt; by 3 &amp; more" in html and "<b>8 rows" not in html


def test_the_page_says_where_durations_and_clocks_come_from(html: str) -> None:
    assert "Where the predicted durations come from" in html
    assert re.search(r"Clocks: rank 1: offset 0 s \+- [\d.]+ (us|ms)", html)
    assert "warning:" in html


@pytest.mark.parametrize(
    ("write", "sections"),
    [
        (samples.write_simulation, ["summary", "strategy", "timeline", "memory"]),
        (samples.write_tuning, ["tuning"]),
        (samples.write_costs, ["costs"]),
    ],
)
def test_a_part_of_the_results_makes_a_part_of_the_page(
    write, sections: list[str], tmp_path: Path
) -> None:
    write(tmp_path)
    made = write_report(tmp_path, out=tmp_path / "there")
    text = made.html.read_text(encoding="utf-8")
    assert (
        made.html.parent == tmp_path / "there"
        and re.findall(r'<section id="(\w+)">', text) == sections
    )
    assert text.count("<img") == len(made.figures) and text.count("<table") == len(made.tables)


@pytest.mark.parametrize("name", ["spans-measured.json", "metrics.jsonl", "spans-predicted.json"])
def test_a_single_file_is_enough(name: str, tmp_path: Path) -> None:
    samples.write_simulation(tmp_path)
    samples.write_run(tmp_path)
    for other in tmp_path.iterdir():
        if other.name != name:
            other.unlink()
    assert write_report(tmp_path).figures


def test_a_step_that_takes_no_time_can_be_drawn(tmp_path: Path) -> None:
    trace = samples.simulation().trace
    spans = tuple(replace(s, start=0.0, end=0.0, ready=0.0) for s in trace.spans)
    still = replace(trace, spans=spans, memory=tuple(replace(m, time=0.0) for m in trace.memory))
    (tmp_path / "spans-predicted.json").write_text(dumps(still))
    assert {p.stem for p in write_report(tmp_path).figures} == {"timeline", "memory"}


def test_a_run_that_hung_says_so(tmp_path: Path) -> None:
    (tmp_path / "hang.txt").write_text("rank 0: ...")
    (tmp_path / "metrics.jsonl").write_text("")
    text = write_report(tmp_path).html.read_text(encoding="utf-8")
    assert "this run hung; " in text and "<strong>hung</strong>" in text


def test_a_report_that_cannot_be_written_leaves_the_results_alone(tmp_path: Path) -> None:
    samples.write_costs(tmp_path)
    (tmp_path / "report").write_text("a file is in the way")
    with pytest.raises(
        OutputError,
        match=r"cannot write the report to .*report: File exists; the results are untouched",
    ):
        write_report(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"costs.json", "report"}


def test_a_full_disk_while_reporting(tmp_path: Path) -> None:
    """/dev/full accepts no byte."""
    samples.write_costs(tmp_path)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="No space left on device"):
        write_report(tmp_path)


def test_a_drawing_with_many_marks_goes_in_as_pixels() -> None:
    with house_style():
        kinds = []
        for marks in (10, 10_000):
            figure = new_figure(1.0, 2.0)
            panels(figure, 1)[0].plot([0, 1], [0, 1])
            kinds.append(picture(figure, "x", "X", "a line", marks=marks).uri.partition(";")[0])
    assert kinds == ["data:image/svg+xml", "data:image/png"]


needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="no chromium on PATH (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@needs_chromium
@each_case("size", SIZES.values(), ids=SIZES)
def test_a_browser_shows_the_page_without_complaint(
    size: tuple[int, int], chrome: Browser, report: Report
) -> None:
    view = chrome.look(report.html, *size)
    (report.html.parent.parent / f"seen-{size[0]}.png").write_bytes(view.screenshot)
    assert view.errors == [] and view.requests == []
    assert view.overflow <= 0, "wide things scroll in their own boxes"
    assert view.images == [True] * len(FIGURES) and view.unnamed == 0
    assert view.anchors and all(view.anchors)


@needs_chromium
def test_negative_control_a_browser_sees_what_is_wrong(chrome: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<!DOCTYPE html><nav><a href="#none">x</a></nav><div style="width:3000px">x</div>'
        '<img src="https://example.invalid/x.png"><script>console.error("oh")</script>'
    )
    view = chrome.look(bad, 390, 844)
    assert any("oh" in e for e in view.errors) and view.requests == [
        "https://example.invalid/x.png"
    ]
    assert (
        view.overflow > 0
        and view.images == [False]
        and view.unnamed == 1
        and view.anchors == [False]
    )


@needs_chromium
def test_negative_control_the_policy_of_the_page_forbids_to_load(
    chrome: Browser, tmp_path: Path
) -> None:
    found = sheet("x", "X", [Column("a", "A")], [("1",)])
    text = page("t", [], [PageSection("s", "S", items=[found])])
    (tmp_path / "page.html").write_text(
        text.replace("</main>", '<img alt="x" src="https://example.invalid/x.png"></main>')
    )
    assert any(
        "Content Security Policy" in e
        for e in chrome.look(tmp_path / "page.html", 1280, 800).errors
    )
