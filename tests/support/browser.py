"""Opens a page in Chromium without a window, and asks it questions, over its pipe of messages.

Each message is JSON with a zero byte behind it: the browser reads file 3 and writes file 4.
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PATIENCE = 120  # seconds for an answer
_ON_3_AND_4 = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable() -> str | None:
    """Return the browser of this machine; None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page after the other in one browser; `complaints` are of the page that is open."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._writes = to_browser
        self._reads = from_browser
        self._numbers = itertools.count(1)
        self._waiting = b""
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, url: str, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a page at a width, and wait until it is there."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.complaints.clear()
        self.requests.clear()
        self._events.clear()
        self.ask("Page.navigate", url=url)
        end = time.monotonic() + _PATIENCE
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            assert time.monotonic() < end, f"{url} does not load"
            self._take(self._message())

    def run(self, script: str) -> Any:
        """Return the value of an expression, of a promise what it gives."""
        done = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Keep a picture of the whole page."""
        content = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": content["width"], "height": content["height"], "scale": 1}
        taken = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._writes, rest) :]
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._take(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            piece = os.read(self._reads, 1 << 20)
            assert piece, "the browser has ended"
            self._waiting += piece
        message, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(message)

    def _take(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        said = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(said["args"]))
            case "Log.entryAdded":
                self.complaints.append(json.dumps(said["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with a profile of its own in the folder, and end it."""
    name = executable()
    assert name
    reads, to_browser = os.pipe()
    from_browser, writes = os.pipe()
    command = [
        *(sys.executable, "-c", _ON_3_AND_4, str(reads), str(writes), name),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
        *(f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"),
    ]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            command, pass_fds=(reads, writes), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    os.close(reads)
    os.close(writes)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.close(to_browser)  # at which it ends by itself
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser)
