"""A Chromium without a window, spoken to over a pipe (`--remote-debugging-pipe`): no driver and no library needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36}


def program() -> str | None:
    """The browser that is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One page in a browser of its own. What the page logs as an error or throws is in `problems`."""

    def __init__(self, folder: Path) -> None:
        to_read, self._to_write = os.pipe()
        self._from_read, from_write = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --hide-scrollbars"
        flags += f" --disable-background-networking --disable-component-update --user-data-dir={folder}"
        command = f'exec "{program()}" {flags} about:blank 3<&{to_read} 4>&{from_write} >/dev/null 2>&1'
        self._process = subprocess.Popen(["bash", "-c", command], pass_fds=[to_read, from_write])
        os.close(to_read)
        os.close(from_write)
        self._ids = itertools.count(1)
        self._rest = b""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._to_write)
        os.close(self._from_read)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the DevTools protocol and gives its result."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from_read, 1 << 16)
            assert data, "the browser ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def look(self, *, width: int = 1280, height: int = 800, dark: bool = False, phone: bool = False) -> None:
        """Sets the size of the page and what its user prefers."""
        scale = 2 if phone else 1
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, code: str) -> Any:
        """The value of an expression in the page."""
        done = self.send("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"not within {seconds} s: {condition}; {self.problems}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code = KEYS[key]
        fields: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def shoot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
