"""A headless Chromium, driven through chromedriver's own protocol (W3C WebDriver)."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
DRIVER = shutil.which("chromedriver") or ""
KEYS = {"right": "\ue014", "down": "\ue015", "enter": "\ue007"}
HEIGHT = 900


class Browser:
    """A session of a headless Chromium."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}/session"
        options = {
            "binary": CHROMIUM,
            "args": ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"],
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
        """Its first element."""
        self(self.element(selector) + "/click")

    def type(self, selector: str, text: str) -> None:
        """Keys to its first element."""
        self(self.element(selector) + "/value", {"text": text})

    def open(self, page: Path, width: int = 1280, height: int = HEIGHT) -> None:
        """A page, in a window of that width."""
        device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        cdp = {"cmd": "Emulation.setDeviceMetricsOverride", "params": device}
        self("/goog/cdp/execute", cdp)
        self("/url", {"url": page.as_uri()})


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A session, ended with its driver."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                session = Browser(port)
                break
            time.sleep(0.1)
        else:
            raise OSError(f"{DRIVER} does not answer on port {port}")
        yield session
        session("", method="DELETE")
    finally:
        driver.terminate()
        driver.wait()
