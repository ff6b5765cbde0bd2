"""The page's second tab in a browser: a list, scored against a query."""

import pytest
from playwright.sync_api import expect

from tests.serve.web.browser import ask
from tests.serve.web.server import MODEL

ITEMS = "short\n\na somewhat longer one\n<img src=x onerror=window.hacked=1>"


def fill(page, query, items=ITEMS, labels=""):
    page.get_by_role("tab", name="Score").click()
    page.fill("#score-query", query)
    page.fill("#score-items", items)
    page.fill("#score-labels", labels)


def run(page, query, items=ITEMS, labels=""):
    fill(page, query, items, labels)
    page.get_by_role("button", name="Score").click()


def rows(page):
    return page.locator("#score-table tbody tr").all_inner_texts()


def test_items_are_ranked_by_relevance(page, stage):
    run(page, "what is long?")
    expect(page.locator("#score-state")).to_contain_text("3 items in")
    expect(page.locator("#score-state")).to_contain_text("items/s")
    assert [row.split("\t")[0].strip() for row in rows(page)] == ["3", "2", "1"]
    assert page.locator("#score-table th").all_inner_texts() == ["#", "Relevance", "Item"]
    assert page.locator("#score-table meter").count() == 3
    (body,) = stage.bodies
    documents = ["short", "a somewhat longer one", "<img src=x onerror=window.hacked=1>"]
    assert body == {"model": MODEL, "query": "what is long?", "documents": documents}
    assert page.evaluate("window.hacked") is None
    assert page.locator("#score-table img").count() == 0


def test_labels_have_a_column_each(page, stage):
    run(page, "Review: ", labels=" positive, negative")
    expect(page.locator("#score-table tbody tr")).to_have_count(3)
    heads = page.locator("#score-table th").all_inner_texts()
    assert heads == ["#", "positive", "negative", "Item"]
    first = rows(page)[0].split("\t")
    assert first[0].strip() == "3"
    assert float(first[1].split()[0]) + float(first[2]) == pytest.approx(1, abs=1e-3)
    (body,) = stage.bodies
    assert body["labels"] == [" positive", " negative"]
    assert body["apply_softmax"] is True


@pytest.mark.parametrize("labels", ["", " positive, negative"])
def test_an_item_without_a_score_says_why(page, labels):
    run(page, "partly", labels=labels)
    expect(page.locator("#score-table")).to_contain_text("It is too long.")
    assert [row.split("\t")[0].strip() for row in rows(page)] == ["3", "2", "1"]


@pytest.mark.parametrize(
    ("query", "items", "words"),
    [(" ", ITEMS, "Write a query"), ("a", " \n ", "Write at least one item")],
)
def test_what_is_missing_is_said_and_nothing_is_sent(page, stage, query, items, words):
    run(page, query, items)
    expect(page.locator("#score-state")).to_contain_text(words)
    assert stage.bodies == []


def test_a_refusal_is_shown_as_text(page, watch):
    watch.may_fail = True
    run(page, "refuse")
    expect(page.locator("#score-state")).to_have_text("Too <b>long</b>.")
    run(page, "busy")
    expect(page.locator("#score-state")).to_have_text("The queue is full.")
    run(page, "again")
    expect(page.locator("#score-table tbody tr")).to_have_count(3)


def test_a_list_can_be_stopped(page):
    run(page, "slow")
    expect(page.locator("#score-run")).to_be_disabled()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#score-state")).to_have_text("Stopped.")
    expect(page.locator("#score-run")).to_be_enabled()


def test_a_key_is_asked_for_and_the_list_goes_on(page, stage, watch):
    watch.may_fail = True
    fill(page, "locked")
    stage.key = "secret"
    page.get_by_role("button", name="Score").click()
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    expect(page.locator("#score-table tbody tr")).to_have_count(3)


def test_tabs_by_keyboard_and_chat_goes_on_beside(page):
    assert ask(page, "hello") == "You said: hello"
    chat = page.get_by_role("tab", name="Chat")
    chat.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Score")).to_be_focused()
    expect(page.locator("#score")).to_be_visible()
    expect(page.locator("#composer")).to_be_hidden()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#score")).to_be_hidden()
    assert ask(page, "again") == "You said: again"
    page.get_by_role("tab", name="Score").click()
    page.locator("#history button").first.click()
    expect(page.locator("#composer")).to_be_visible()


def test_a_narrow_screen_holds_the_tab(page):
    page.set_viewport_size({"width": 360, "height": 640})
    page.get_by_role("tab", name="Score").click()
    run(page, "what?", "x" * 300)
    expect(page.locator("#score-table tbody tr")).to_have_count(1)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360
    inner = page.evaluate("document.getElementById('score').scrollWidth")
    assert inner <= 360
