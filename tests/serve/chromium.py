"""A headless Chromium, driven by the DevTools protocol."""

import base64
import itertools
import json
import pathlib
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a browser with a profile of its own."""

    def __init__(self, program: str, folder: pathlib.Path, size=(1100, 860)) -> None:
        import websocket

        profile = folder / "profile"
        self._process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={profile}",
             "--no-first-run", "--disable-extensions", "--disable-background-networking",
             f"--window-size={size[0]},{size[1]}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        port_file, end = profile / "DevToolsActivePort", time.monotonic() + 300
        while not (port_file.exists() and port_file.read_text().count("\n") >= 1):
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError("Chromium did not start")
            time.sleep(0.05)
        port, path = port_file.read_text().split("\n")[:2]
        self._socket = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=300)
        self._numbers, self._session = itertools.count(1), None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        self.requested: list[str] = []  # addresses that the page asked for
        self.said: list[str] = []  # errors on its console
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: object) -> dict:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._notice(answer)

    def _notice(self, event: dict) -> None:
        if event["method"] == "Network.requestWillBeSent":
            self.requested.append(event["params"]["request"]["url"])
        elif event["method"] == "Log.entryAdded":
            entry = event["params"]["entry"]
            if entry["level"] == "error":
                self.said.append(entry["text"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.said.append(json.dumps(event["params"]["exceptionDetails"])[:500])

    def run(self, script: str):
        """The value of an expression in the page."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", **given)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:1000])
        return found["result"].get("value")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.protocol === 'http:'")

    def until(self, condition: str, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"never: {condition}; the page said {self.said}"
            time.sleep(0.05)

    def drop(self, path: pathlib.Path, x: int, y: int) -> None:
        """A file that a mouse carries over the page and lets go."""
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def scheme(self, name: str) -> None:
        """light or dark, as the system would say it."""
        wish = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[wish])

    def picture(self, path: pathlib.Path, **clip: float) -> None:
        more = {"clip": {"scale": 1, **clip}} if clip else {}
        data = self.call("Page.captureScreenshot", format="png", **more)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()
        self._process.terminate()
        self._process.wait(60)
