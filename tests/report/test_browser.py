"""The pages in Chromium: zoom, search, choosing a step, dark mode, narrow screens, the keyboard.

The browser is driven through chromedriver's own protocol (W3C WebDriver). Skipped where Chromium or
chromedriver is not there.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warploom.report.sass_html import diff_html, show_html
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import decode
from warploom.sass.flow.diff import diff
from warploom.sass.show.explain import explain

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
DRIVER = shutil.which("chromedriver") or ""
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
)
KEYS = {"right": "\ue014", "down": "\ue015", "enter": "\ue007"}


class Browser:
    """A session of a headless Chromium."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}/session"
        options = {
            "binary": CHROMIUM,
            "args": ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"],
        }
        wanted = {"alwaysMatch": {"goog:chromeOptions": options}}
        self.root += "/" + self("", {"capabilities": wanted})["sessionId"]

    def __call__(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        text = None if method != "POST" else json.dumps(body or {}).encode()
        asked = urllib.request.Request(self.root + path, text, method=method)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script: str) -> Any:
        """What a JavaScript function's body gives back."""
        return self("/execute/sync", {"script": script, "args": []})

    def element(self, selector: str) -> str:
        """The path of the first element of a CSS selector."""
        found = self("/element", {"using": "css selector", "value": selector})
        return "/element/" + next(iter(found.values()))

    def click(self, selector: str) -> None:
        self(self.element(selector) + "/click")

    def type(self, selector: str, text: str) -> None:
        self(self.element(selector) + "/value", {"text": text})

    def open(self, page: Path, width: int = 1280) -> None:
        """A page, in a window of that width."""
        device = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        cdp = {"cmd": "Emulation.setDeviceMetricsOverride", "params": device}
        self("/goog/cdp/execute", cdp)
        self("/url", {"url": page.as_uri()})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL)
    session = None
    for _ in range(100):
        try:
            session = Browser(port)
            break
        except OSError:
            time.sleep(0.1)
    assert session is not None, "chromedriver does not answer"
    try:
        yield session
    finally:
        session("", method="DELETE")
        driver.terminate()
        driver.wait()


TOLD = "return document.getElementById('told').textContent"
LIT = """return ['program', 'cuda', 'sass'].map(id => [...document.querySelectorAll(`#${id} .on`)]
  .map(line => line.textContent))"""
WIDTH = "const one = timelines[0]; return one.to - one.from"


def test_a_step_lights_its_line_everywhere(browser: Browser, report: Path) -> None:
    """From a bar, by mouse; then from a line of the program."""
    browser.open(report)
    assert browser.run(LIT) == [[], [], []]
    browser.run("window.bar = timelines[0].bars.find(bar => nameOf(bar.bar[2]) === 'Issue mma.3')")
    browser.run("document.querySelector('#times').scrollIntoView()")
    middle = browser.run(
        "const box = bar.getBoundingClientRect(); return [box.x + box.width / 2, box.y + 9]"
    )
    pointer = [
        {"type": "pointerMove", "duration": 0, "x": round(middle[0]), "y": round(middle[1])},
        {"type": "pointerDown", "button": 0},
        {"type": "pointerUp", "button": 0},
    ]
    browser("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": pointer}]})
    program, cuda, sass = browser.run(LIT)
    assert len(program) == 1 and "= mma" in program[0], program
    assert any("wgmma_" in line for line in cuda) and any("HGMMA" in line for line in sass)
    assert "Issue mma.3" in browser.run(TOLD)
    browser.run("[...document.querySelectorAll('#program [data-o]')].at(-1).click()")
    assert not any("HGMMA" in line for line in browser.run(LIT)[2])
    assert "store" in browser.run(TOLD)


def test_zoom_and_keys(browser: Browser, report: Path) -> None:
    browser.open(report)
    whole = browser.run(WIDTH)
    browser.click("#in")
    assert browser.run(WIDTH) == pytest.approx(whole / 2)
    browser.type(".timeline", "+")
    assert browser.run(WIDTH) == pytest.approx(whole / 4)
    browser.type(".timeline", KEYS["right"])
    first = browser.run(TOLD)
    browser.type(".timeline", KEYS["right"])
    assert first.startswith("compute0: ") and browser.run(TOLD) != first
    browser.type(".timeline", KEYS["down"])
    assert not browser.run(TOLD).startswith("compute0: ")
    browser.type(".timeline", "f")
    assert browser.run(WIDTH) == pytest.approx(whole)
    browser.type("#sass", KEYS["down"])
    assert browser.run("return document.querySelectorAll('#sass .on').length") > 0


def test_search_finds_bars_and_lines(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.type("#search", "HGMMA")
    assert browser.run("return document.querySelectorAll('#sass .found').length") == browser.run(
        "return [...document.querySelectorAll('#sass > div')]"
        ".filter(line => line.textContent.includes('HGMMA')).length"
    )
    assert browser.run("return document.querySelectorAll('rect.faint').length") > 0
    browser.type("#search", KEYS["enter"])
    assert browser.run("return document.querySelectorAll('#cuda .on').length") > 0


COLOUR = "return getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize("width", [1280, 390])
def test_dark_mode_and_width(browser: Browser, report: Path, width: int) -> None:
    browser.open(report, width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    light = browser.run(COLOUR)
    browser.click("#theme")
    dark = browser.run(COLOUR)
    browser.click("#theme")
    assert light == browser.run(COLOUR) != dark
    assert browser.run("return document.querySelectorAll('#plot circle.built').length") == 1


def test_pages_of_machine_code(
    browser: Browser, cubin_of: Callable[[str], Cubin], tmp_path: Path
) -> None:
    before, after = (
        cubin_of("prebuilt_attention_sm90a"),
        cubin_of("triton_attention_128x64_w8_s3_sm90"),
    )
    shown, compared = tmp_path / "show.html", tmp_path / "diff.html"
    kernel = decode(after)
    shown.write_text(show_html(after, kernel, explain(kernel)))
    compared.write_text(diff_html(before, after, diff(before, after)))
    browser.open(shown, 390)
    assert browser.run("return document.documentElement.scrollWidth") <= 390
    browser.click("#fold")
    browser.type("#search", "HGMMA" + KEYS["enter"])
    assert browser.run("return document.querySelectorAll('details[open]').length") == 1
    found = browser.run("return document.querySelectorAll('.code-row.found').length")
    assert found == sum(item.base == "HGMMA" for item in kernel.instructions)
    browser.open(compared)
    visible = (
        "return [...document.querySelectorAll('tr.same')].filter(row => row.offsetHeight).length"
    )
    assert browser.run(visible) > 0
    browser.click("[data-hides=context]")
    assert browser.run(visible) == 0
