"""Formulas in answers: what is one, how it is shown, loaded and copied, what a hostile one does."""

import pytest
from playwright.sync_api import Page, expect

from tests.patience import wait_for
from tests.serve.web.browser import ask, send

# Text -> what of it is a formula, as its source between the dollars that stand for its kind.
PLACES = {
    "$x^2$ and $a_1 * b_1$.": ["$x^2$", "$a_1 * b_1$"],
    r"\(x\) and \[y\]": ["$x$", "$$y$$"],
    "so $$x$$ it": ["$$x$$"],
    "**$x$** | ($y$)-axis, the $n$th, $n$s": ["$x$", "$y$", "$n$", "$n$"],
    "$$\nx_1\n\n* y_1\n$$": ["$$x_1\n\n* y_1$$"],
    "so:\n\\[\na\n+ b\n\\]\nthus": ["$$a\n+ b$$"],
    "- so:\n  $$\n  - x\n  $$\n- on": ["$$- x$$"],
    "$$a$$ is one,\n\n$$b$$": ["$$a$$", "$$b$$"],
    "$$a$$ is one,\n$$b\n$$": ["$$a$$", "$$b$$"],
    "> $x$\n\n# $y$\n\n| $z$ |\n|---|\n| $w$ |": ["$x$", "$y$", "$z$", "$w$"],
    r"$\$5$ and $5\%$, $3 \text{ of them}$": [r"$\$5$", r"$5\%$", r"$3 \text{ of them}$"],
    # None of these is one.
    "$5 and $6": [],
    "$5, $6 and 7$": [],
    "$20 per day (or 30$)": [],
    "US$5 to US$6 or $5/$6, $5-$6": [],
    "cheap ($), dear ($$), ($$$)": [],
    "$HOME and $PATH, $HOME/$PATH": [],
    r"\$x\$ and \\(x": [],
    "`$x$` and $5 `y$`": [],
    "```\n$x$\n```\n\n~~~\n\\[\nx\n\\]\n~~~": [],
    "\\[ open\n```\n\\]\n```": [],
    "$ x $ and $ and $$ and $x": [],
    "$$\nnever closed *a*": [],
    "\\(\\) and \\[ \\]": [],
    "$a\nb$": [],
}
RENDER = """async (texts) => {
    const { MarkdownView } = await import("/ui/markdown.js");
    return texts.map((text) => {
        const container = document.createElement("div");
        new MarkdownView(container).show(text);
        const places = [...container.querySelectorAll(".math")];
        return [places.map((place) => place.dataset.source), container.textContent];
    });
}"""
# Puts an element into the page in which Markdown can be shown.
SHOW = """async (text) => {
    const { MarkdownView } = await import("/ui/markdown.js");
    if (!window.shown) {
        const container = document.createElement("div");
        container.className = "prose";
        log.append(container);
        window.shown = new MarkdownView(container);
    }
    window.shown.show(text);
    return log.lastChild.innerText;
}"""


def typeset(page: Page) -> list[str]:
    """The sources of all formulas that are typeset, out of their MathML."""
    return page.locator(".is-typeset annotation").all_text_contents()


def test_what_a_formula_is(page):
    got = page.evaluate(RENDER, list(PLACES))
    assert {text: places for text, (places, _) in zip(PLACES, got, strict=True)} == PLACES
    kept = {text: shown for text, (_, shown) in zip(PLACES, got, strict=True)}
    assert kept["$5 and $6"] == "$5 and $6"
    assert kept["$$\nnever closed *a*"] == "$$\nnever closed a"


def test_formulas_are_typeset_by_the_library_that_comes_with_the_first(page, stage, watch):
    ask(page, "no formula, $5")
    assert [url for url in watch.requests if "katex" in url] == []
    stage.text = "The roots of $ax^2 + bx + c$ are\n$$\n\\frac{-b \\pm \\sqrt{D}}{2a}\n$$\nhere."
    ask(page, "and now")
    expect(page.locator(".math.is-typeset")).to_have_count(2)
    assert typeset(page) == ["ax^2 + bx + c", "\\frac{-b \\pm \\sqrt{D}}{2a}"]
    page.wait_for_function("() => [...document.fonts].some((font) => font.status === 'loaded')")
    urls = [url for url in watch.requests if "katex" in url]
    loaded = {url.rpartition("/")[2] for url in urls}
    assert {"katex.min.js", "katex.min.css", "KaTeX_Math-Italic.woff2"} <= loaded
    assert all(url.startswith(f"{stage.base}/ui/katex-") for url in urls)
    line, fraction = (place.bounding_box()["height"] for place in page.locator(".math").all())
    assert fraction > 1.7 * line  # its style sheet and its styles hold
    ink = "getComputedStyle(document.querySelector('.katex-html .mord')).color"
    light = page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ink) != light


def test_an_open_formula_is_text_until_it_closes_and_then_never_again(page):
    assert page.evaluate(SHOW, "so $x^2 + y") == "so $x^2 + y"
    page.evaluate(SHOW, "so $x^2 + y$")
    expect(page.locator(".math.is-typeset")).to_have_count(1)
    page.evaluate(SHOW, "so $x^2 + y$ and on")  # the block is made anew
    assert page.locator(".math.is-typeset .katex-html [style]").count() > 2
    assert "and on" in page.locator(".prose").last.inner_text()


def test_an_answer_that_grows_by_its_formulas_stays_at_its_end(page, stage):
    rows = r" \\ ".join(["x"] * 30)
    stage.text = "line\n\n" * 40 + f"$$\\begin{{matrix}}{rows}\\end{{matrix}}$$"
    ask(page, "tall")
    expect(page.locator(".math.is-typeset")).to_have_count(1)
    page.wait_for_function(
        "() => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 2"
    )


def test_a_wide_formula_scrolls_within_its_answer(page, stage):
    page.set_viewport_size({"width": 320, "height": 640})
    wide = "+".join(["x"] * 60)
    stage.text = f"Wide: $\\frac{{{wide}}}{{2}}$\n\n$${wide}$$"
    ask(page, "wide")
    expect(page.locator(".math.is-typeset")).to_have_count(2)
    assert page.locator("#scroller").evaluate("e => e.scrollWidth <= e.clientWidth")
    assert page.locator(".math.is-display").evaluate("e => e.scrollWidth > e.clientWidth")


def test_copying_gives_the_source(page, stage):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    read = "navigator.clipboard.readText()"
    stage.text = "Let $x^2$ be.\n\n$$\ny_1\n$$\n\nEnd."
    ask(page, "copy")
    expect(page.locator(".math.is-typeset")).to_have_count(2)
    page.get_by_label("Copy answer").click()
    expect(page.get_by_label("Copied", exact=True)).to_be_visible()
    assert page.evaluate(read) == stage.text
    prose = page.locator(".answer > .prose")
    prose.evaluate("e => document.getSelection().selectAllChildren(e)")
    page.keyboard.press("Control+C")
    wait_for(lambda: page.evaluate(read).split() == ["Let", "$x^2$", "be.", "$$y_1$$", "End."])
    prose.locator("p").first.evaluate("""e => {
        const inner = e.querySelector(".katex-html .mord").firstChild;
        document.getSelection().setBaseAndExtent(inner, 0, e.lastChild, 3);
    }""")
    page.keyboard.press("Control+C")
    wait_for(lambda: page.evaluate(read) == "$x^2$ be")  # a formula is copied whole or not at all
    prose.locator(".katex-html").first.evaluate("e => document.getSelection().selectAllChildren(e)")
    page.keyboard.press("Control+C")
    wait_for(lambda: page.evaluate(read) == "$x^2$")
    assert page.locator(".copied").count() == 0


HOSTILE = [
    r"\href{javascript:window.hacked=1}{x}",
    r"\url{javascript:window.hacked=2}",
    r"\includegraphics[alt=x]{https://192.0.2.1/leak.png}",
    r"\htmlStyle{background:url(https://192.0.2.1/)}{x}",
    r"\htmlClass{katex-error}{x} \htmlId{send}{x} \htmlData{icon=x}{x}",
    r"\text{<img src=x onerror=window.hacked=3>}",
    r"</annotation><script>window.hacked=4</script>",
    r"\raisebox{50em}{x} \kern-50em \rule{9999em}{9999em}",
    r"\color{red;background:url(https://192.0.2.1/)} x",
    r"\fcolorbox{red}{blue}{x} \pmb{x}",
    r"\errmessage{x} \message{x} \show x",
    r"\unknown{x}",
]


def test_a_hostile_formula_does_nothing(page, stage, watch):
    stage.text = "\n\n".join([*(f"$${source}$$" for source in HOSTILE), "last $x$"])
    ask(page, "hostile")
    expect(page.locator("p .math.is-typeset")).to_have_count(1)
    answer = page.locator(".answer > .prose")
    assert answer.locator(".math").count() == len(HOSTILE) + 1
    assert answer.locator("a, img, script, [onerror], [id], [href], [src]").count() == 0
    assert answer.locator("[data-icon], .katex-error").count() == 0
    box, inside = answer.bounding_box(), answer.locator(".math").first.bounding_box()
    assert inside["y"] >= box["y"]
    assert answer.evaluate("e => getComputedStyle(e).overflowY") == "hidden"  # nothing gets out
    tallest = "e => Math.max(...[...e.querySelectorAll('.rule')].map(r => r.offsetHeight))"
    assert answer.evaluate(tallest) < 1000
    assert page.evaluate("window.hacked") is None
    watch.check()  # no request to another server, no word of the policy, none in the console


# What defines macros can keep KaTeX busy for minutes; these are small, so that a fault ends.
ENDLESS = [
    "{" * 50_000 + "}" * 50_000,
    "{" * 100_000,
    r"\def\a{xxxx}" + r"\a" * 4,
    r"\newcommand{\a}{xxxx}" + r"\a" * 4,
    r"\edef\a{xxxx}\let\b\a" + r"\b" * 4,
    r"\def\a{\a\a}\a",
    r"\frac{" * 20_000,
    "x^" * 50_000,
]


@pytest.mark.parametrize("source", ENDLESS, ids=lambda source: source[:5].strip("\\"))
def test_an_endless_formula_stays_source(page, stage, source):
    page.evaluate(SHOW, f"$${source}$$\n\n$${source[:1500]}$$ and ${source[:900]}$\n\nlast $x$")
    expect(page.locator("p:last-child .math.is-typeset")).to_have_count(1)
    assert typeset(page) == ["x"]
    assert page.locator(".math").first.text_content() == source


def test_a_formula_that_is_too_long_stays_source(page):
    longest = "x" * 2000
    page.evaluate(SHOW, f"$${longest}x$$\n\n$${longest}$$\n\nlast $x$")
    expect(page.locator("p:last-child .math.is-typeset")).to_have_count(1)
    assert typeset(page) == [longest, "x"]


def test_many_formulas_leave_the_page_usable(page):
    """They are typeset between other work, as that of this timer; a message can be written."""
    page.evaluate("""() => {
        window.seen = new Set();
        const typeset = document.getElementsByClassName("is-typeset");
        const look = () => {
            seen.add(typeset.length);
            if (typeset.length < 200) setTimeout(look);
        };
        look();
    }""")
    page.evaluate(SHOW, " ".join(f"$x_{{{i}}}$" for i in range(200)))
    page.locator("#prompt").press_sequentially("hello")
    expect(page.locator(".is-typeset")).to_have_count(200)
    assert page.evaluate("seen.size") > 3
    send(page, "hello")
    expect(page.locator(".answer > .prose")).to_have_text("You said: hello")


def test_a_page_that_holds_too_much_shows_sources(page):
    page.evaluate("""() => {
        const line = document.createElement("p");
        line.hidden = true;
        for (let i = 0; i < 1000; i += 1) line.append(document.createElement("i"));
        for (let i = 0; i < 200; i += 1) log.append(line.cloneNode(true));
    }""")
    page.evaluate(SHOW, "last $x$")
    page.wait_for_function("() => window.katex")
    page.wait_for_timeout(100)
    assert typeset(page) == []
    page.evaluate("log.replaceChildren(log.lastChild)")
    page.evaluate(SHOW, "last $y$")
    expect(page.locator(".is-typeset")).to_have_count(1)


def test_without_the_library_the_source_stays_and_it_is_asked_for_again(page, watch):
    watch.may_fail = True
    page.route("**/katex.min.css", lambda route: route.abort())
    with page.expect_event("requestfailed"):
        page.evaluate(SHOW, "so $x$")
    expect(page.locator(".math")).to_have_text("x")
    page.unroute("**/katex.min.css")
    page.evaluate(SHOW, "so $y$")
    expect(page.locator(".math.is-typeset")).to_have_count(1)
