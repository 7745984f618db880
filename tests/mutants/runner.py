"""Runs mutants, each in a copy of the sources, and keeps what came of them."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.model import PACKAGE, ROOT, Mutant, MutantError

CAUGHT, SURVIVED, TIMEOUT, BROKEN = "caught", "survived", "timeout", "broken"
EQUIVALENT = "equivalent"
FAILED = (1, 2)  # of pytest: a test failed; a module could not even be imported
FAILING = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
LEAST_SECONDS, SLOWER = 60.0, 3.0  # a limit: these, and so many times what no fault takes
Row = dict[str, Any]
Say = Callable[[str], None]


class Stopped(Exception):
    """A person stopped the run."""


@dataclass
class Sandbox:
    """A copy of the sources that holds one fault at a time."""

    folder: Path
    root: Path = ROOT

    @classmethod
    def make(cls, root: Path, under: Path, number: int) -> Sandbox:
        """Copy the sources of `root`."""
        folder = under / f"copy{number}"
        shutil.copytree(root / "src", folder / "src")
        return cls(folder, root)

    @contextmanager
    def holding(self, mutant: Mutant) -> Iterator[None]:
        """The fault in the copy, and out of it again."""
        path = self.folder / PACKAGE / mutant.file
        if not path.is_file():
            raise MutantError(f"{mutant.file}: no such file")
        source = path.read_text()
        # Compiled code is told from its source by seconds and size: a fault may have both.
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            stale.unlink()
        path.write_text(mutant.applied(source))
        try:
            yield
        finally:
            path.write_text(source)

    def test(
        self, tests: Sequence[str], limit: float, started: set[BaseProcess]
    ) -> tuple[int | None, str]:
        """(exit status of pytest on the copy, what it printed); None: over the limit."""
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".log") as log:
            where = (str(self.root), str(self.folder / "src"), log.name)
            process = _SERVER.Process(target=_pytest, args=(*where, *tests))
            process.start()
            started.add(process)
            try:
                process.join(limit)
                if process.exitcode is None:
                    stop(process)
                    return None, ""
            finally:
                started.discard(process)
            said = log.read().decode(errors="replace")
        return process.exitcode, said


# Every run is a fork of a process that has loaded pytest and the libraries that are the same with
# and without a fault, but nothing of the package: half of the time of most runs is theirs.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    "pytest numpy hypothesis mpmath sympy elftools.elf.elffile typer rich.console jinja2 "
    "scipy.optimize".split()
)


def _pytest(root: str, source: str, log: str, *tests: str) -> None:
    """Run tests of `root` on the package in `source`; ends the process with pytest's status."""
    assert "warploom" not in sys.modules
    os.setsid()
    os.chdir(root)
    sys.path.insert(0, source)
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=source, PYTHONDONTWRITEBYTECODE="1")
    os.environ.pop("WARPLOOM_CACHE", None)  # what a fault compiled is nobody else's
    with Path(log).open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu"]
    sys.exit(int(pytest.main([*options, *tests])))


def stop(process: BaseProcess) -> None:
    """End a test run and what it started."""
    try:
        os.killpg(process.pid or 0, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


class Runner:
    """Runs mutants over some copies; `rows` by key, written to `store` after each."""

    def __init__(
        self, store: Path | None = None, root: Path = ROOT, jobs: int = 1, say: Say = print
    ) -> None:
        self.store, self.root, self.jobs, self.say = store, root, jobs, say
        self.rows: dict[str, Row] = {}
        if store and store.is_file():
            self.rows = {row["key"]: row for row in json.loads(store.read_text())}
        self.started: set[BaseProcess] = set()
        self.commit = _commit(root)
        self.stopping = False

    def run(self, mutants: Sequence[Mutant]) -> list[Row]:
        """The row of every mutant, in their order; rows that still hold are not run again.

        Raises `MutantError` where the tests fail without a fault, for then they say nothing.
        """
        keys = [mutant.key(self.root) for mutant in mutants]
        left = [
            (key, mutant)
            for key, mutant in dict(zip(keys, mutants, strict=True)).items()
            if self.rows.get(key, {}).get("outcome", BROKEN) == BROKEN
        ]
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copies: queue.Queue[Sandbox] = queue.Queue()
            for number in range(min(self.jobs, len(left))):
                copies.put(Sandbox.make(self.root, Path(folder), number))
            self._all(left, copies)
        return [self.rows[key] for key in keys]

    def _all(self, left: list[tuple[str, Mutant]], copies: queue.Queue[Sandbox]) -> None:
        began, run = time.monotonic(), 0
        pool = ThreadPoolExecutor(self.jobs)
        try:
            wanted = dict.fromkeys(m.tests for _, m in left if not m.equivalent)
            futures = {pool.submit(self._baseline, tests, copies): tests for tests in wanted}
            limits: dict[tuple[str, ...], float] = {}
            for number, future in enumerate(as_completed(futures), 1):
                seconds = future.result()
                limits[futures[future]] = LEAST_SECONDS + SLOWER * seconds
                self.say(f"{number} of {len(futures)} sets of tests pass without a fault")
            began = time.monotonic()
            jobs = [pool.submit(self._one, key, m, limits, copies) for key, m in left]
            for run, future in enumerate(as_completed(jobs), 1):
                row = future.result()
                self._keep(row)
                spent = time.monotonic() - began
                rest = spent / run * (len(jobs) - run)
                where = f"{row['file']}:{row['line']}"
                self.say(
                    f"{run} of {len(jobs)}, {rest / 60:.0f} min left: {row['outcome']:<10} {where}"
                )
        finally:
            self.stopping = True
            for process in list(self.started):
                stop(process)
            pool.shutdown(cancel_futures=True)
            self.stopping = False

    def _baseline(self, tests: tuple[str, ...], copies: queue.Queue[Sandbox]) -> float:
        began, copy = time.monotonic(), copies.get()
        try:
            status, said = self._test(copy, tests, 1800.0)
        finally:
            copies.put(copy)
        if status != 0:
            last = "\n".join(said.splitlines()[-6:])
            raise MutantError(f"without a fault {' '.join(tests)} ends with {status}:\n{last}")
        return time.monotonic() - began

    def _test(self, copy: Sandbox, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        if self.stopping:
            raise Stopped
        return copy.test(tests, limit, self.started)

    def _one(
        self,
        key: str,
        mutant: Mutant,
        limits: dict[tuple[str, ...], float],
        copies: queue.Queue[Sandbox],
    ) -> Row:
        began, copy, said = time.monotonic(), copies.get(), ""
        try:
            with copy.holding(mutant):
                if mutant.equivalent:
                    outcome = EQUIVALENT
                else:
                    status, said = self._test(copy, mutant.tests, limits[mutant.tests])
                    outcome = (
                        TIMEOUT
                        if status is None
                        else CAUGHT
                        if status in FAILED
                        else SURVIVED
                        if status == 0
                        else BROKEN
                    )
        except MutantError as error:
            outcome, said = BROKEN, str(error)
        finally:
            copies.put(copy)
        path = self.root / PACKAGE / mutant.file
        return {
            "key": key,
            "kind": mutant.kind,
            "checker": mutant.checker,
            "file": mutant.file,
            "line": mutant.line(path.read_text()) if path.is_file() else 0,
            "before": mutant.before,
            "after": mutant.after,
            "at": mutant.at,
            "why": mutant.why,
            "tests": list(mutant.tests),
            "outcome": outcome,
            "reason": mutant.equivalent or (said[-500:] if outcome == BROKEN else ""),
            "by": failed[1] if (failed := FAILING.search(said)) else "",
            "seconds": round(time.monotonic() - began, 2),
            "date": datetime.date.today().isoformat(),
            "commit": self.commit,
        }

    def _keep(self, row: Row) -> None:
        """In the place of what the same fault came to before its file or its tests changed."""
        same = [key for key, old in self.rows.items() if identity(old) == identity(row)]
        for key in same:
            del self.rows[key]
        self.rows[row["key"]] = row
        if self.store is None:
            return
        rows = sorted(self.rows.values(), key=lambda r: (r["checker"], r["file"], r["line"]))
        aside = self.store.with_suffix(".part")
        aside.write_text(json.dumps(rows, indent=1) + "\n")
        aside.replace(self.store)


def identity(row: Row) -> tuple[str, ...]:
    """Which fault a row is about."""
    return tuple(str(row[name]) for name in ("kind", "checker", "file", "before", "after", "at"))


def _commit(root: Path) -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    dirty = "+" if git("status", "--porcelain", "src", "tests") else ""
    return git("rev-parse", "--short", "HEAD") + dirty
