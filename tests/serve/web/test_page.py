"""The web page in a browser: what a person does, what a server answers, what must not happen."""

import json
import re

import pytest
from playwright.sync_api import Page, expect

from tests.patience import wait_for
from tests.serve.web.browser import (
    ask,
    await_ready,
    finish,
    reload,
    send,
    start_slow,
)
from tests.serve.web.server import MODEL, Stage, running_server

# --- sending and stopping ---


def test_an_answer_streams_with_its_figures(page, stage):
    assert ask(page, "hello **there**") == "You said: hello there"
    stats = page.locator(".stats").inner_text()
    # Four tokens at once may have no speed that means anything.
    assert re.fullmatch(r"([\d.]+ tokens/s · )?first token [\d.]+ m?s · 4 tokens", stats)
    expect(page).to_have_title("hello **there** \u2013 Tiercel")
    (body,) = stage.bodies
    assert body["model"] == MODEL
    assert body["messages"] == [{"role": "user", "content": "hello **there**"}]
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["return_progress"] is True
    fields = {"model", "messages", "stream", "stream_options", "return_progress"}
    assert set(body) == fields | {"temperature", "top_p"}  # no field unasked

    assert ask(page, "again") == "You said: again"
    assert [m["role"] for m in stage.bodies[1]["messages"]] == ["user", "assistant", "user"]


def test_a_stream_is_read_whatever_its_line_ends_and_cuts(page):
    said = "bytes \U0001f985 data: x\u2028y \\n {} 日本"
    assert ask(page, said).replace("\u2028", " ") == f"You said: {said}".replace("\u2028", " ")


def test_text_shows_while_it_comes_and_stop_ends_it(page, stage):
    start_slow(page, "slow one")
    expect(page.locator("#send")).to_be_hidden()
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
    page.click("#stop")
    expect(page.locator(".note")).to_contain_text("You stopped this answer.")
    text = page.locator(".answer > .prose").inner_text()
    assert "word3" in text
    assert "word400" not in text
    # What came within a moment, as in a browser that was held up, has no speed.
    expect(page.locator(".stats")).to_have_text(
        re.compile(r"^([\d.]+ tokens/s · )?first token [\d.]+ m?s · \d+ tokens$")
    )
    wait_for(lambda: stage.num_cancelled == 1)  # the server was told
    assert page.locator(".answer > .prose").inner_text() == text


def test_the_rate_is_that_of_tokens_behind_the_first_chunk(page):
    """Of chunks at given milliseconds: four tokens in 100 ms after two that came at once."""
    stats = page.evaluate("""async () => {
        const { AnswerBuilder, newAnswer } = await import("/ui/answer.js");
        const { statsLine } = await import("/ui/view.js");
        const answer = newAnswer(), builder = new AnswerBuilder(answer, 1000);
        const add = (content, completion_tokens, at) =>
            builder.add({ choices: [{ delta: { content } }], usage: { completion_tokens } }, at);
        add("", 0, 1100);
        add("a b", 2, 1250);
        const early = statsLine(answer.stats);
        add(" c", 3, 1299);
        add(" d e f", 6, 1350);
        return [early, statsLine(answer.stats)];
    }""")
    assert stats == [
        "first token 250 ms · 2 tokens",
        "40.0 tokens/s · first token 250 ms · 6 tokens",
    ]


def test_regenerating_keeps_the_earlier_version(page, stage):
    ask(page, "one")
    page.get_by_label("Regenerate").click()
    finish(page)
    expect(page.locator(".variants")).to_contain_text("2 / 2")
    assert stage.bodies[0]["messages"] == stage.bodies[1]["messages"]
    page.get_by_label("Previous version").click()
    expect(page.locator(".variants")).to_contain_text("1 / 2")
    expect(page.get_by_label("Previous version")).to_be_disabled()


def test_editing_a_question_replaces_what_followed_and_can_be_undone(page, stage):
    ask(page, "first")
    ask(page, "second")
    page.get_by_label("Edit and ask again").first.click()
    expect(page.locator("#prompt")).to_have_value("first")
    assert ask(page, "changed") == "You said: changed"
    expect(page.locator(".question-text")).to_have_text(["changed"])
    assert len(stage.bodies[-1]["messages"]) == 1
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".question-text")).to_have_text(["first", "second"])


def test_settings_reach_the_request(page, stage):
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    fields = {
        "temperature": ("0,5", 0.5),
        "top_p": ("0.9", 0.9),
        "top_k": ("40", 40),
        "min_p": ("0.05", 0.05),
        "max_tokens": ("64", 64),
        "seed": ("-7", -7),
        "presence_penalty": ("0.1", 0.1),
        "frequency_penalty": ("-0.2", -0.2),
        "repetition_penalty": ("1.1", 1.1),
    }
    for name, (text, _) in fields.items():
        page.fill(f"#sampling-{name}", text)
    ask(page, "hello")
    (body,) = stage.bodies
    assert {name: body[name] for name in fields} == {n: value for n, (_, value) in fields.items()}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    reload(page)
    page.click("#open-settings")
    expect(page.locator("#sampling-top_k")).to_have_value("40")
    expect(page.locator("#system")).to_have_value("Be brief.")
    page.click("#reset-sampling")
    ask(page, "again")
    sent = {name: value for name, value in stage.bodies[1].items() if name in fields}
    assert sent == {"temperature": 0.7, "top_p": 0.95}  # those of the command line


DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("defaults", "shown", "sent"),
    [
        (None, {"temperature": "0.7", "top_p": "0.95", "top_k": "default"}, (0.7, 0.95)),
        ({}, {"temperature": "0.7", "top_p": "0.95", "min_p": "default"}, (0.7, 0.95)),
        (DEFAULTS, {name: str(value) for name, value in DEFAULTS.items()}, (None, None)),
        ({"temperature": 0}, {"temperature": "0", "top_p": "0.95"}, (None, 0.95)),
        ({"temperature": "x<b>", "top_p": None}, {"temperature": "0.7"}, (0.7, 0.95)),
    ],
)
def test_defaults_are_the_servers_or_those_of_the_command_line(page, stage, defaults, shown, sent):
    """An empty field shows what holds, and is sent only where the server would take another."""
    if defaults is not None:
        stage.cards[0]["sampling_defaults"] = defaults
    reload(page)
    expect(page.locator("#model option")).to_have_count(1)
    page.click("#open-settings")
    for name, text in shown.items():
        expect(page.locator(f"#sampling-{name}")).to_have_attribute("placeholder", text)
    ask(page, "hello")
    (body,) = stage.bodies
    assert (body.get("temperature"), body.get("top_p")) == sent
    assert not {"top_k", "min_p", "repetition_penalty"} & set(body)
    page.fill("#sampling-temperature", "1.5")
    ask(page, "again")
    assert stage.bodies[1]["temperature"] == 1.5
    assert stage.bodies[1].get("top_p") == sent[1]


def test_another_model_has_defaults_of_its_own(page, stage):
    stage.cards[0]["sampling_defaults"] = {"temperature": 0.6, "top_p": 1}
    stage.cards.append({"id": "another"})
    reload(page)
    expect(page.locator("#model option")).to_have_count(2)
    page.click("#open-settings")
    expect(page.locator("#sampling-temperature")).to_have_attribute("placeholder", "0.6")
    page.select_option("#model", "another")
    expect(page.locator("#sampling-temperature")).to_have_attribute("placeholder", "0.7")
    ask(page, "hello")
    assert (stage.bodies[0]["model"], stage.bodies[0]["temperature"]) == ("another", 0.7)


def test_a_wrong_setting_is_said_and_not_sent(page, stage):
    page.click("#open-settings")
    page.fill("#sampling-temperature", "3")
    expect(page.locator("#sampling-temperature-note")).to_have_text("Use 0 to 2.")
    page.fill("#tools", "[{]")
    expect(page.locator("#tools-error")).to_have_text("This is not valid JSON.")
    send(page, "hello")
    expect(page.locator("#sampling-temperature")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value("hello")  # nothing the reader wrote is lost
    assert stage.bodies == []


def test_reasoning_folds_away_when_the_answer_begins(page):
    assert ask(page, "think about 2 + 2") == "It is 4."
    thoughts = page.locator(".reasoning")
    expect(thoughts.locator("summary")).to_have_text("Thoughts")
    expect(thoughts.locator(".prose")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator(".prose")).to_contain_text("Two and two make four.")


def test_tool_calls_are_cards_that_take_results(page, stage):
    page.click("#open-settings")
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    page.fill("#tools", json.dumps(tools))
    ask(page, "use the tool")
    card = page.locator(".tool")
    expect(card.locator(".tool-head")).to_have_text("Calls get_weather")
    assert json.loads(card.locator("pre").first.inner_text()) == {"city": "Linz", "days": 3}
    card.get_by_label("Result").fill("rain")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".answer > .prose").last).to_have_text("The function says rain.")
    first, second = stage.bodies
    assert first["tools"] == tools
    call, result = second["messages"][1:]
    assert call["content"] == "Let me look."
    assert call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"city": "Linz", "days": 3}
    assert result == {"role": "tool", "tool_call_id": "call_a", "content": "rain"}
    expect(page.get_by_role("button", name="Send results")).to_be_hidden()
    expect(card.locator("pre").last).to_have_text("rain")


def test_half_a_tool_call_is_not_sent_again(page, stage):
    ask(page, "half a tool, cut off")
    expect(page.locator(".tool pre").first).to_have_text('{"city": "Li')
    expect(page.get_by_role("button", name="Send results")).to_be_hidden()
    ask(page, "hello")
    messages = stage.bodies[-1]["messages"]
    assert messages[1] == {"role": "assistant", "content": "Let me look."}
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]


# --- conversations ---


def test_history_outlives_a_reload_and_a_cut_answer_says_so(page):
    ask(page, "think first")
    start_slow(page, "slow second")
    reload(page)
    expect(page.locator(".question-text")).to_have_text(["think first", "slow second"])
    expect(page.locator(".answer > .prose").last).to_contain_text("word3")
    expect(page.locator(".note").last).to_contain_text("The page was closed during this answer.")
    expect(page.locator(".history-title")).to_have_text("think first")


def test_conversations_are_renamed_deleted_and_restored(page):
    ask(page, "apples")
    page.get_by_role("button", name="New conversation").first.click()
    ask(page, "pears")
    expect(page.locator(".history-title")).to_have_text(["pears", "apples"])
    page.locator(".history-open", has_text="apples").hover()
    page.get_by_label("Rename apples").click()
    page.get_by_label("New title").fill("Fruit")
    page.keyboard.press("Enter")
    expect(page.locator(".history-title")).to_have_text(["pears", "Fruit"])
    page.locator(".history-open", has_text="Fruit").click()
    expect(page.locator("#title")).to_have_text("Fruit")
    expect(page.locator(".question-text")).to_have_text("apples")
    page.get_by_label("Delete Fruit").click()
    expect(page.locator(".history-title")).to_have_text(["pears"])
    expect(page.locator("#welcome")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".question-text")).to_have_text("apples")
    reload(page)
    expect(page.locator(".history-title")).to_have_count(2)
    assert sorted(page.locator(".history-title").all_inner_texts()) == ["Fruit", "pears"]


def test_an_answer_goes_on_while_another_conversation_is_shown(page, stage):
    start_slow(page, "slow apples")
    page.get_by_role("button", name="New conversation").first.click()
    assert ask(page, "pears") == "You said: pears"
    page.locator(".history-open", has_text="slow apples").click()
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
    expect(page.locator("#stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_contain_text("You stopped")


def stored(page: Page) -> dict[str, object]:
    script = "Object.fromEntries(Object.entries(localStorage).filter(([k]) => k.includes('on.')))"
    return {key: json.loads(text) for key, text in page.evaluate(script).items()}


def test_export_and_import_are_a_round_trip(page, tmp_path):
    ask(page, "think \U0001f985 and <b>")
    ask(page, "use the tool")
    before = stored(page)
    assert len(before) == 1
    with page.expect_download() as download:
        page.click("#export")
    path = tmp_path / "export.json"
    download.value.save_as(path)
    page.evaluate("localStorage.clear()")
    reload(page)
    expect(page.locator(".history-title")).to_have_count(0)
    page.set_input_files("#import-file", path)
    expect(page.locator("#toast")).to_have_text("1 conversation imported.")
    assert stored(page) == before
    page.set_input_files("#import-file", path)
    expect(page.locator("#toast")).to_have_text("0 conversations imported.")  # it is there already
    page.locator(".history-open").click()
    expect(page.locator(".question-text").first).to_have_text("think \U0001f985 and <b>")


def test_a_wrong_file_is_refused_in_words(page, tmp_path):
    header = '"format": "tiercel-conversations"'
    shapes = '[{"id": ["0123456789abcdef01234567"], "turns": []}, {"turns": 1}, null]'
    files = {
        "{": "is not a JSON file",
        "null": "holds no conversations",
        f'{{{header}, "version": 2, "conversations": []}}': "newer version",
        f'{{{header}, "version": 1, "conversations": {shapes}}}': "is damaged: 3 conversation(s)",
    }
    for i, (content, words) in enumerate(files.items()):
        path = tmp_path / f"{i}.json"
        path.write_text(content)
        page.set_input_files("#import-file", path)
        expect(page.locator("#toast")).to_contain_text(words)
    assert stored(page) == {}


def test_damaged_storage_does_not_stop_the_page(page):
    page.evaluate("""() => {
        const put = (id, text) => localStorage.setItem("tiercel.conversation." + id, text);
        put("0123456789abcdef01234567", "{");
        put("1123456789abcdef01234567", '{"id": "other", "turns": []}');
        put("__proto__", "[]");
        localStorage.setItem("tiercel.settings", '"x"');
        localStorage.setItem("tiercel.current", "1123456789abcdef01234567");
        localStorage.setItem("tiercel.theme", "sepia");
    }""")
    reload(page)
    assert ask(page, "still here") == "You said: still here"


def test_another_tab_sees_what_this_one_does(page, stage):
    other = page.context.new_page()
    other.goto(stage.base)
    await_ready(other)
    ask(page, "apples")
    expect(other.locator(".history-title")).to_have_text("apples")
    page.bring_to_front()
    page.locator(".history-open").hover()
    page.get_by_label("Delete apples").click()
    expect(other.locator(".history-title")).to_have_count(0)
    other.close()


# --- what an answer can do ---


def test_a_hostile_answer_does_nothing(page, watch):
    text = ask(page, "hostile answer")
    assert '<img src=x onerror="window.hacked = 1">' in text
    assert "<script>window.hacked = 2</script>" in text
    answer = page.locator(".answer > .prose")
    assert answer.locator("script, img, iframe, svg:not(.icon), [onclick], [style]").count() == 0
    schemes = answer.locator("a").evaluate_all("links => links.map(link => link.protocol)")
    assert set(schemes) <= {"http:", "https:"}
    answer.locator("span", has_text="click").first.click()  # what looked like a link is none
    reload(page)
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None
    watch.check()


def test_hostile_titles_and_errors_are_text(page, stage, watch):
    watch.may_fail = True
    send(page, "refuse <img src=x onerror=window.hacked=1>")
    expect(page.locator(".note.failure")).to_contain_text("Too long <b>.")
    expect(page.locator(".history-title")).to_have_text(
        "refuse <img src=x onerror=window.hacked=1>"
    )
    assert page.evaluate("window.hacked") is None


# --- when the server says no ---


def test_a_key_is_asked_for_and_kept_for_the_tab(page, stage, watch):
    watch.may_fail = True
    stage.key = "secret-1"
    page.reload()
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_contain_text("This server asks for an API key.")
    dialog.get_by_label("Key").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The server does not accept this key.")
    dialog.get_by_label("Key").fill("ключ")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("A key has no spaces or special letters.")
    dialog.get_by_label("Key").fill("secret-1")
    page.keyboard.press("Enter")
    expect(page.locator("#server-state")).to_have_attribute("data-status", "ready")
    assert ask(page, "hello") == "You said: hello"
    reload(page)
    assert ask(page, "again") == "You said: again"
    assert "secret-1" not in json.dumps(page.evaluate("({...localStorage})"))


def test_a_key_that_is_asked_for_later_does_not_lose_the_message(page, stage, watch):
    watch.may_fail = True
    expect(page.locator("#server-state")).to_have_attribute("data-status", "ready")
    stage.key = "secret-2"
    send(page, "hello")
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_role("button", name="Cancel").click()
    expect(page.locator(".note.failure")).to_contain_text("The server wants a valid API key")
    page.get_by_role("button", name="Try again").click()
    dialog.get_by_label("Key").fill("secret-2")
    dialog.get_by_role("button", name="Continue").click()
    expect(page.locator(".answer > .prose")).to_have_text("You said: hello")


@pytest.mark.parametrize(
    ("message", "words", "kept"),
    [
        ("busy", "too many requests are waiting. Try again in 7 s.", ""),
        ("restart", "The server cannot answer yet: The engine restarts.", ""),
        ("refuse", "Too long", ""),
        ("drop it", "The connection was lost before the answer was complete.", "You said: drop"),
        ("short of it", "The connection was lost", "You said: shor"),
        ("break it", "The engine was restarted.", "You said: brea"),
        ("cut off", "the limit of tokens", "You said: cut off"),
    ],
)
def test_failures_are_said_and_nothing_is_lost(page, stage, watch, message, words, kept):
    watch.may_fail = True
    send(page, message)
    if "drop" in message:  # a browser forgets what its page has not read yet
        expect(page.locator(".answer > .prose")).to_have_text(kept)
        stage.may_drop = True
    expect(page.locator(".note")).to_contain_text(words)
    expect(page.locator(".answer > .prose")).to_have_text(kept)
    assert ask(page, "hello") == "You said: hello"
    roles = [m["role"] for m in stage.bodies[-1]["messages"]]
    assert roles == (["user", "assistant", "user"] if kept else ["user"])  # roles alternate


def test_a_loading_server_shows_progress_and_the_message_waits(page, stage, watch):
    watch.may_fail = True
    stage.status, stage.progress = "loading", 0.42
    page.reload()
    expect(page.locator("#server-banner")).to_contain_text("The model is loading… 42 %")
    assert page.locator("#server-progress").evaluate("bar => bar.value") == 0.42
    send(page, "hello")
    expect(page.locator(".waiting")).to_contain_text("Waiting for the model to start…")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_contain_text("You stopped")
    page.get_by_label("Regenerate").click()
    expect(page.locator(".waiting")).to_be_visible()
    assert stage.bodies == []
    stage.status = "ready"
    expect(page.locator(".answer > .prose")).to_have_text("You said: hello")
    expect(page.locator("#server-banner")).to_be_hidden()


def test_a_dead_server_is_said_and_its_return_noticed(page, watch):
    watch.may_fail = True
    stage = Stage()
    with running_server(stage):
        watch.origins += (stage.base,)
        page.goto(stage.base)
        await_ready(page)
        ask(page, "hello")
    send(page, "are you there")
    expect(page.locator(".note.failure")).to_contain_text("The server does not answer.")
    expect(page.locator("#server-banner")).to_contain_text("Trying again")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    port = int(stage.base.rpartition(":")[2])
    with running_server(stage, port):
        expect(page.locator("#server-banner")).to_be_hidden()
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".answer > .prose").last).to_have_text("You said: are you there")
        page.goto("about:blank")
