"""A page in a real browser: Chromium without a window, driven over a pipe, with no network."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_CHROMIUM = (
    "looks at a page in a browser, and there is no chromium here (CONTRIBUTING.md says how to get it)"
)


@dataclass(slots=True)
class Browser:
    """One tab."""

    write: int
    read: int
    session: str = ""
    said: list[str] = field(default_factory=list)
    """What the page complained of: errors, and addresses that it asked for outside itself."""
    waiting: bytes = b""
    number: int = 0

    def open(self, page: Path, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Load a page as a screen of this width shows it."""
        self.said.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        self.ask("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + 60
        while self.value("document.readyState") != "complete":
            assert time.monotonic() < deadline, "the page does not come"
            time.sleep(0.1)
        time.sleep(0.3)

    def value(self, script: str) -> Any:
        """What a line of JavaScript comes to."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        image = self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(image))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._hear(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.waiting:
            block = os.read(self.read, 2**20)
            assert block, "the browser has gone"
            self.waiting += block
        message, _, self.waiting = self.waiting.partition(b"\0")
        return json.loads(message)

    def _hear(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.said.append(str(told["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.said.append(told["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.said.append(str(told["args"]))
        elif event.get("method") == "Network.requestWillBeSent":
            address = told["request"]["url"]
            if not address.startswith(("file:", "data:", "blob:", "about:")):
                self.said.append(f"it asks for {address}")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in `folder`, ended at the end."""
    assert CHROMIUM is not None
    to_it, write = os.pipe()
    read, from_it = os.pipe()
    to_it, from_it = _moved(to_it), _moved(from_it)
    options = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *("--remote-debugging-pipe", f"--user-data-dir={folder / 'chromium'}", "about:blank"),
    ]
    # the browser talks over its file descriptors 3 and 4
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" 3<&{to_it} 4>&{from_it}', CHROMIUM, *options],
        pass_fds=(to_it, from_it),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_it)
    os.close(from_it)
    try:
        tab = Browser(write, read)
        target = tab.ask("Target.createTarget", url="about:blank")["targetId"]
        tab.session = tab.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            tab.ask(f"{part}.enable")
        yield tab
    finally:
        process.kill()
        process.wait()
        os.close(write)
        os.close(read)


def _moved(descriptor: int) -> int:
    """The same with a higher number: 3 and 4 are given to the browser."""
    higher = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return higher
