"""The bar above the conversation: nothing touches, nothing is cut without a sign, at each width."""

from itertools import combinations
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.serve.web.browser import ask
from tests.serve.web.server import MODEL

LONG_NAME = "someone/Some-Model-30B-A3B-Instruct-2507-GGUF:Q4_K_M"
QUESTION = (
    "Explain how a heat pump works, in simple words, and compare it with a gas boiler, for a house "
    "of 1960 with old radiators and no floor heating"
)
MIN_GAP = 6  # pixels between the boxes of two things that can be tapped
BOXES = """() => Object.fromEntries(
    [...document.querySelectorAll(".topbar > button, .tabs, #title, #server-state, #model")]
        .filter((node) => node.checkVisibility({ visibilityProperty: true }))
        .map((node) => {
            const { left, top, right, bottom } = node.getBoundingClientRect();
            const name = node.id || (node.matches(".tabs") ? "tabs" : node.ariaLabel);
            return [name, { left, top, right, bottom }];
        }))"""
CUT = """() => [...document.querySelectorAll("#title, #model")]
    .filter((node) => node.checkVisibility({ visibilityProperty: true }))
    .map((node) => {
        const text = node.value ?? node.textContent;
        const isCut = node.scrollWidth > node.clientWidth;
        const { textOverflow } = getComputedStyle(node);
        return { text, isCut, textOverflow, title: node.title };
    })"""


def boxes(page: Page, width: int, names: list[str], stage: Any) -> dict[str, dict[str, float]]:
    """Of all that is on show in the bar, after a question whose title is too long for it."""
    stage.cards = [{"id": name, "max_model_len": 8192} for name in names]
    page.set_viewport_size({"width": width, "height": 800})
    page.reload()
    expect(page.locator("#model option")).to_have_count(len(names))
    ask(page, QUESTION)
    return page.evaluate(BOXES)


@pytest.mark.parametrize(
    "names", [[MODEL], [LONG_NAME], [LONG_NAME, MODEL]], ids=["one", "long", "two"]
)
@pytest.mark.parametrize("width", [1280, 800, 390, 320])
def test_nothing_in_the_bar_touches_and_what_is_cut_says_so(page, stage, width, names):
    found = boxes(page, width, names, stage)
    assert {"tabs", "title", "model", "server-state", "open-settings"} <= set(found)
    assert ("New conversation" in found) == (width < 900)
    for (one, a), (other, b) in combinations(found.items(), 2):
        across = max(a["left"], b["left"]) - min(a["right"], b["right"])
        down = max(a["top"], b["top"]) - min(a["bottom"], b["bottom"])
        apart = max(across, down)
        assert apart >= (4 if "server-state" in (one, other) else MIN_GAP - 1), (one, other)
    for name, box in found.items():
        assert box["left"] >= 0, name
        assert box["right"] <= width, name
    title, *_ = labels = page.evaluate(CUT)
    assert title["text"] == QUESTION  # the bar cuts it to its own width, the data does not
    for label in labels:
        assert label["title"] == label["text"]
        assert not label["isCut"] or label["textOverflow"] == "ellipsis"


def test_the_model_keeps_the_distances_of_its_neighbours_on_a_desktop(page, stage):
    gaps = []
    for names in ([MODEL], [MODEL, "another"]):
        found = boxes(page, 1280, names, stage)
        before_title = found["title"]["left"] - found["tabs"]["right"]
        before_model = found["server-state"]["left"] - found["title"]["right"]
        assert before_title == pytest.approx(before_model, abs=1)
        assert before_title == pytest.approx(16, abs=1)
        padding = page.evaluate("parseFloat(getComputedStyle(model).paddingLeft)")
        gaps.append(found["model"]["left"] + padding - found["server-state"]["right"])
    assert gaps[0] == pytest.approx(gaps[1], abs=1)  # whether there is a choice of models or none
    assert gaps[0] < 12


def test_the_arrow_stays_beside_the_chosen_model_however_long_other_names_are(page, stage):
    widths = []
    for other in ("m", LONG_NAME):
        found = boxes(page, 1280, [MODEL, other], stage)
        widths.append(found["model"]["right"] - found["model"]["left"])
    assert widths[0] == pytest.approx(widths[1], abs=1)


def test_on_a_phone_the_model_and_the_buttons_are_in_rows_of_their_own(page, stage):
    found = boxes(page, 390, [LONG_NAME, MODEL], stage)
    assert found["model"]["top"] >= found["New conversation"]["bottom"]
    assert found["model"]["bottom"] - found["model"]["top"] >= 24  # the least that a finger needs
    assert found["title"]["right"] - found["title"]["left"] >= 120
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#welcome")).to_be_visible()
    assert not page.evaluate("document.activeElement === model")
