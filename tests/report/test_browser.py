"""The pages in Chromium: zoom, search, choosing a step, dark mode, narrow screens, the keyboard.

Skipped where Chromium or chromedriver is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.browser import CHROMIUM, DRIVER, KEYS, Browser
from bench.browser import browser as opened
from warploom.report.sass_html import diff_html, show_html
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import decode
from warploom.sass.flow.diff import diff
from warploom.sass.show.explain import explain

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as session:
        yield session


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


def test_the_kernel_is_in_view_and_axes_have_round_numbers(browser: Browser, report: Path) -> None:
    browser.open(report)
    cuda = "const pane = document.getElementById('cuda'); const top = pane.scrollTop; "
    line = "[...pane.children].find(line => line.offsetTop - pane.offsetTop >= top - 1)"
    assert "__global__" in browser.run(f"{cuda} return {line}.textContent")
    said = "return [...document.querySelectorAll('#plot text')].map(text => text.textContent)"
    numbers = [text.replace(",", "") for text in browser.run(said)[:-2]]  # then the axes' names
    assert len(numbers) >= 4
    for number in numbers:
        assert len(number.replace(".", "").strip("0")) <= 3, numbers
    assert browser.run("return ticks(3, 21, 5)") == [5, 10, 15, 20]
    assert browser.run("return ticks(0.1, 0.31, 4)") == [0.1, 0.2, 0.3]


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
    row = first.partition(": ")[0]
    assert row.startswith("compute0") and browser.run(TOLD) != first
    assert browser.run(TOLD).startswith(f"{row}: ")
    browser.type(".timeline", KEYS["down"])
    assert not browser.run(TOLD).startswith(f"{row}: ")
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
