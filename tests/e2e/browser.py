"""Control a UI's page in headless Chromium, and wait for conditions."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.waiting import wait_for

T = TypeVar("T")


class Page:
    """A page of a UI in a headless Chromium.

    A script may redraw any part of it, and a form may load the next page, so each attempt looks its element up again.
    """

    def __init__(self, browser, pictures: Path | None) -> None:
        self._browser = browser
        self._pictures = pictures

    def open(self, url: str) -> None:
        self._browser.get(url)

    @contextmanager
    def at(self, url: str) -> Iterator[None]:
        """Open `url` for the block only, because a page that draws a run's graph occupies a core while it is open."""
        self.open(url)
        try:
            yield
        finally:
            self.open("about:blank")

    def text(self) -> str:
        return str(self._with("body", lambda body: body.text))

    def shows(self, *words: str, tab: str = "", pause: float = 0.5) -> str:
        """The page's text, once it contains all the words. tab: id of an element to click until then."""
        deadline = time.monotonic() + 300
        while not all(word in (text := self.text()) for word in words):
            assert time.monotonic() < deadline, f"the page never showed {words}; it says:\n{text}"
            if tab:
                self.click(f"[id='{tab}']")
            time.sleep(pause)
        return text

    def press(self, *buttons: str) -> float:
        """Click each button once it is enabled, all but the first in dialogs; return the time of the last click."""
        from selenium.common.exceptions import WebDriverException

        where = ""
        for name in buttons:
            deadline = time.monotonic() + 300
            while True:
                found = self._browser.find_elements("xpath", f"{where}//button[normalize-space()='{name}']")
                try:
                    if ready := [one for one in found if one.is_displayed() and one.is_enabled()]:
                        ready[-1].click()
                        break
                except WebDriverException:  # it was redrawn, or another element covers it
                    pass
                assert time.monotonic() < deadline, f"no button {name!r}; the page says:\n{self.text()}"
                time.sleep(0.2)
            where = "//*[contains(@class, 'p-modal')]"
        return time.monotonic()

    def click(self, selector: str) -> None:
        """Click the first element that matches a CSS selector, once it exists."""
        self._with(selector, lambda element: element.click())

    def fill(self, selector: str, text: str) -> None:

        def write(field: Any) -> None:
            field.clear()
            field.send_keys(text)

        self._with(selector, write)

    def fill_active(self, text: str) -> None:
        """Type into the focused field, once there is one."""
        wait_for(lambda: self.run("return document.activeElement !== document.body"))
        self._browser.switch_to.active_element.send_keys(text)

    def point_at(self, selector: str) -> None:
        """Move the pointer onto an element."""
        from selenium.webdriver import ActionChains

        self._with(selector, lambda element: ActionChains(self._browser).move_to_element(element).perform())

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drag the pointer across an element. start, end: fractions of the element's width."""
        with self.dragging(selector, start, end):
            pass

    @contextmanager
    def dragging(self, selector: str, start: float, end: float) -> Iterator[None]:
        """Drag the pointer as `drag` does, and release it after the block."""
        from selenium.webdriver import ActionChains

        def pull(element: Any) -> None:
            width = element.size["width"]
            chain = ActionChains(self._browser).move_to_element_with_offset(element, (start - 0.5) * width, 0)
            chain.click_and_hold().move_by_offset((end - start) * width, 0).perform()

        self._with(selector, pull)
        yield
        ActionChains(self._browser).release().perform()

    def run(self, script: str, *values: Any) -> Any:
        """Run a script in the page, with `values` as its `arguments`, and return its result."""
        return self._browser.execute_script(script, *values)

    def look(self, *, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Set the page's size in pixels and its color scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def barriers(self) -> list[str]:
        """The page's serious and critical accessibility violations, as axe finds them."""
        from importlib.resources import files

        if not self.run("return 'axe' in window"):
            self.run(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
        # The result would have all nodes of the page otherwise. The rules are the same.
        found = self._browser.execute_async_script("axe.run({resultTypes: ['violations']}).then(arguments[0])")
        assert found["passes"], "axe looked at nothing"
        return [
            f"{one['id']}: {node['html'][:200]}: {node['failureSummary']}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]

    def complaints(self) -> list[str]:
        """The browser's errors since the last call: script errors, and violations of our content security policy."""
        said = self._browser.get_log("browser")
        return [one["message"] for one in said if one["level"] == "SEVERE" and "favicon" not in one["message"]]

    def forget(self) -> None:
        """Drop all cookies."""
        self._browser.delete_all_cookies()

    def _with(self, selector: str, act: Callable[[Any], T]) -> T:
        """Return the result of `act` for the first element that matches `selector`, once `act` succeeds."""
        from selenium.common.exceptions import WebDriverException

        deadline = time.monotonic() + 300
        failed: Exception | None = None
        while time.monotonic() < deadline:
            try:
                if found := self._browser.find_elements("css selector", selector):
                    return act(found[0])
            except WebDriverException as error:  # it was redrawn, or another element covers it
                failed = error
            time.sleep(0.1)
        raise AssertionError(f"no {selector}, or it cannot be used; the page says:\n{self._source()}") from failed

    def _source(self) -> str:
        return str(self.run("return document.body ? document.body.innerText : ''"))

    def save(self, file: Path) -> None:
        """Save a screenshot of the page."""
        self._browser.save_screenshot(str(file))

    def picture(self, name: str) -> None:
        """Save a screenshot of the page in the folder TEST_PICTURES, if this variable is set."""
        if self._pictures is not None:
            self._browser.save_screenshot(str(self._pictures / f"{name}.png"))


@contextmanager
def open_page(folder: Path) -> Iterator[Page]:
    """Yield an empty page, with the browser's files in `folder`; skip the test if Chromium is not installed."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium and chromedriver on this machine")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1400,1000",
        f"--user-data-dir={folder}",
    ):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.set_script_timeout(300)  # as the other deadlines; axe may take half a minute on a busy machine
    pictures = os.environ.get("TEST_PICTURES")
    try:
        yield Page(browser, Path(pictures) if pictures else None)
    finally:
        browser.quit()
