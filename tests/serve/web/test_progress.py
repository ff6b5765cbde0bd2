"""How much of a long prompt has been read: shown after a second, gone with the first token."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.serve.web.browser import send
from tests.serve.web.server import Stage

WAITING = "Waiting for the first token…"
# The page's one timer of a second is kept instead of started: the tests say when it is over.
HOLD_TIMER = """() => {
    const start = setTimeout;
    window.setTimeout = (act, ms) => {
        if (ms !== 1000) return start(act, ms);
        window.passSecond = act;
    };
}"""
PASS_SECOND = "() => passSecond()"


def progress(processed: int, total: int = 1200, cache: int = 200) -> dict[str, Any]:
    return {"total": total, "cache": cache, "processed": processed, "time_ms": 5}


def start_reading(page: Page, stage: Stage, said: dict[str, Any] | None, message: str) -> None:
    """Send a message whose prompt is being read; less than a second has passed."""
    expect(page.locator("#server-state")).to_have_attribute("data-status", "ready")
    page.evaluate(HOLD_TIMER)
    stage.is_reading = True
    stage.read.append(said)
    send(page, message)
    expect(page.locator(".waiting")).to_have_text(WAITING)
    page.wait_for_function("() => window.passSecond")


@pytest.fixture
def reading(page: Page, stage: Stage) -> Page:
    """A page that waits for an answer; 35% of its prompt has been read."""
    start_reading(page, stage, progress(550), "a long prompt")
    return page


def test_progress_shows_after_a_second_and_goes_with_the_first_token(reading, stage):
    reading.wait_for_timeout(100)
    expect(reading.locator(".waiting")).to_have_text(WAITING)
    reading.evaluate(PASS_SECOND)
    expect(reading.locator(".waiting")).to_have_text("Reading prompt, 35%")
    assert stage.bodies[0]["return_progress"] is True
    stage.read.append(progress(1199))
    expect(reading.locator(".waiting")).to_have_text("Reading prompt, 100%")
    stage.is_reading = False
    expect(reading.locator(".answer > .prose")).to_have_text("You said: a long prompt")
    expect(reading.locator(".waiting")).to_be_hidden()
    expect(reading.locator("#announcer")).to_have_text("Answer complete.")


def test_a_prompt_that_is_read_within_a_second_shows_no_progress(reading, stage):
    stage.is_reading = False
    expect(reading.locator("#announcer")).to_have_text("Answer complete.")
    reading.evaluate(PASS_SECOND)  # were the timer not stopped
    reading.wait_for_timeout(100)
    assert reading.locator("#announcer").inner_text() == "Answer complete."


def test_a_screen_reader_is_told_each_quarter(reading, stage):
    reading.evaluate("""() => {
        window.said = [];
        new MutationObserver(() => said.push(announcer.textContent))
            .observe(announcer, { childList: true, characterData: true, subtree: true });
    }""")
    reading.evaluate(PASS_SECOND)
    for processed in range(550, 1201, 50):
        stage.read.append(progress(processed))
        percent = (processed - 200) // 10
        expect(reading.locator(".waiting")).to_have_text(f"Reading prompt, {percent}%")
    stage.is_reading = False
    expect(reading.locator("#announcer")).to_have_text("Answer complete.")
    said = [text for text in reading.evaluate("said") if text != "Answering…"]
    quarters = [f"Reading prompt, {percent}%" for percent in (35, 50, 75, 100)]
    assert said == [*quarters, "Answer complete."]


def test_progress_goes_when_the_answer_is_stopped(reading):
    reading.evaluate(PASS_SECOND)
    expect(reading.locator(".waiting")).to_have_text("Reading prompt, 35%")
    reading.click("#stop")
    expect(reading.locator(".note")).to_contain_text("You stopped this answer.")
    expect(reading.locator(".waiting")).to_be_hidden()
    expect(reading.locator("#announcer")).to_have_text("You stopped this answer.")


def test_progress_goes_when_the_stream_breaks(page, stage, watch):
    watch.may_fail = True
    start_reading(page, stage, progress(550), "break it")
    page.evaluate(PASS_SECOND)
    expect(page.locator(".waiting")).to_have_text("Reading prompt, 35%")
    stage.is_reading = False
    expect(page.locator(".note.failure")).to_contain_text("The engine was restarted.")
    expect(page.locator(".waiting")).to_be_hidden()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, WAITING),
        ({}, WAITING),
        ({"total": 200, "cache": 200, "processed": 200}, WAITING),  # all of it was in the cache
        ({"total": "x", "processed": []}, WAITING),
        ({"total": 200, "processed": 70}, "Reading prompt, 35%"),
        ({"total": 200, "cache": 100, "processed": 50}, "Reading prompt, 0%"),
        ({"total": 200, "cache": 100, "processed": 999}, "Reading prompt, 100%"),
    ],
)
def test_a_server_may_say_nothing_or_nonsense(page, stage, given, words):
    start_reading(page, stage, given, "a long prompt")
    page.evaluate(PASS_SECOND)
    expect(page.locator(".waiting")).to_have_text(words)
    stage.is_reading = False
    expect(page.locator(".answer > .prose")).to_have_text("You said: a long prompt")
