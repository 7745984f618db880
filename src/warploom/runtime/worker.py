"""A process of its own, watched: a request that hangs or kills it costs that request only.

Requests go to the process in order over a pipe and run one at a time. Before each, the process says
when it begins; when an answer takes longer than the request's limit, or the process dies, the
parent kills it, starts another, sets it up again, sends what was still waiting, and reports the
culprit as a hang or a crash. A fatal CUDA error is reported as the error it is and replaces the
process the same way (its context is lost).

    answer = in_own_process(function, *arguments, subject="gemm")     # one call
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from warploom.errors import DeviceError, WarploomError
from warploom.runtime.bindings import one_line
from warploom.runtime.device import CudaError

START_LIMIT_S = 120.0
CALL_LIMIT_S = 600.0
OWN_LIMIT_S = 240.0  # of a function in a process of its own
MAX_RESTARTS_IN_A_ROW = 3


@dataclass(frozen=True)
class Request:
    """A method of the session to call in the worker; `limit_s` is the silence allowed."""

    ticket: int
    method: str
    args: tuple[Any, ...]
    limit_s: float
    wants_progress: bool = False


@dataclass(frozen=True)
class Reply:
    """What became of a request. `kind` is 'done', 'progress', 'error', 'hang' or 'crash'.

    `value` is the result, the progress data, the exception, or a text.
    """

    ticket: int
    kind: str
    value: Any


class Worker:
    """A watched worker process; `open_session` makes in it the object whose methods are called.

    It is given what `remember_setup` kept, b"" at first, and must pickle: a function of a module,
    because the process is spawned, never forked. Scripts need the usual `if __name__ == "__main__"`
    guard. Starts lazily; `subject` names it in errors. With `preload`, modules that start no thread
    and open no device, the process is forked from one that has imported them, and has nothing else.
    """

    def __init__(
        self, open_session: Callable[[bytes], Any], subject: str, preload: Sequence[str] = ()
    ) -> None:
        self.subject = subject
        self._preload = list(preload)
        self.restarts = 0
        self._open_session = open_session
        self._process: Any = None
        self._pipe: Connection | None = None
        self._waiting: deque[Request] = deque()
        self._running: tuple[Request, float] | None = None
        self._ready_by = 0.0
        self._next_ticket = 0
        self._failures_in_a_row = 0
        self._setup: Request | None = None
        self._kept = b""

    @property
    def pending(self) -> int:
        """Requests without an answer yet."""
        return len(self._waiting)

    def submit(self, method: str, *args: Any, limit_s: float, wants_progress: bool = False) -> int:
        """Queue a call of a session's method and return its ticket at once."""
        self._next_ticket += 1
        request = Request(self._next_ticket, method, args, limit_s, wants_progress)
        self._waiting.append(request)
        if self._process is None:
            self._start()
        else:
            self._send(request)
        return request.ticket

    def call(
        self,
        method: str,
        *args: Any,
        limit_s: float = CALL_LIMIT_S,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> Any:
        """Call a session's method and wait for it; nothing else may be pending.

        Raises what the method raised, or `DeviceError` on a hang or a crash.
        """
        if self._waiting:
            raise DeviceError(f"{len(self._waiting)} requests are pending: collect them first")
        ticket = self.submit(method, *args, limit_s=limit_s, wants_progress=progress is not None)
        while True:
            for reply in self.poll(limit_s):
                if reply.ticket != ticket:
                    continue
                if reply.kind == "progress":
                    if progress is not None:
                        progress(reply.value)
                elif reply.kind == "done":
                    return reply.value
                elif isinstance(reply.value, BaseException):
                    raise reply.value
                else:
                    raise DeviceError(f"{method} on {self.subject}: {reply.value}")

    def remember_setup(self, method: str, *args: Any, limit_s: float, keep: bytes) -> None:
        """Name the call that makes a fresh process equal to this one, and what saves it time."""
        self._setup = Request(0, method, args, limit_s)
        self._kept = keep

    def poll(self, timeout_s: float = 0.0) -> list[Reply]:
        """Replies that have come in, waiting up to `timeout_s` for the first; keeps the watch.

        Raises `DeviceError` when the process cannot be brought back.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            died = self._process is None or not self._process.is_alive()
            replies = self._receive()  # what it said before it died comes first
            if replies or not self._waiting:
                return replies
            if died or time.monotonic() >= self._watch_until():
                if culprit := self._replace(died=died):
                    return [culprit]
                continue
            now = time.monotonic()
            if now >= deadline:
                return []
            self._wait(min(deadline, self._watch_until()) - now)

    def close(self) -> None:
        """Stop the process; pending requests are dropped."""
        self._waiting.clear()
        self._stop()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if self._preload else "spawn")
        if self._preload:
            context.set_forkserver_preload(self._preload)
        ours, theirs = context.Pipe()
        arguments = (theirs, self._open_session, self._kept)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._pipe = ours
        self._running = None
        self._ready_by = time.monotonic() + START_LIMIT_S
        if self._setup is not None:
            self._send(self._setup)
        for request in self._waiting:
            self._send(request)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(10)
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _restart(self) -> None:
        self._stop()
        self.restarts += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row > MAX_RESTARTS_IN_A_ROW:
            self._waiting.clear()
            raise DeviceError(
                f"the worker of {self.subject} failed {self._failures_in_a_row} times in a row "
                "before it began anything: check the GPU with nvidia-smi"
            )
        if self._waiting:
            self._start()

    def _send(self, request: Request) -> None:
        """Hand a request over; a dead process is noticed by the next poll."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(request)

    def _wait(self, seconds: float) -> None:
        if self._process is not None and self._pipe is not None:
            wait([self._pipe, self._process.sentinel], max(seconds, 0.001))

    def _watch_until(self) -> float:
        if self._running is None:
            return self._ready_by
        request, began = self._running
        return began + request.limit_s

    def _receive(self) -> list[Reply]:
        replies: list[Reply] = []
        try:
            while self._pipe is not None and self._pipe.poll():
                replies.extend(self._understand(*self._pipe.recv()))
        except (EOFError, OSError):
            pass  # the process is gone; `poll` sees that
        return replies

    def _understand(self, kind: str, ticket: int, value: Any) -> list[Reply]:
        """Turn a message into replies, keeping the books."""
        if kind == "unusable":  # the device could not be opened at all
            self._waiting.clear()
            self._stop()
            raise value
        if kind == "begin":
            request = self._request(ticket)
            self._running = None if request is None else (request, value)
            if ticket:
                self._failures_in_a_row = 0
            return []
        if kind == "progress" and self._running is not None:
            self._running = (self._running[0], time.monotonic())
            return [Reply(ticket, kind, value)]
        self._running = None
        self._ready_by = time.monotonic() + START_LIMIT_S
        if ticket == 0:  # the setup after a restart
            if kind == "error":
                self._waiting.clear()
                self._stop()
                raise value
            return []
        self._forget(ticket)
        if isinstance(value, CudaError) and value.fatal:
            self._restart()
        return [Reply(ticket, kind, value)]

    def _replace(self, *, died: bool) -> Reply | None:
        """Replace a dead or silent process; the reply names the culprit, None when it had none."""
        running, self._running = self._running, None
        request = running[0] if running else None
        if request is None or request.ticket == 0:
            self._restart()
            return None
        self._forget(request.ticket)
        self._restart()
        if died:
            return Reply(request.ticket, "crash", "its worker process died")
        return Reply(request.ticket, "hang", f"no answer in {request.limit_s:g} s")

    def _request(self, ticket: int) -> Request | None:
        if ticket == 0:
            return self._setup
        return next((request for request in self._waiting if request.ticket == ticket), None)

    def _forget(self, ticket: int) -> None:
        self._waiting = deque(request for request in self._waiting if request.ticket != ticket)


class Caller:
    """A session that calls functions: for work that no device is held open for."""

    def __init__(self, kept: bytes) -> None:
        """Nothing is kept."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function gives."""
        return function(*args)

    def close(self) -> None:
        """Nothing is open."""


def in_own_process(function: Callable[..., Any], *args: Any, subject: str) -> Any:
    """What a module's function gives in a process of its own, with a watchdog.

    Arguments and result are pickled. A kernel that hangs or poisons the context costs that process,
    not the user's session. Raises what the function raises, `DeviceError` when it hangs or dies.
    """
    worker = Worker(Caller, subject)
    try:
        return worker.call("call", function, *args, limit_s=OWN_LIMIT_S)
    finally:
        worker.close()


def serve(pipe: Connection, open_session: Callable[[bytes], Any], kept: bytes) -> None:
    """The worker process: open the session, then answer requests until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        session = open_session(kept)
    except Exception as error:
        pipe.send(("unusable", 0, _portable(error)))
        return
    inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    while (request := inbox.get()) is not None:
        if _answer(pipe, session, request):
            os._exit(3)  # the context is lost; a normal exit could hang in its cleanup
    with contextlib.suppress(CudaError):
        session.close()


def _read(pipe: Connection, inbox: queue.SimpleQueue[Request | None]) -> None:
    """Keep the pipe empty, so that the parent never blocks on sending."""
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)


def _answer(pipe: Connection, session: Any, request: Request) -> bool:
    """Run one request and send its outcome; True when the context is lost."""
    pipe.send(("begin", request.ticket, time.monotonic()))

    def progress(data: dict[str, Any]) -> None:
        pipe.send(("progress", request.ticket, data))

    keywords: dict[str, Any] = {"progress": progress} if request.wants_progress else {}
    try:
        value = getattr(session, request.method)(*request.args, **keywords)
    except Exception as error:
        pipe.send(("error", request.ticket, _portable(error)))
        return isinstance(error, CudaError) and error.fatal
    pipe.send(("done", request.ticket, value))
    return False


def _portable(error: Exception) -> WarploomError:
    """An exception that survives pickling: ours as they are, others as one line."""
    if isinstance(error, WarploomError):
        return error
    return DeviceError(f"{type(error).__name__} in the worker: {one_line(error)}")
