"""A headless Chromium for tests of pages, driven over the WebDriver protocol; nothing is loaded from a network."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "chromium and chromedriver are not installed: apt-get install chromium chromium-driver"
WITHOUT = "SPARSEDP_NO_BROWSER"  # 1: the tests of pages are skipped even in CI
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars")  # fmt: skip


class Browser:
    """One tab."""

    def __init__(self, url: str) -> None:
        self._url = url

    def open(
        self, page: Path, width: int = 1280, height: int = 900, dark: bool = False, javascript: bool = True
    ) -> None:
        """Shows a file as on a screen of that size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command("Emulation.setScriptExecutionDisabled", value=not javascript)
        _post(f"{self._url}/url", {"url": page.absolute().as_uri()})

    def run(self, script: str) -> Any:
        """What a function with this body returns, in the page."""
        return _post(f"{self._url}/execute/sync", {"script": script, "args": []})

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return _post(f"{self._url}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def picture(self, path: Path, whole: bool = True) -> None:
        shot = self.command(
            "Page.captureScreenshot", captureBeyondViewport=whole, **({} if not whole else self._clip())
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def _clip(self) -> dict[str, Any]:
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def printed(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.command("Page.printToPDF", printBackground=True)["data"])


def skip_without_browser() -> None:
    """Skips the test where there is no browser; in CI it fails, unless SPARSEDP_NO_BROWSER is 1."""
    if CHROMIUM is not None and DRIVER is not None:
        return
    if os.environ.get("CI") and os.environ.get(WITHOUT) != "1":
        pytest.fail(f"{MISSING}, or {WITHOUT}=1 leaves these tests out")
    pytest.skip(MISSING)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """`profile` is a folder that the browser may fill."""
    assert CHROMIUM is not None and DRIVER is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/session"
    try:
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        session = f"{url}/{_when_ready(url, wanted)['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _request("DELETE", session)
    finally:
        driver.terminate()
        driver.wait()


def _when_ready(url: str, wanted: Any) -> Any:
    for _ in range(200):
        try:
            return _post(url, wanted)
        except URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.1)
    raise RuntimeError("chromedriver does not answer")


def _post(url: str, values: Any) -> Any:
    return _request("POST", url, json.dumps(values).encode())


def _request(method: str, url: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is not asked for this machine
    try:
        with opener.open(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from error
