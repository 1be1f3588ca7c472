"""Chromium without a window, driven through its debugging pipe: no driver, no package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

SECONDS = 30.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One tab. ``errors`` and ``requests`` gather what it complained of and asked for."""

    def __init__(self, popen: subprocess.Popen[bytes], to: int, out: int) -> None:
        self._popen = popen
        self._to = to
        self._ids = itertools.count(1)
        self._answers: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.errors: list[str] = []
        self.requests: list[str] = []
        threading.Thread(target=self._read, args=(out,), daemon=True).start()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._call(method, session=self._session, **params)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def size(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def js(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.js(condition):
            assert time.monotonic() < deadline, f"{condition}\n{self.js('document.body.innerText')}"

    def click(self, selector: str) -> None:
        """A real click in the element's middle, so what lies over it counts."""
        box = self.js(
            f"(e => {{ e.scrollIntoView({{block: 'nearest'}}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **at)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            try:
                answer = self._answers.get(timeout=SECONDS)
            except Empty:
                raise AssertionError(f"{method}: no answer") from None
            if answer["id"] == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _read(self, out: int) -> None:
        rest = b""
        while data := os.read(out, 65536):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.put(message)
                else:
                    self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event["params"]
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    program = find_chromium()
    assert program is not None
    commands, to = os.pipe()
    out, answers = os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to 4.
    script = f'exec 8<&{commands} 9>&{answers}; exec 3<&8 4>&9; exec "$@"'
    popen = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Page(popen, to, out)
    finally:
        popen.kill()
        popen.wait(SECONDS)
        os.close(to)
        os.close(out)
