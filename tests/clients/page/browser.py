"""A headless Chromium as people use it: looks at the page, clicks and types."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.clients.page import installation
from tests.support.ports import free_port
from tests.support.waiting import wait_until

WAIT_S = 30.0
"""Time for anything that the page shows; both cores may be busy."""
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-precise-memory-info",
    "--js-flags=--expose-gc",
)


class Browser:
    """One browser with one page."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        self._log: Callable[[str], list[dict[str, Any]]] = driver.get_log

    def reset(self, downloads: Path) -> None:
        """Forget the page and its storage; save downloads in a folder."""
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd(
            "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)}
        )
        self.show_as(1_400, 1_000)
        self.complaints()

    def close_page(self) -> None:
        """Leave the page, which ends its connection."""
        self.driver.get("about:blank")

    def show_as(self, width: int, height: int, *, dark: bool = False) -> None:
        """Show pages as on a screen of this size in pixels, in light or dark."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def open(self, url: str) -> None:
        """Open a page in a new tab's storage: no key is known."""
        self.driver.get(url)
        self.driver.execute_script("sessionStorage.clear()")
        self.driver.get(url)

    def text(self, selector: str = "body") -> str:
        """Return the visible text of the first element that a CSS selector finds; "" without."""
        script = "return document.querySelector(arguments[0])?.innerText ?? ''"
        return str(self.driver.execute_script(script, selector))

    def count(self, selector: str) -> int:
        """Return the number of elements that a CSS selector finds."""
        return int(
            self.driver.execute_script(
                "return document.querySelectorAll(arguments[0]).length", selector
            )
        )

    def wait_for_text(self, words: str, selector: str = "body", deadline_s: float = WAIT_S) -> str:
        """Wait until an element has these words, and return all its text."""
        wait_until(
            lambda: words in self.text(selector),
            deadline_s,
            poll_s=0.1,
            failure=lambda: f"{words!r} is not in {selector}:\n{self.text(selector)}",
        )
        return self.text(selector)

    def wait_for_count(self, selector: str, count: int, deadline_s: float = WAIT_S) -> None:
        """Wait until a CSS selector finds at least this many elements."""
        wait_until(
            lambda: self.count(selector) >= count,
            deadline_s,
            poll_s=0.1,
            failure=lambda: f"{self.count(selector)} of {count} {selector}:\n{self.text()}",
        )

    def find(self, selector: str) -> WebElement:
        """Return the first element that a CSS selector finds."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        """Return all elements that a CSS selector finds."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def click(self, words: str, within: str = "body") -> None:
        """Click the button or summary with exactly these words."""
        for one in self.find_all(f"{within} button, {within} summary"):
            if one.text == words:
                self.press(one)
                return
        raise AssertionError(f"there is no button {words!r} in:\n{self.text(within)}")

    def press(self, element: WebElement) -> None:
        """Click an element wherever it is: panels above it change their height all the time."""
        self.driver.execute_script("arguments[0].click()", element)

    def type(self, selector: str, text: str) -> None:
        """Type text into a field."""
        self.find(selector).send_keys(text)

    def script(self, code: str, *arguments: Any) -> Any:
        """Run code in the page and return its result."""
        return self.driver.execute_script(code, *arguments)

    def violations(self) -> list[str]:
        """Return what axe-core objects to in the page as it is now, one line each."""
        self.driver.execute_script(installation.AXE.read_text())
        found = self.driver.execute_async_script(
            "const done = arguments[0]; axe.run(document).then((result) => done(result.violations))"
        )
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
            for one in found
        ]

    def complaints(self) -> list[str]:
        """Return the errors and warnings in the console since the last call."""
        return [str(one["message"]) for one in self._log("browser")]

    def heap_bytes(self) -> int:
        """Return the memory of the page's objects after a collection."""
        return int(self.driver.execute_script("gc(); return performance.memory.usedJSHeapSize"))

    def save_screenshot(self, file: Path, selector: str = "") -> None:
        """Save a picture of the page in its whole height, or of one element."""
        if selector:
            self.find(selector).screenshot(str(file))
            return
        size = self.script(
            "return [document.documentElement.clientWidth, document.documentElement.scrollHeight]"
        )
        picture = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", picture)
        time.sleep(0.5)  # charts follow the size with their next frame
        self.driver.save_screenshot(str(file))


@contextlib.contextmanager
def started_browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with a new profile, and end it after the block."""
    options = ChromeOptions()
    options.binary_location = installation.browser() or ""
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(installation.driver(), port=free_port())
    driver = Chrome(options=options, service=service)
    try:
        driver.set_script_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()
