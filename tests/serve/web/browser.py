"""Headless Chromium for the tests of the web page, and what a person does with it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.patience import PATIENCE_S
from tests.serve.web.server import Stage, running_server

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LOADING_FAILED = "Failed to load resource"


@dataclass(slots=True)
class Watch:
    """What went wrong in a page, and what it asked other servers for."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    may_fail: bool = False  # the browser's own lines about answers with status 4xx and 5xx
    origins: tuple[str, ...] = ()

    def check(self) -> None:
        """No error was logged or thrown, and no request left for another server."""
        assert [e for e in self.errors if not (self.may_fail and LOADING_FAILED in e)] == []
        assert [r for r in self.requests if not r.startswith((*self.origins, "blob:"))] == []


@dataclass(slots=True)
class Session:
    """One browser page that all tests of a module use, since a new one costs half a second."""

    stage: Stage
    page: Page
    watch: Watch

    @contextmanager
    def fresh(self) -> Iterator[Page]:
        """The page as on a first visit, ready; at the end a look at its console and requests."""
        self.page.goto(f"{self.stage.base}/ui/theme.js")  # same origin, nothing runs there
        self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        self.page.set_viewport_size({"width": 1400, "height": 800})
        self.page.emulate_media(color_scheme="light", reduced_motion="reduce")
        self.stage.reset()
        self.watch.errors.clear()
        self.watch.requests.clear()
        self.watch.may_fail = False
        self.watch.origins = (f"{self.stage.base}/",)
        self.page.goto(self.stage.base)
        await_ready(self.page)
        yield self.page
        self.watch.check()


@contextmanager
def opened_session() -> Iterator[Session]:
    """A server and a browser; the tests are skipped, visibly, where there is no browser."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser found (looked for {', '.join(BROWSERS)})")
    watch = Watch()
    with running_server(Stage()) as stage, sync_playwright() as playwright:
        # Without a sandbox: containers and CI machines run tests as root.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_context().new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        expect.set_options(timeout=1000 * PATIENCE_S)
        page.on("pageerror", lambda error: watch.errors.append(str(error)))
        page.on("console", lambda m: watch.errors.append(m.text) if m.type == "error" else None)
        page.on("request", lambda request: watch.requests.append(request.url))
        yield Session(stage, page, watch)
        browser.close()


def await_ready(page: Page) -> None:
    """A message sent before the page knows the models names none."""
    expect(page.locator("#server-state")).to_have_attribute("data-status", "ready")


def reload(page: Page) -> None:
    """Load the page anew; it is ready as before."""
    page.reload()
    await_ready(page)


def send(page: Page, text: str) -> None:
    """Type a message and send it."""
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def finish(page: Page) -> None:
    """Wait for the end of the last answer, which the page shows as soon as it is asked for."""
    page.locator(".answer[aria-busy=false]:last-child").wait_for()


def ask(page: Page, text: str) -> str:
    """Send a message, wait for the end of its answer, and read it."""
    send(page, text)
    finish(page)
    return page.locator(".answer > .prose").last.inner_text()


def start_slow(page: Page, text: str) -> None:
    """Send a message whose answer takes long, and wait for the first of it."""
    send(page, text)
    expect(page.locator(".answer > .prose").last).to_contain_text("word3")
