"""A page of Prefect's UI in a headless Chromium, and waiting for things that happen elsewhere."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def wait_for(condition: Callable[[], Any]) -> None:
    """Returns as soon as it holds; fails after ten minutes."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, "did not happen in ten minutes"
        time.sleep(0.25)


class Page:
    """A page of Prefect's UI in a headless Chromium."""

    def __init__(self, browser, pictures: Path | None) -> None:
        self._browser = browser
        self._pictures = pictures

    def open(self, url: str) -> None:
        self._browser.get(url)

    @contextmanager
    def at(self, url: str) -> Iterator[None]:
        """Be there for the block only: a page that draws the graph of a run takes a core as long as it is open."""
        self.open(url)
        try:
            yield
        finally:
            self.open("about:blank")

    def text(self) -> str:
        return self._browser.find_element("tag name", "body").text

    def shows(self, *words: str, tab: str = "", pause: float = 0.5) -> str:
        """The page's text, as soon as all the words are in it; `tab`: the id of what to click until they are."""
        deadline = time.monotonic() + 300
        while not all(word in (text := self.text()) for word in words):
            assert time.monotonic() < deadline, f"the page never showed {words}; it says:\n{text}"
            for found in self._browser.find_elements("id", tab) if tab else ():
                found.click()
            time.sleep(pause)
        return text

    def press(self, *buttons: str) -> float:
        """Click a button, then the others in the dialogs that open; when the last one was clicked.

        Each as soon as it is there and can be clicked.
        """
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
                except WebDriverException:  # it was drawn anew, or something passes over it
                    pass
                assert time.monotonic() < deadline, f"no button {name!r}; the page says:\n{self.text()}"
                time.sleep(0.2)
            where = "//*[contains(@class, 'p-modal')]"
        return time.monotonic()

    def picture(self, name: str) -> None:
        """Keep a picture of the page in the folder TEST_PICTURES, if there is one."""
        if self._pictures is not None:
            self._browser.save_screenshot(str(self._pictures / f"{name}.png"))


@contextmanager
def open_page(folder: Path) -> Iterator[Page]:
    """An empty page; the browser keeps its files in `folder`. FileNotFoundError when there is no browser."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        raise FileNotFoundError("no chromium and chromedriver on this machine")
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
    pictures = os.environ.get("TEST_PICTURES")
    try:
        yield Page(browser, Path(pictures) if pictures else None)
    finally:
        browser.quit()
