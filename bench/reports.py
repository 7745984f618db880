"""Report pages for the documentation, and pictures of them.

    python -m bench.reports              pages into build/reports, for the gallery of `make docs`
    python -m bench.reports --pictures   the same, and docs/img/report_*.png at two widths, which
                                         takes Chromium, chromedriver and Pillow

No GPU is needed: what the pages say is predicted, and says so.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import io
import shutil
import subprocess
import sys
from pathlib import Path

from bench.browser import Browser, browser
from warploom.errors import CheckFailed

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "reports"
PICTURES = ROOT / "docs" / "img"
WIDTHS = {1280: 900, 390: 1500}  # of a window, with its height
COLOURS = 256  # of a picture: a page has few
TUNED = "examples/tune_gemm_leaky_relu.py:kernel"
# Page -> the command that writes it into OUT, and the file that it is.
COMMANDS = {
    "optimize_attention": ("optimize attention --measure none -o OUT", "report.html"),
    "optimize_gemm": (
        "optimize gemm --set m=4000 --set n=6008 --set k=3000 --measure none --trace -o OUT",
        "report.html",
    ),
    "schedule_attention": ("schedule attention --time-limit 20 --html OUT/page.html", "page.html"),
    "tune": (f"tune {TUNED} --alias triton --measure model --budget 20s -o OUT", "diff.html"),
    "sass": ("sass show OUT/../tune/tuned.cubin --html OUT/page.html", "page.html"),
    "judge": (
        "judge bench/judged/row_sum_2.toml --against bench/judged/problems.py:row_sum "
        "--html OUT/page.html",
        "page.html",
    ),
}
EXITS = {"judge": 1}  # the candidate is refused


def write_pages() -> None:
    """Every page as build/reports/NAME.html."""
    for name, (command, page) in COMMANDS.items():
        out = PAGES / "folders" / name
        shutil.rmtree(out, ignore_errors=True)  # `tune` would go on from what lies there
        out.mkdir(parents=True)
        words = command.replace("OUT", str(out)).split()
        done = subprocess.run([sys.executable, "-m", "warploom", *words], check=False, cwd=ROOT)
        if done.returncode != EXITS.get(name, 0):
            raise CheckFailed(f"{' '.join(words)}: exit status {done.returncode}")
        shutil.copyfile(out / page, PAGES / f"{name}.html")


def write_pictures(session: Browser) -> None:
    """The first screen of every page at each width."""
    image = importlib.import_module("PIL.Image")
    for name in COMMANDS:
        for width, height in WIDTHS.items():
            session.open(PAGES / f"{name}.html", width, height)
            seen = base64.b64decode(session("/screenshot", method="GET"))
            picture = image.open(io.BytesIO(seen)).convert("RGB")
            # By coverage: a legend's colours are few pixels, and median cut mixed them.
            picture = picture.quantize(COLOURS, image.Quantize.MAXCOVERAGE, dither=0)
            picture.save(PICTURES / f"report_{name}_{width}.png", optimize=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.reports")
    parser.add_argument("--pictures", action="store_true")
    asked = parser.parse_args()
    write_pages()
    if asked.pictures:
        with browser() as session:
            write_pictures(session)


if __name__ == "__main__":
    main()
