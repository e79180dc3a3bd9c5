"""Headless Chromium over its debugging pipe: what a page looks like to a reader, and what it asks for.

Protocol: "Chrome DevTools Protocol"; with --remote-debugging-pipe, JSON messages ended by a zero byte on file
descriptors 3 (to the browser) and 4 (from it). No library and no port is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
LONGEST_S = 120.0
MEASURE = """({
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  images: Array.from(document.images).map(i => i.complete && i.naturalWidth > 0),
  unnamed: Array.from(document.images).filter(i => !i.alt).length,
  anchors: Array.from(document.querySelectorAll('nav a')).map(a => document.querySelector(a.getAttribute('href')) !== null),
})"""


def chromium() -> str | None:
    """The path of the browser; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class View:
    """A page at one size. `errors`: messages of the console and exceptions; `requests`: addresses beside the page's own
    and data; `overflow`: pixels by which the page is wider than its window; `images`, `anchors`: whether each was
    drawn, or leads somewhere; `unnamed`: images without a text for those who cannot see them."""

    errors: list[str]
    requests: list[str]
    overflow: int
    images: list[bool]
    anchors: list[bool]
    unnamed: int
    screenshot: bytes


class Browser:
    """One process; each `look` or `tab` is a fresh tab."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def look(self, page: Path, width: int, height: int, *, dark: bool = False) -> View:
        with self.tab(page, width, height, dark=dark) as tab:
            measured, screenshot = tab.value(MEASURE), tab.screenshot()
        requests = [e["request"]["url"] for e in self._seen("Network.requestWillBeSent")]
        outside = [u for u in requests if u != page.as_uri() and not u.startswith("data:")]
        return View(self._errors(), outside, **measured, screenshot=screenshot)

    @contextmanager
    def tab(self, page: Path, width: int, height: int, *, dark: bool = False) -> Iterator[Tab]:
        """A page after it was loaded, for hands: mouse, keys and scripts of a test."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable", session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", session, features=[scheme])
        self.ask("Page.navigate", session, url=page.as_uri())
        self._wait_for("Page.loadEventFired")
        yield Tab(self, session)
        self.ask("Target.closeTarget", targetId=target)

    def _errors(self) -> list[str]:
        said = [
            str(e["args"])
            for e in self._seen("Runtime.consoleAPICalled")
            if e["type"] in ("error", "warning", "assert")
        ]
        said += [e["exceptionDetails"]["text"] for e in self._seen("Runtime.exceptionThrown")]
        return said + [
            e["entry"]["text"]
            for e in self._seen("Log.entryAdded")
            if e["entry"]["level"] in ("error", "warning")
        ]

    def _seen(self, method: str) -> list[dict[str, Any]]:
        return [e["params"] for e in self._events if e["method"] == method]

    def ask(self, method: str, session: str = "", /, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self._events.append(found)

    def _wait_for(self, method: str) -> None:
        while not self._seen(method):
            self._events.append(self._read())

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + LONGEST_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {LONGEST_S} s"
            more = os.read(self._back, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@dataclass(frozen=True)
class Tab:
    """One loaded page. Places are in pixels from the top left corner of the window."""

    browser: Browser
    session: str

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which must be JSON."""
        answer = self.browser.ask(
            "Runtime.evaluate", self.session, expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One event: "mouseMoved", "mousePressed", "mouseReleased" or "mouseWheel"."""
        self.browser.ask("Input.dispatchMouseEvent", self.session, type=kind, x=x, y=y, **more)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.browser.ask("Input.dispatchKeyEvent", self.session, type=kind, key=key)

    def screenshot(self, *, whole: bool = True) -> bytes:
        shot = self.browser.ask("Page.captureScreenshot", self.session, captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that reaches no network; it is gone afterwards."""
    path = chromium()
    assert path is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update"
    )
    pipes = f"3<&{theirs_in} 4>&{theirs_out}"
    command = f'exec "$0" {flags} --remote-debugging-pipe --host-resolver-rules="MAP * ~NOTFOUND" --user-data-dir="$1" {pipes}'
    process = subprocess.Popen(
        ["bash", "-c", command, path, str(profile)],
        pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        process.terminate()
        process.wait(timeout=30)
