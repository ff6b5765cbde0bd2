"""How the web page looks and reads: Markdown, contrast, themes, widths, keyboard, names."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.serve.web.browser import ask, finish, reload, send
from tests.serve.web.server import HOSTILE, MARKDOWN

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


# --- appearance and access ---


def busy_page(page: Page) -> None:
    """One of everything on the screen."""
    ask(page, "markdown")
    ask(page, "think")
    page.locator(".reasoning:not([hidden]) summary").click()
    send(page, "busy")
    expect(page.locator(".note.failure")).to_be_visible()
    ask(page, "use the tool")
    page.click("#open-settings")
    page.fill("#sampling-seed", "x")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_themes(page, watch, scheme):
    watch.may_fail = True
    page.emulate_media(color_scheme=scheme)
    busy_page(page)
    page.get_by_label("Copy answer").last.focus()
    weak = page.evaluate(CONTRAST)
    assert weak["checked"] > 60
    assert weak["found"] == []


def test_dark_mode_follows_the_system_and_the_button(page):
    def ground() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = ground()
    page.emulate_media(color_scheme="dark")
    dark = ground()
    assert light != dark
    page.get_by_role("button", name="Theme: system").click()
    assert ground() == light
    page.get_by_role("button", name="Theme: light").click()
    page.emulate_media(color_scheme="light")
    reload(page)
    assert ground() == dark  # chosen, kept, whatever the system says
    page.get_by_role("button", name="Theme: dark").click()
    assert ground() == light


def test_narrow_screens_scroll_down_only(page):
    page.set_viewport_size({"width": 320, "height": 640})
    expect(page.locator("#sidebar")).to_be_hidden()
    ask(page, "markdown")
    ask(page, "a" * 300)
    overflow = "document.documentElement.scrollWidth > window.innerWidth"
    wide = """[...document.querySelectorAll('#log *, #composer *, header *')]
        .filter(e => !e.closest('pre, .table, .visually-hidden, select'))
        .filter(e => e.getBoundingClientRect().right > window.innerWidth + 1)
        .map(e => e.outerHTML.slice(0, 80))"""
    assert not page.evaluate(overflow)
    assert page.locator("#scroller").evaluate("e => e.scrollWidth <= e.clientWidth")
    assert page.evaluate(wide) == []
    page.click("#open-settings")
    expect(page.locator("#settings")).to_be_visible()
    assert page.locator("#main").evaluate("main => main.inert")
    assert not page.evaluate(overflow)
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#open-settings")).to_be_focused()
    page.click("#open-sidebar")
    page.locator(".history-open").click()
    expect(page.locator("#sidebar")).to_be_hidden()


def test_the_keyboard_does_everything(page):
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    expect(page.locator(".question-text")).to_have_text("line one\nline two")
    finish(page)
    page.keyboard.type("slow now")
    page.keyboard.press("Enter")
    expect(page.locator(".answer").last).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(page.locator(".note").last).to_contain_text("You stopped")
    expect(page.locator("#prompt")).to_be_focused()
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        name, ring = page.evaluate("""() => {
            const e = document.activeElement;
            const width = (node) => parseFloat(getComputedStyle(node).outlineWidth);
            const widths = [e, e.parentElement].map(width);
            return [e.getAttribute("aria-label") || e.textContent.trim(), Math.max(...widths)];
        }""")
        assert ring >= 2, f"no focus ring on {name}"
        seen.add(name)
    assert {
        "Skip to the message field",
        "New conversation",
        "line one",
        "Rename line one",
        "Delete line one",
        "Import",
        "Settings",
        "Copy answer",
        "Regenerate",
        "Edit and ask again",
        "Message",
    } <= seen


def test_everything_that_can_be_used_has_a_name(page, watch):
    watch.may_fail = True
    busy_page(page)
    nameless = page.evaluate("""() => {
        const nameOf = (e) =>
            e.getAttribute("aria-label") || e.textContent.trim() ||
            [...(e.labels ?? [])].map((label) => label.textContent.trim()).join("");
        const used =
            "button, a[href], input, select, textarea, summary, [role=img], [tabindex='0']";
        const all = [...document.querySelectorAll(used)].filter((e) => e.checkVisibility());
        return all.filter((e) => !nameOf(e)).map((e) => e.outerHTML);
    }""")
    assert nameless == []
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1
    assert page.locator("[role=log]").count() == 1
    expect(page.locator("#announcer")).to_have_text("Answer complete.")
    missing = page.evaluate("""() => {
        const names = ["aria-describedby", "aria-controls", "aria-labelledby", "for"];
        const named = (name) => [...document.querySelectorAll(`[${name}]`)];
        const ids = names.flatMap((name) =>
            named(name).flatMap((e) => e.getAttribute(name).split(" ")));
        return ids.filter((id) => !document.getElementById(id));
    }""")
    assert missing == []


def test_code_is_copied_as_it_was_written(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "markdown")
    page.get_by_label("Copy code").click()
    expect(page.get_by_label("Copied", exact=True)).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("# Merge two sorted lists.\ndef merge(left: list[int]")
    assert "```" not in copied


# --- Markdown ---

MARKDOWN_CASES = {
    "plain <b>text</b> & more": "<p>plain &lt;b&gt;text&lt;/b&gt; &amp; more</p>",
    "*a* _b_ **c** __d__ ***e*** ~~f~~ ~g~": "<p><em>a</em> <em>b</em> <strong>c</strong> "
    "<strong>d</strong> <em><strong>e</strong></em> <del>f</del> ~g~</p>",
    "snake_case_name 2 * 3 * 4 **open": "<p>snake_case_name 2 * 3 * 4 **open</p>",
    "**a *b* c** *d **e** f*": "<p><strong>a <em>b</em> c</strong> <em>d <strong>e</strong> f</em>"
    "</p>",
    "*a **b*": "<p>*a *<em>b</em></p>",
    "`a *b* <i>` ``c`d`` ` e": "<p><code>a *b* &lt;i&gt;</code> <code>c`d</code> ` e</p>",
    r"\*a\* \\ \x &amp; &#65; &bogus;": "<p>*a* \\ \\x &amp; A &amp;bogus;</p>",
    "a  \nb\\\nc<br>d\ne": "<p>a<br>b<br>c<br>d\ne</p>",
    "[a](javascript:b) [c](/d)": "<p><span>a</span> <span>c</span></p>",
    "![e](http://f/g)": "<p><A f/g>e</A></p>",
    "[a *b*](https://c/d_(e) 'f') [g] [h](i": "<p><A c/d_(e)>a <em>b</em></A> [g] [h](i</p>",
    "see https://a/b_c_d(e), or <https://f/>.": "<p>see <A a/b_c_d(e)>https://a/b_c_d(e)</A>, or "
    "<A f/>https://f/</A>.</p>",
    "# A\n## B ##\n####### C\n#D": '<h3 class="level-1">A</h3><h4 class="level-2">B</h4>'
    "<p>####### C\n#D</p>",
    "a\n- - -\n***\nb": "<p>a</p><hr><hr><p>b</p>",
    "- a\n  - b\n    - c\n- d": "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li>"
    "</ul>",
    "1. a\n  - b\n2. c": "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>",
    "3) a\n4) b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n\n- b\n\n  c": '<ul class="loose"><li><p>a</p></li><li><p>b</p><p>c</p></li></ul>',
    "- a\nb\n* c": "<ul><li>a\nb</li></ul><ul><li>c</li></ul>",
    "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    "|a|b|\n|-|-:|\n|`x\\|y`|*z*|u|\nw": '<T><table><thead><tr><th scope="col">a</th>'
    '<th class="align-right" scope="col">b</th></tr></thead><tbody><tr><td><code>x|y</code></td>'
    '<td class="align-right"><em>z</em></td></tr><tr><td>w</td><td class="align-right"></td></tr>'
    "</tbody></table></T>",
    "a | b\nc": "<p>a | b\nc</p>",
}
RENDER = """async (texts) => {
    const { MarkdownView } = await import("/ui/markdown.js");
    const container = document.createElement("div");
    const view = new MarkdownView(container);
    texts.forEach((text) => view.show(text));
    return container.innerHTML;
}"""


def shorter(html: str) -> str:
    """The same with short names for what has many attributes."""
    for long, short in {
        ' target="_blank" rel="noopener noreferrer"': "",
        '<div class="table" tabindex="0" role="region" aria-label="Table">': "<T>",
        "</table></div>": "</table></T>",
    }.items():
        html = html.replace(long, short)
    link = re.compile(r'<a href="https?://([^"]*)" title="[^"]*">(.*?)</a>')
    return link.sub(r"<A \1>\2</A>", html)


def test_markdown_becomes_the_right_nodes(page):
    got = {text: shorter(page.evaluate(RENDER, [text])) for text in MARKDOWN_CASES}
    assert got == MARKDOWN_CASES


def test_text_that_grows_ends_as_text_at_once(page):
    prefixes = [MARKDOWN[:end] for end in range(1, len(MARKDOWN) + 1)]
    at_once = page.evaluate(RENDER, [MARKDOWN])
    assert "<table>" in at_once
    assert page.evaluate(RENDER, prefixes) == at_once
    assert page.evaluate(RENDER, [MARKDOWN, HOSTILE, "", MARKDOWN[:200], MARKDOWN]) == at_once


def test_blocks_that_are_done_keep_their_nodes(page):
    kept = page.evaluate("""async () => {
        const { MarkdownView } = await import("/ui/markdown.js");
        const container = document.createElement("div");
        const view = new MarkdownView(container);
        view.show("one *a*\\n\\n- b\\n\\ntail");
        const [first, list] = container.children;
        view.show("one *a*\\n\\n- b\\n\\ntail grows");
        const [firstNow, listNow] = container.children;
        return first === firstNow && list === listNow && container.textContent.includes("grows");
    }""")
    assert kept


HOSTILE_PIECES = [
    *("[", "![", "[a](", "[a](b", "*a ", "*a_ ", "**a *", "a**b", "`a``", "<https://a", "&#1"),
    *("\\(", "$$", "$$\n", "\\[\n", "> ", ">", "- ", "  - a\n", "1. ", "|a", "a|b\n|-", "~~a"),
    *("***", "_a_b", "#", "   ", "\n\n", "http://a(", "```\n", "`", "]", "$", "$a ", "$a", "$1 a"),
    *("$$ a\n", "\\[ a \\] b\n", "\\(`", "\\(\\)"),
]
# By the number of pairs, which are more than are shown within each other.
HOSTILE_PAIRS = {
    "stars": lambda n: "*a " * n + " a*" * n,
    "two kinds": lambda n: "**a _b " * n + "b_ a** " * n,
    "one opener": lambda n: "*" * n + "a*" * n,
    "openers that stay": lambda n: "*a " * n + " a*" * 30 + "_b " * n,
    "in a link": lambda n: "[" + "*a " * n + " a*" * n + "](http://b)",
}


def test_hostile_markdown_takes_linear_time_and_bounded_depth(page):
    """Each of these made some Markdown reader run for minutes or fall over.

    The browser counts how often each block of the reader's code runs.
    """
    profiler = page.context.new_cdp_session(page)
    profiler.send("Profiler.enable")
    profiler.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": True})

    def steps_for(text):
        depth, length = page.evaluate(
            """async (text) => {
                const { MarkdownView } = await import("/ui/markdown.js");
                const container = document.createElement("div");
                new MarkdownView(container).show(text);
                let depth = 0;
                for (let e = container; e; e = e.firstElementChild) depth += 1;
                return [depth, container.textContent.length];
            }""",
            text,
        )
        assert depth <= 60, text[:20]
        assert length <= 100_000, text[:20]
        scripts = profiler.send("Profiler.takePreciseCoverage")["result"]  # and counts from 0 again
        functions = [
            f for script in scripts if "/ui/" in script["url"] for f in script["functions"]
        ]
        return sum(part["count"] for function in functions for part in function["ranges"])

    def is_linear(shape, few, many):
        # Once in many runs the browser loses most counts of a text, so each has three tries.
        tries = ((steps_for(shape(few)), steps_for(shape(many))) for _ in range(3))
        return any(0 < steps < 6 * before + 1000 for before, steps in tries)

    steps_for("*")  # the reader is imported
    for piece in HOSTILE_PIECES:
        assert is_linear(lambda size, piece=piece: piece * (size // len(piece)), 3_000, 12_000), (
            piece
        )
    for name, shape in HOSTILE_PAIRS.items():
        assert is_linear(shape, 500, 2_000), name
