"""A headless Chromium, driven over its debugging pipe: no package beside the browser itself.

    with Browser.start(folder) as browser:
        browser.open(path); browser.run("document.title"); browser.click("#fit"); browser.picture(path)

Chromium reads commands of its DevTools protocol from file descriptor 3 and writes answers and events to 4, each a JSON object
with a zero byte behind it (``--remote-debugging-pipe``). ``messages`` holds what the page logged as an error or a warning, what
the content security policy refused, and every request that left the file.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def binary() -> str | None:
    """The browser of this machine, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of one browser."""

    def __init__(self, process: subprocess.Popen[bytes], send: int, receive: int) -> None:
        self.process, self._send, self._receive = process, send, receive
        self._number, self._rest, self._session = 0, b"", ""
        self._events: list[dict[str, Any]] = []
        self.messages: list[str] = []

    @classmethod
    def start(cls, folder: Path, width: int = 1280, height: int = 900) -> Browser:
        """``folder``: for the browser's own files."""
        found = binary()
        assert found is not None
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()

        def ends() -> None:
            # in the child the two ends become 3 and 4, whatever they were
            a, b = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(a, 3)
            os.dup2(b, 4)

        process = subprocess.Popen(
            [found, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
             "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
             f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=ends, close_fds=False,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        browser = cls(process, ours_out, ours_in)
        targets = browser.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        browser._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.call(f"{domain}.enable")
        browser.size(width, height)
        return browser

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self._send)
        os.close(self._receive)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command and its answer. Raises RuntimeError for an error, TimeoutError after a minute."""
        return self._answer(self._command(method, params))

    def _command(self, method: str, params: dict[str, Any]) -> int:
        """Send without waiting; its number."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data):]
        return self._number

    def _answer(self, number: int) -> dict[str, Any]:
        until = time.monotonic() + 60
        while True:
            answer = self._next(until)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"the browser refuses: {answer['error']['message']}")
                return dict(answer["result"])
            self._event(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._receive], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self._receive, 1 << 16)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def _event(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        what, params = event.get("method"), event.get("params", {})
        if what == "Runtime.exceptionThrown":
            detail = params["exceptionDetails"]
            self.messages.append(f"exception: {detail.get('exception', {}).get('description', detail['text'])}")
        elif what == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.messages.append(f"console {params['type']}: {[arg.get('value') for arg in params['args']]}")
        elif what == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(f"log: {params['entry']['text']}")
        elif what == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:", "about:")):
            self.messages.append(f"request: {params['request']['url']}")

    def size(self, width: int, height: int) -> None:
        """The viewport in CSS pixels; narrow ones are a telephone's."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._event(self._next(until))

    def run(self, script: str) -> Any:
        """The value of an expression. Raises RuntimeError for what it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "the script failed"))
        return answer["result"].get("value")

    def tap(self, x: float, y: float, count: int = 1) -> None:
        """Press and release the mouse, ``count`` times in a row: sent at once, so that a slow machine makes no pauses."""
        mouse = "Input.dispatchMouseEvent"
        self.call(mouse, type="mouseMoved", x=x, y=y)
        last = 0
        for number in range(1, count + 1):
            for kind in ("mousePressed", "mouseReleased"):
                last = self._command(mouse, {"type": kind, "x": x, "y": y, "button": "left", "clickCount": number})
        self._answer(last)

    def until(self, condition: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true. Raises AssertionError."""
        limit = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < limit, f"never came true: {condition}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """The middle of an element."""
        x, y = self.run(f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: "center"}}); const r = e.getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2]; }})()""")
        self.tap(x, y)

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A PNG of the viewport, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
