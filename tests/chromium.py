"""A headless Chromium for tests of pages, driven by its DevTools protocol over a pipe: no package, no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
_TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Chromium:
    """A page in a browser.

    Attributes:
        problems: errors and warnings of its console, uncaught exceptions, and violations of its policy.
        requests: addresses that it has requested, other than of files and of data in it.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._out, self._in = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self._call(f"{domain}.enable")

    def open(self, file: Path, width: int = 1280, *, dark: bool = False, until: str = "true") -> None:
        """Open a file, and wait until an expression in JavaScript is true.

        Raises:
            TimeoutError: if it is not in time.
        """
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Page.navigate", url=file.resolve().as_uri())
        self.wait(f"document.readyState === 'complete' && ({until})")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true.

        Raises:
            TimeoutError: if it is not in time.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while not self(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} is not true; {self.problems}")
            time.sleep(0.05)

    def __call__(self, expression: str) -> Any:
        """Return the value of an expression, as JSON has it; a promise is awaited."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, out: Path, width: int, height: int) -> None:
        """Write a picture of the upper part of the page."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        out.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Ask the browser to end."""
        self._session = ""
        self._send("Browser.close", {})

    def _send(self, method: str, parameters: dict[str, Any]) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._out, content) :]
        return self._number

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._send(method, parameters)
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            message = self._receive(deadline)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method", ""), message.get("params", {}))

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"chromium does not answer; {self.problems}")
            read = os.read(self._in, 1 << 20)
            if not read:
                raise ConnectionError("chromium has ended")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(values["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps([each.get("value", each.get("description")) for each in values["args"]]))
        elif event == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(values["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            url = values["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "about:")):
                self.requests.append(url)


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Start a headless browser with an empty profile, and end it with the block."""
    program = find_chromium()
    assert program is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    options = ["--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # it refuses root otherwise
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads its descriptor 3 and writes its descriptor 4.
        shell = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        process = subprocess.Popen(
            ["bash", "-c", shell, program, *options, f"--user-data-dir={profile}"],
            pass_fds=(to_browser[0], from_browser[1]),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            page = Chromium(to_browser[1], from_browser[0])
            yield page
            page.close()
            process.wait(timeout=20)
        finally:
            process.kill()
            process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])
