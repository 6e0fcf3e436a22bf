"""A real browser: Debian's chromium, driven by its own driver."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
PROGRAM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-proxy-server",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1300,1250",
)  # fmt: skip
PATIENCE = 30.0


class Browser:
    """driver: selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        """In the page."""
        return self.driver.execute_script(script, *arguments)

    def text(self, query: str) -> str:
        """Returns the element's text, as the document has it; "" where there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", query))

    def shown(self, query: str) -> bool:
        return bool(self.driver.find_element("css selector", query).is_displayed())

    def type(self, query: str, text: str) -> None:
        """In place of what stands there."""
        field = self.driver.find_element("css selector", query)
        field.clear()
        field.send_keys(text)

    def click(self, query: str) -> None:
        self.driver.find_element("css selector", query).click()

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Polls; fails with what was waited for and what the page says."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:g} s; {self.text('body')[-1500:]}"
            time.sleep(0.02)

    def complaints(self) -> list[str]:
        """Returns the lines of the browser's console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """profile: an empty directory. Skips where there is no chromium with its driver."""
    if PROGRAM is None or DRIVER is None:
        pytest.skip("chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = PROGRAM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
