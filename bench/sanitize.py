"""compute-sanitizer over small launches of every kernel family: memcheck, racecheck, initcheck.

Each tool runs one process that does every case and says where it is; findings are counted by case.
Results are also compared with the interpreter, as a tool that changes the answer has found
something too. `--one` is that process; `--out FILE` writes evidence rows.

    python -m bench.sanitize --out bench/results/sanitizer.json [--cases gemm,attention]
    python -m bench.sanitize --merge ROWS...   rows of other runs into it, by case and tool
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.cases import CASES, PLANTED

from bench.evidence import Evidence, read_rows, write_rows
from warploom.errors import WarploomError

ROOT = Path(__file__).resolve().parents[1]

RESULTS = ROOT / "bench" / "results" / "sanitizer.json"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
MARK = "##case "
UNREACHED = "not reached"
PRINTED = "5000"  # findings of all cases of a process: those beyond are lost, the planted one first


@dataclass(frozen=True)
class Limits:
    """Seconds that a case and a tool may take; a process starts within those of its first case."""

    case: float
    tool: float


FINDING = re.compile(r"^={9} (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK|    )(\S.*)")


def chosen(text: str) -> list[str]:
    """The cases whose names begin with one of the comma-separated words."""
    words = text.split(",") if text else [""]
    return [name for name in CASES if any(name.startswith(word) for word in words)]


def one(names: list[str], planted: str = "") -> int:
    """Run cases in this process, each announced; the exit code says whether all were right.

    The planted fault of a tool comes last, as a fault may end the process.
    """
    wrong = 0
    table = {**CASES, **{f"planted-{tool}": make for tool, make in PLANTED.items()}}
    for name in [*names, *([f"planted-{planted}"] if planted in PLANTED else [])]:
        print(MARK + name, flush=True)
        case = table[name]()
        try:
            worst = max(case.errors().values())
        except WarploomError as error:
            print(f"##error {' '.join(str(error).split())}", flush=True)
            wrong += 1
            continue
        print(f"##distance {worst:.3e} bound {case.bound:.0e}", flush=True)
        wrong += not worst <= case.bound
    print(MARK + "end", flush=True)
    return 1 if wrong else 0


def findings(text: str) -> dict[str, list[str]]:
    """What a tool said of each case: the first line of every finding."""
    found: dict[str, list[str]] = {}
    name = "start"
    for line in text.splitlines():
        if line.startswith(MARK):
            name = line.removeprefix(MARK).strip()
            found[name] = []
        elif line.startswith("##error"):
            found.setdefault(name, []).append("error: " + line.removeprefix("##error "))
        elif match := FINDING.match(line):
            found.setdefault(name, []).append(match.group(1))
    return found


def distances(text: str) -> dict[str, float]:
    """The distance from the interpreter that every case reported."""
    found: dict[str, float] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith(MARK):
            name = line.removeprefix(MARK).strip()
        elif line.startswith("##distance"):
            found[name] = float(line.split()[1])
    return found


def run(tool: str, names: list[str], limits: Limits) -> tuple[str, dict[str, str]]:
    """(output, what kept a case from its end) of one tool over the cases.

    A case that gives no answer in its time, or ends its process, costs the cases behind it a new
    process and nothing else.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return "", dict.fromkeys(names, "compute-sanitizer is not on the PATH")
    end, text, troubles, left = time.monotonic() + limits.tool, "", dict[str, str](), list(names)
    while left and time.monotonic() < end:
        command = [sanitizer, "--tool", tool, "--target-processes", "application-only"]
        command += ["--print-limit", PRINTED, sys.executable, "-m", "bench.sanitize", "--one"]
        command += ["--planted", tool, "--cases", ",".join(left)]
        said, trouble = watched(command, limits.case, end)
        text += said
        reached = [line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)]
        if "end" in reached:
            left = []
            break
        stuck = reached[-1] if reached else left[0]
        troubles[stuck] = trouble
        left = left[left.index(stuck) + 1 :] if stuck in left else []
    return text, troubles | dict.fromkeys(left, f"{UNREACHED} in {limits.tool} s")


def watched(command: list[str], case_s: float, end: float) -> tuple[str, str]:
    """(output, trouble) of a command, every mark of which is printed with its time as it comes; it
    is ended at the time `end` and when the next mark does not come in `case_s` seconds."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        stream = process.stdout
        reader = threading.Thread(target=lambda: [*map(lines.put, stream)], daemon=True)
        reader.start()
        text, began, marked = "", time.monotonic(), time.monotonic()
        while reader.is_alive() or not lines.empty():
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=0.2)
                text += line
                if line.startswith("##"):
                    marked = time.monotonic()
                    print(f"{marked - began:7.1f} s {line.rstrip()}", flush=True)
            if time.monotonic() > min(end, marked + case_s):
                os.killpg(process.pid, signal.SIGKILL)
                return text, f"no answer within {time.monotonic() - marked:.0f} s"
        return text, f"stopped with code {process.wait()}"


def device() -> tuple[str, str]:
    """(name, driver) of the GPU."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        name, driver = (part.strip() for part in done.stdout.splitlines()[0].split(","))
    except (OSError, IndexError, ValueError):
        return "none", ""
    return name, driver


def merge(files: list[Path]) -> int:
    """Put the rows of runs into the results; a row replaces the one of its case and tool.

    Rows of a tool that did not see its planted fault say nothing, nor do those of cases that a run
    did not reach; those of former cases go.
    """
    rows: dict[tuple[str, str], Evidence] = {}
    for path in (RESULTS, *files):
        for row in read_rows(path):
            tool = str(row.checks["tool"])
            blind = tool in PLANTED and not row.checks["findings_of_planted_fault"]
            unreached = str(row.checks["trouble"]).startswith(UNREACHED)
            if row.kernel in CASES and not (blind or unreached):
                rows[row.kernel, tool] = row
    ordered = sorted(rows.values(), key=lambda row: TOOLS.index(str(row.checks["tool"])))
    write_rows(RESULTS, ordered)
    print(f"{len(rows)} rows in {RESULTS}")
    return 0


def main() -> int:
    """Every tool over the chosen cases; a table, and rows when asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", action="store_true", help="run the cases in this process")
    parser.add_argument("--planted", default="", help="with --one: end with this tool's fault")
    parser.add_argument("--cases", default="", help="names or beginnings of names, comma-separated")
    parser.add_argument("--tools", default=",".join(TOOLS[:2]))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--log", type=Path, help="folder for what the tools printed")
    parser.add_argument("--case-limit", type=float, default=60.0, help="seconds of a case")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a tool")
    parser.add_argument("--merge", type=Path, nargs="+", help="rows of runs to put into the table")
    args = parser.parse_args()
    if args.merge:
        return merge(args.merge)
    if args.one:
        return one(args.cases.split(","), args.planted)
    names = chosen(args.cases)
    rows: list[Evidence] = []
    name, driver = device()
    total = 0
    for tool in args.tools.split(","):
        text, troubles = run(tool, names, Limits(args.case_limit, args.limit))
        if args.log:
            args.log.mkdir(parents=True, exist_ok=True)
            (args.log / f"{tool}.txt").write_text(text)
        said, far = findings(text), distances(text)
        seen = sum(not line.startswith("error:") for line in said.get(f"planted-{tool}", []))
        print(f"{tool:10} {'planted fault':28} {seen:4} findings")
        if tool in PLANTED and not seen:
            print(f"{tool:10} did not see the planted fault")
            total += 1
        for case in names:
            count = len(said.get(case, []))
            state = troubles.get(case, "" if case in far or count else "no answer")
            total += count + bool(state)
            print(
                f"{tool:10} {case:28} {count:4} findings  {far.get(case, float('nan')):.1e} {state}"
            )
            for line in said.get(case, [])[:3]:
                print(f"           {line}")
            rows.append(
                Evidence(
                    claim="sanitizer", kernel=case, shape="small", dtype="", device=name,
                    driver=driver, compiler="", unit="findings", better="lower",
                    date=datetime.datetime.now(datetime.UTC).date().isoformat(),
                    command=f"python -m bench.sanitize --tools {tool} --cases {case}",
                    ours=float(count), baselines={"allowed": 0.0}, ratio_to_best=1.0, samples=1,
                    checks={"tool": tool, "findings": said.get(case, [])[:5],
                            "distance": far.get(case), "trouble": state,
                            "findings_of_planted_fault": seen},
                )
            )  # fmt: skip
    if args.out:
        write_rows(args.out, rows)
    print(f"{total} findings in {len(rows)} runs")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
