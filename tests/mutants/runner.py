"""Runs mutants, each in a copy of the sources, and keeps what came of them."""

from __future__ import annotations

import ast
import datetime
import gc
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest
from tests.mutants.model import PACKAGE, ROOT, Mutant, MutantError

CAUGHT, SURVIVED, TIMEOUT, BROKEN = "caught", "survived", "timeout", "broken"
EQUIVALENT = "equivalent"
FAILED = (1, 2)  # of pytest: a test failed; a module could not even be imported
NOT_FOUND = 4  # of pytest: a test is not there, or its module could not even be imported
FAILING = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
LEAST_SECONDS, SLOWER = 60.0, 3.0  # a limit: these, and so many times what no fault takes
IDLE, STILL = 30.0, 0.1  # in so many seconds a run that hangs gets less than this of a processor
LIKELY = 4  # tests that are tried before all are collected
COMPILERS = ("cubin", "emulate")  # folders of a cache that nothing but compilers fill
COMPILING = "codegen/compile/"  # has to compile anew where it has a fault
TICK = os.sysconf("SC_CLK_TCK")
Row = dict[str, Any]
Say = Callable[[str], None]


class Stopped(Exception):
    """A person stopped the run."""


class Unsound(MutantError):
    """Tests fail without a fault."""


@dataclass
class Sandbox:
    """A copy of the sources that holds one fault at a time.

    What a faulty compiler or check lets into a cache would fail or pass the tests of the next
    fault: every run has a cache of its own, which begins with what was compiled without a fault.
    """

    folder: Path
    root: Path = ROOT
    holds: str = ""  # the file that has a fault

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
        self.holds = mutant.file
        try:
            yield
        finally:
            path.write_text(source)
            self.holds = ""

    def test(
        self,
        tests: Sequence[str],
        limit: float,
        started: set[BaseProcess],
        *,
        first: Sequence[str] = (),
        watched: Path | None = None,
    ) -> tuple[int | None, str]:
        """(exit status of pytest on the copy, what it printed); None: over the limit, in seconds
        of a processor. `first` run before the others; `watched` gets what each test enters."""
        temporary = Path(tempfile.mkdtemp(dir=self.folder, prefix="run"))
        self._link(self._clean, temporary)
        where = (str(self.root), str(self.folder / "src"), str(temporary))
        process = _server().Process(target=_pytest, args=(*where, tests, first, watched))
        process.start()
        started.add(process)
        try:
            if not _ends(process, limit):
                stop(process)
                return None, ""
            said = (temporary / "log").read_bytes().decode(errors="replace")
            if watched:
                self._link(temporary, self._clean)
        finally:
            started.discard(process)
            shutil.rmtree(temporary)
        return process.exitcode, said

    @property
    def _clean(self) -> Path:
        """What was compiled without a fault, for all copies."""
        return self.folder.parent / "clean"

    def _link(self, source: Path, target: Path) -> None:
        """Put the compiled code of a run into the folder of another."""
        for path in source.glob("warploom-*/*/**/*"):
            compiler = path.relative_to(source).parts[1]
            if path.is_dir() or compiler not in COMPILERS or self.holds.startswith(COMPILING):
                continue
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                os.link(path, place)


def _ends(process: BaseProcess, limit: float) -> bool:
    """Wait for a process: False when it took `limit` seconds of a processor, or takes none any
    more. The clock on the wall says nothing on a machine that is busy with other work."""
    began, marks = time.monotonic(), [(time.monotonic(), 0.0)]
    while True:
        process.join(0.5)
        if process.exitcode is not None:
            return True
        now, spent = time.monotonic(), _processor_seconds(process.pid or 0)
        marks.append((now, spent))
        while len(marks) > 1 and marks[1][0] <= now - min(IDLE, limit):
            marks.pop(0)
        if spent > limit or (now - began > limit and spent - marks[0][1] < STILL):
            return False


def _processor_seconds(session: int) -> float:
    """What the processes of a session and those of their children that ended took."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if int(words[3]) == session:
            total += sum(map(int, words[11:15])) / TICK
    return total


# Every run is a fork of a process that has loaded pytest and the libraries that are the same with
# and without a fault, but nothing of the package: half of the time of most runs is theirs.
_LOADED = (
    "pytest numpy hypothesis mpmath sympy elftools.elf.elffile typer rich.console jinja2 "
    "scipy.optimize".split()
)
_own: list[int] = []  # the process of the server, once it is started
_starting = threading.Lock()


def _server() -> Any:
    """The context of that process. There is one server in a process, and one that somebody else has
    started has loaded the package: it is stopped."""
    context = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver
    with _starting:
        if [server._forkserver_pid] != _own:
            server._stop()
            context.set_forkserver_preload(_LOADED)
            server.ensure_running()
            _own[:] = [server._forkserver_pid]
    return context


def _pytest(
    root: str,
    source: str,
    temporary: str,
    tests: Sequence[str],
    first: Sequence[str],
    watched: Path | None,
) -> None:
    """Run tests of `root` on the package in `source`; ends the process with pytest's status."""
    assert "warploom" not in sys.modules
    gc.freeze()  # what the server loaded: to look through it took a sixth of most runs
    os.setsid()
    os.chdir(root)
    sys.path.insert(0, source)
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=source, PYTHONDONTWRITEBYTECODE="1")
    os.environ["WARPLOOM_CACHE"] = temporary + "/warploom-cache"
    with Path(temporary, "log").open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    hypothesis.settings.register_profile("mutants", deadline=None, database=None)
    hypothesis.settings.load_profile("mutants")
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu"]
    options += ["--basetemp", temporary + "/base"]
    plugins: list[object] = [First(first)]
    if watched:
        plugins.append(Watch(source + "/", watched))
    sys.exit(int(pytest.main([*options, *tests], plugins=plugins)))


class First:
    """A plugin of pytest: these tests before the others, in this order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.rank = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.rank.get(item.nodeid, len(self.rank)))


@dataclass
class Watch:
    """A plugin of pytest that writes, as JSON, of each test how many seconds of a processor it
    takes and which functions of the package it enters (file, first line)."""

    source: str
    out: Path
    seen: dict[str, tuple[float, list[tuple[str, int]]]] = field(default_factory=dict)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        entered: set[tuple[str, int]] = set()
        source, length = self.source, len(self.source)

        def enter(frame: FrameType, event: str, argument: object) -> None:
            code = frame.f_code
            if code.co_filename.startswith(source):
                entered.add((code.co_filename[length:], code.co_firstlineno))

        began = sum(os.times()[:4])
        sys.settrace(enter)
        yield
        sys.settrace(None)
        self.seen[item.nodeid] = (sum(os.times()[:4]) - began, sorted(entered))

    def pytest_sessionfinish(self) -> None:
        self.out.write_text(json.dumps(self.seen))


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
        self.by = {identity(row): row.get("by", "") for row in self.rows.values()}
        self.seen: dict[tuple[str, ...], dict[str, Any]] = {}
        self.lock, self.locks = threading.Lock(), dict[tuple[str, ...], threading.Lock]()
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
        # Set by set of tests, so that each runs without a fault only when its faults are next.
        left = sorted(left, key=lambda pair: pair[1].tests)
        began = time.monotonic()
        pool = ThreadPoolExecutor(self.jobs)
        try:
            jobs = [pool.submit(self._one, key, mutant, copies) for key, mutant in left]
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

    def _baseline(self, tests: tuple[str, ...], copy: Sandbox) -> float:
        """The limit of the tests with a fault, in seconds of a processor, from what they take
        without one."""
        with self.lock:
            own = self.locks.setdefault(tests, threading.Lock())
        with own:
            if tests not in self.seen:
                watched = copy.folder / "seen.json"
                status, said = self._test(copy, tests, 1800.0, watched=watched)
                if status != 0:
                    last = "\n".join(said.splitlines()[-6:])
                    raise Unsound(f"without a fault {' '.join(tests)} ends with {status}:\n{last}")
                self.seen[tests] = json.loads(watched.read_text())
        return LEAST_SECONDS + SLOWER * sum(seconds for seconds, _ in self.seen[tests].values())

    def _test(
        self, copy: Sandbox, tests: Sequence[str], limit: float, **how: Any
    ) -> tuple[int | None, str]:
        if self.stopping:
            raise Stopped
        return copy.test(tests, limit, self.started, **how)

    def _order(self, mutant: Mutant) -> list[str]:
        """Tests in the order in which they may catch a fault: the one that did before, then those
        that enter the function it is in, then the others, the quick ones first."""
        source = (self.root / PACKAGE / mutant.file).read_text()
        inside = _function(source, mutant.line(source)) if mutant.file.endswith(".py") else ()
        file = PACKAGE.removeprefix("src/") + mutant.file
        before = self.by.get(identity(vars(mutant)))
        ranked: list[tuple[bool, bool, float, str]] = []
        for test, (seconds, entered) in self.seen[mutant.tests].items():
            enters = any(path == file and line in inside for path, line in entered)
            ranked.append((test != before, not enters, seconds, test))
        return [test for *_, test in sorted(ranked)]

    def _one(self, key: str, mutant: Mutant, copies: queue.Queue[Sandbox]) -> Row:
        began, copy, said = time.monotonic(), copies.get(), ""
        try:
            if mutant.equivalent:
                outcome = EQUIVALENT
                mutant.applied((self.root / PACKAGE / mutant.file).read_text())
            else:
                limit = self._baseline(mutant.tests, copy)
                began = time.monotonic()
                with copy.holding(mutant):
                    order = self._order(mutant)
                    # The likeliest by themselves: their modules alone are quickly collected.
                    status, said = self._test(copy, order[:LIKELY], limit)
                    if status in (0, NOT_FOUND):
                        status, said = self._test(copy, mutant.tests, limit, first=order)
                outcome = (
                    TIMEOUT
                    if status is None
                    else CAUGHT
                    if status in FAILED
                    else SURVIVED
                    if status == 0
                    else BROKEN
                )
        except Unsound:
            raise
        except (MutantError, OSError) as error:
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
            "place": mutant.place,
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


def _function(source: str, line: int) -> Iterable[int]:
    """The lines of the outermost function or method around a line; empty outside of any."""
    for node in ast.walk(ast.parse(source)):  # from outside
        if isinstance(node, ast.FunctionDef):
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines = range(start, (node.end_lineno or start) + 1)
            if line in lines:
                return lines
    return ()


def identity(row: Row) -> tuple[str, ...]:
    """Which fault a row is about, wherever in its file it stands."""
    return tuple(str(row[name]) for name in ("kind", "checker", "file", "before", "after", "place"))


def _commit(root: Path) -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    dirty = "+" if git("status", "--porcelain", "src", "tests") else ""
    return git("rev-parse", "--short", "HEAD") + dirty
