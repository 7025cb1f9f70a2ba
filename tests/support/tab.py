"""A page in headless Chromium, driven over DevTools: keys, clicks, window size, requests."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
]
_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
LIMIT = 60.0  # seconds of any test's browser
# Key -> its code, and the text that it types
_KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Backspace": (8, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    " ": (32, " "),
}


class Tab:
    """One open page. `asked` has the address of everything that it requested beside itself."""

    def __init__(self, to: int, back: int) -> None:
        self._to = os.fdopen(to, "wb", 0)
        self._back = os.fdopen(back, "rb", 0)
        self._rest = b""  # what was read behind the last whole message
        self._number = 0  # of the last message that was sent
        self._session = ""
        self._loaded = False
        self.asked: list[str] = []

    def send(self, method: str, **params: object) -> dict:
        """What the browser answers; what it tells meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            said = self._read()
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return said["result"]

    def close(self) -> None:
        self._session = ""
        with contextlib.suppress(OSError, AssertionError):
            self.send("Browser.close")
        self._to.close()
        self._back.close()

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            part = self._back.read(1 << 20)
            assert part, "the browser ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        said = json.loads(text)
        if said.get("method") == "Network.requestWillBeSent":
            url = said["params"]["request"]["url"]
            if not url.startswith("data:"):
                self.asked.append(url)
        self._loaded |= said.get("method") == "Page.loadEventFired"
        return said

    def open(
        self, page: Path, width: int, height: int = 900, *, dark: bool = False
    ) -> None:
        if not self._session:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            found = self.send("Target.attachToTarget", targetId=target, flatten=True)
            self._session = found["sessionId"]
            self.send("Page.enable")
            self.send("Network.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.send("Emulation.setDeviceMetricsOverride", mobile=width < 500, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        # A smooth scroll would end at a time of its own.
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, still])
        itself = page.resolve().as_uri()
        self._loaded = False
        self.asked.clear()
        self.send("Page.navigate", url=itself)
        while not self._loaded:
            self._read()
        self.asked.remove(itself)

    def see(self, script: str) -> object:
        """The value of an expression of the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Real keys, one after the other; text is typed letter by letter."""
        for key in keys:
            code, text = _KEYS.get(key, (0, key))
            same = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **same)
            self.send("Input.dispatchKeyEvent", type="keyUp", **same)

    def click(self, selector: str) -> None:
        """A real click in the middle of what the selector finds, once it is in the window."""
        box = self.see(
            f"(e => {{ e.scrollIntoView({{block: 'nearest'}}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        assert isinstance(box, list)
        where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type="mousePressed", **where)
        self.send("Input.dispatchMouseEvent", type="mouseReleased", **where)


@contextlib.contextmanager
def tab() -> Iterator[Tab]:
    """A browser with one tab; it ends with the block, or after LIMIT seconds."""
    theirs, to = os.pipe()
    back, ours = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads from descriptor 3 and writes to descriptor 4
        line = [
            str(CHROMIUM),
            *FLAGS,
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        script = f'exec "$@" 3<&{theirs} 4>&{ours}'
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = ["bash", "-c", script, "browser", *line]
        browser = subprocess.Popen(command, pass_fds=(theirs, ours), **quiet)
        os.close(theirs)
        os.close(ours)
        late = threading.Timer(LIMIT, browser.kill)
        late.start()
        opened = Tab(to, back)
        try:
            yield opened
        finally:
            # Asked to end it takes its own processes along
            opened.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                browser.wait(timeout=10)
            late.cancel()
            browser.kill()
            browser.wait()
