"""Routes around state, model and tokenizer; wrong methods and paths; what each answers before."""

import asyncio
import threading

import pytest

import tiercel
from tests.patience import PATIENCE_S
from tests.serve.fake_client import (
    CHAT_TEMPLATE,
    NAME,
    FakeClient,
    ask,
    fake_app,
    fake_info,
    fake_tokenizer,
    running,
)
from tests.serve.harness import read_all
from tests.serve.thread_server import thread_server
from tiercel.ipc.supervisor import EngineState
from tiercel.params import SamplingDefaults
from tiercel.serve import app as app_module
from tiercel.serve.api import tokenize_routes
from tiercel.serve.http.openapi import DOCS as OPENAPI_DOCS
from tiercel.serve.http.static_files import read_files
from tiercel.serve.lifecycle.engine_monitor import default_names
from tiercel.text.chat_template import ChatTemplate, encode_chat

MESSAGES = [{"role": "user", "content": "the end"}]


def get(path, **options):
    (response,) = ask(("GET", path), **options)
    return response


def post(path, body, **options):
    (response,) = ask(("POST", path, {"json": body}), **options)
    return response


def encode_like_chat(messages=MESSAGES, **options):
    template = ChatTemplate.from_tokenizer(fake_tokenizer(), source=CHAT_TEMPLATE)
    try:
        return encode_chat(fake_tokenizer(), template, messages, **options)
    finally:
        template.close()


def test_health_ready_and_version():
    health, ready, version = ask(("GET", "/health"), ("GET", "/ready"), ("GET", "/version"))
    assert health.json() == {"status": "ok"}
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
    assert version.json() == {"version": tiercel.__version__}


STATES = [
    (EngineState.LOADING, False, 200, "loading", 0.225),  # the rest is for the rehearsal
    (EngineState.RESTARTING, True, 200, "restarting", 0.25),
    (EngineState.DRAINING, True, 200, "draining", 0.25),
    (EngineState.DEAD, True, 503, "dead", 0.25),
]


@pytest.mark.parametrize(("state", "was_ready", "health_status", "word", "progress"), STATES)
def test_probes_follow_the_engine(state, was_ready, health_status, word, progress):
    async def probe():
        client = FakeClient(state=EngineState.READY if was_ready else state, progress=0.25)
        async with running(fake_app(client), is_ready=was_ready) as http:
            client.state = state
            return [await http.get(path) for path in ("/health", "/ready", "/v1/models")]

    health, ready, models = asyncio.run(probe())
    assert health.status_code == health_status
    if health_status == 503:
        assert health.json()["error"]["code"] == "engine_dead"
    assert ready.status_code == 503
    reason = {"reason": str(FakeClient().final_error)} if word == "dead" else {}
    assert ready.json() == {"status": word, "progress": progress, **reason}
    assert 1 <= int(ready.headers["retry-after"]) <= 60
    assert models.status_code == (200 if was_ready else 503)
    if not was_ready:
        assert models.json()["error"]["code"] == "engine_loading"
        assert models.json()["error"]["type"] == "overloaded_error"
        assert int(models.headers["retry-after"]) >= 1


def test_a_server_that_ends_because_its_engine_is_dead_says_so():
    """Not that it is draining: kept connections are answered until the process is gone."""

    async def probe():
        client = FakeClient()
        async with running(fake_app(client)) as http:
            client.state = EngineState.DEAD
            http._transport.app.state.server.is_draining = True
            body = {"model": NAME, "prompt": "a"}
            return await http.get("/ready"), await http.post("/v1/completions", json=body)

    ready, refused = asyncio.run(probe())
    assert ready.json()["status"] == "dead"
    assert "m.gguf changed since the start" in ready.json()["reason"]
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "engine_dead")
    assert "m.gguf changed since the start" in error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers


def test_health_waits_for_nothing(monkeypatch):
    """It takes no turn of another thread, and answers while all that read templates are busy."""

    async def probe():
        busy = threading.Event()
        async with running(fake_app()) as http:
            state = http._transport.app.state.server
            waiting = [
                asyncio.ensure_future(state.run_in_thread(busy.wait, PATIENCE_S)) for _ in range(20)
            ]
            await asyncio.sleep(0)  # they have begun
            with monkeypatch.context() as patch:
                patch.setattr(type(state), "run_in_thread", None)
                assert (await http.get("/health")).status_code == 200
            assert not any(one.done() for one in waiting)
            busy.set()
            await asyncio.gather(*waiting)

    asyncio.run(probe())


def test_models():
    names = ("tiny", "gpt-4")
    first, again, one, other = ask(
        ("GET", "/v1/models"), ("GET", "/v1/models"), ("GET", "/v1/models/gpt-4"),
        ("GET", "/models"), served_names=names,
    )  # fmt: skip
    assert first.json() == again.json() == other.json()
    assert first.json()["object"] == "list"
    assert [card["id"] for card in first.json()["data"]] == list(names)
    card = one.json()
    assert card == first.json()["data"][1]
    assert card.keys() == {
        "id", "object", "created", "owned_by", "root", "parent", "max_model_len",
    }  # fmt: skip
    assert (card["object"], card["max_model_len"], card["root"]) == ("model", 256, "tiny")


def test_a_card_tells_the_sampling_defaults_that_are_set():
    ours, others = SamplingDefaults(temperature=0.5), SamplingDefaults(0.6, top_k=20, max_tokens=9)
    client = FakeClient(info=fake_info(sampling_defaults=others))
    paths = [("GET", path) for path in ("/v1/models", "/v1/models/tiny")]
    listed, one = ask(*paths, client=client, sampling=ours)
    assert one.json() == listed.json()["data"][0]
    assert one.json()["sampling_defaults"] == {"temperature": 0.5, "top_k": 20}
    (off,) = ask(paths[1], client=FakeClient(info=client.info), has_model_defaults=False)
    assert "sampling_defaults" not in off.json()


def test_the_model_is_named_after_its_file_by_default():
    listed = get("/v1/models", served_names=()).json()["data"]
    assert [entry["id"] for entry in listed] == ["llama-tiny", "llama-tiny.gguf"]


def test_a_model_of_the_catalogue_goes_by_its_short_name_too():
    names = default_names("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert names == (
        "smollm2", "SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf",
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["other", "../../etc/passwd", "/etc/passwd", "https://example.org/x", "%2e%2e", "x" * 5000,
     "TINY", "tiny%00"],
)  # fmt: skip
def test_another_model_is_404(name):
    response = get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] in ("model_not_found", "not_found")
    assert len(response.json()["error"]["message"]) < 300


@pytest.mark.parametrize("name", ["other", "../../etc/passwd", "tiny\0", "x" * 1_000_000, ""])
def test_a_wrong_model_field_is_404(name):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        response = post(path, {**body, "model": name})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert len(response.json()["error"]["message"]) < 300


def test_props():
    props = get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["total_slots"] == 8
    assert props["model_alias"] == NAME
    assert props["chat_template"] == CHAT_TEMPLATE
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["build_info"] == f"tiercel {tiercel.__version__}"
    assert (props["bos_token"], props["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert "model_path" not in props


def test_tokenizer_info():
    info, alias = ask(("GET", "/tokenizer_info"), ("GET", "/v1/tokenizer_info"))
    assert info.json() == alias.json()
    assert info.json()["eos_token"] == "<|im_end|>"
    assert info.json()["bos_token"] == "<|endoftext|>"
    assert info.json()["pad_token"] is None
    assert info.json()["vocab_size"] == fake_tokenizer().vocab_size
    assert info.json()["chat_template"] == CHAT_TEMPLATE
    assert info.json()["tokenizer_class"]


@pytest.mark.parametrize("text", ["", "the thin man", "é😀 日本", "<|im_end|>", "\x00\r\n"])
@pytest.mark.parametrize("add_special", [None, True, False])
def test_tokenize_prompt(text, add_special):
    body = {"prompt": text} | ({} if add_special is None else {"add_special_tokens": add_special})
    answer, alias = ask(*[("POST", p, {"json": body}) for p in ("/tokenize", "/v1/tokenize")])
    expected = fake_tokenizer().encode(
        text, parse_special=True, add_special_tokens=add_special is not False
    )
    assert answer.json() == alias.json()
    assert answer.json() == {"tokens": expected, "count": len(expected), "max_model_len": 256}
    back = post("/detokenize", {"tokens": answer.json()["tokens"]})
    assert back.json()["prompt"].removeprefix("<|endoftext|>") == text


def test_special_text_in_prompts_can_be_switched_off():
    eos = fake_tokenizer().eos_id
    body = {"prompt": "<|im_end|>", "add_special_tokens": False}
    assert post("/tokenize", body).json()["tokens"] == [eos]
    assert eos not in post("/tokenize", body, parse_special=False).json()["tokens"]


def test_token_strs():
    answer = post("/tokenize", {"prompt": "the <|im_end|>", "return_token_strs": True}).json()
    tokenizer = fake_tokenizer()
    assert answer["token_strs"] == [tokenizer.token_text(i) for i in answer["tokens"]]
    assert "token_strs" not in post("/tokenize", {"prompt": "the"}).json()


def test_many_tokens_are_named_off_the_loop(monkeypatch):
    threads = set()
    original = tokenize_routes.token_name

    def watched(*arguments):
        threads.add(threading.current_thread().name)
        return original(*arguments)

    monkeypatch.setattr(tokenize_routes, "MAX_LOOP_IDS", 2)
    monkeypatch.setattr(tokenize_routes, "token_name", watched)
    body = {"prompt": "xyz", "add_special_tokens": False, "return_token_strs": True}
    assert post("/tokenize", body).json()["token_strs"] == ["x", "y", "z"]
    assert all(name.startswith("tiercel-serve") for name in threads)


def test_tokenize_messages_gives_the_prompt_of_a_chat():
    tokens = post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert tokens == encode_like_chat()
    assert tokens.count(fake_tokenizer().bos_id) == 1  # the template wrote it, once is enough
    open_end = {"messages": MESSAGES, "add_generation_prompt": False}
    assert post("/tokenize", open_end).json()["tokens"] == encode_like_chat(
        add_generation_prompt=False
    )
    continued = [*MESSAGES, {"role": "assistant", "content": "in 20"}]
    body = {"messages": continued, "continue_final_message": True}
    assert fake_tokenizer().decode(post("/tokenize", body).json()["tokens"]).endswith(" in 20")


def test_control_text_of_users_stays_text():
    messages = [{"role": "user", "content": "<|im_end|>{{ 7 * 7 }}"}]
    tokens = post("/tokenize", {"messages": messages}).json()["tokens"]
    assert fake_tokenizer().eos_id not in tokens
    assert "{{ 7 * 7 }}" in fake_tokenizer().decode(tokens)


def test_tools_stand_in_the_prompt_as_in_a_chat():
    """This template takes no tools, so text tells the model of them, wherever one asks."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {"messages": MESSAGES, "tools": [tool]}
    client = FakeClient(info=fake_info(max_model_len=512))
    asked = {"json": {"model": NAME, **body}}
    paths = ("/v1/chat/completions", "/tokenize", "/apply-template")
    chat, tokens, text = ask(*[("POST", path, asked) for path in paths], client=client)
    assert chat.status_code == 200
    ids = client.submitted[0].prompt_token_ids
    assert '"name": "look"' in fake_tokenizer().decode(ids)
    assert tokens.json()["tokens"] == ids
    assert text.json()["prompt"] == fake_tokenizer().decode(ids, skip_special_tokens=False)


def test_apply_template():
    prompt = post("/apply-template", {"messages": MESSAGES}).json()["prompt"]
    assert prompt == "<|endoftext|>[user] the end\n[assistant] "


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES * 2100}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}},
         "chat_template_kwargs"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
         "messages[0].content[0]"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 10**9]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": 1}, "tokens"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(path, body, param):
    response = post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].removeprefix("body.").startswith(param)


@pytest.mark.reliability
def test_sizes_are_refused_before_they_cost(monkeypatch):
    long_text, worked_on = "x" * (256 * 64 + 1), []
    for name in ("encode", "decode"):
        work = getattr(type(fake_tokenizer()), name)

        def watched(self, given, *args, work=work, **kwargs):
            worked_on.append(len(given))
            return work(self, given, *args, **kwargs)

        monkeypatch.setattr(type(fake_tokenizer()), name, watched)
    too_long, many = ask(
        ("POST", "/tokenize", {"json": {"prompt": long_text}}),
        ("POST", "/detokenize", {"json": {"tokens": [1] * 200_001}}),
    )
    assert max(worked_on) < 1000
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert "16385" in too_long.json()["error"]["message"]
    assert "256" in too_long.json()["error"]["message"]
    assert many.status_code == 400


def test_long_text_is_encoded_off_the_loop(monkeypatch):
    threads = []
    encode = type(fake_tokenizer()).encode

    def watched(self, text, **kwargs):
        if text.startswith("aaa"):
            threads.append(threading.current_thread() is threading.main_thread())
        return encode(self, text, **kwargs)

    monkeypatch.setattr(type(fake_tokenizer()), "encode", watched)
    ask(
        ("POST", "/tokenize", {"json": {"prompt": "a" * 4096}}),
        ("POST", "/tokenize", {"json": {"prompt": "a" * 4097}}),
    )
    assert threads == [True, False]


HOSTILE_TEMPLATES = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9**(9**9) }}",
    "string": "{{ 'x' * 10**10 }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
}


@pytest.mark.reliability
def test_hostile_templates_cost_their_own_request():
    """Two at a time are killed; a third waits its turn, and others are not held up."""

    async def probe():
        app = fake_app(trusts_templates=True, has_own_workers=True)
        async with running(app) as http:
            bodies = [
                {"messages": MESSAGES, "chat_template": HOSTILE_TEMPLATES[name]}
                for name in ("loops", "power", "loops")
            ]
            hostile = [asyncio.ensure_future(http.post("/tokenize", json=b)) for b in bodies]
            await asyncio.sleep(0.3)
            assert (await http.get("/health")).status_code == 200
            assert (await http.post("/tokenize", json={"prompt": "a"})).status_code == 200
            # Those take 2 s until they are killed.
            is_early = not any(task.done() for task in hostile)
            answers = await asyncio.gather(*hostile)
            good = await http.post("/tokenize", json={"messages": MESSAGES})
            metrics = (await http.get("/metrics")).text
            return answers, good, is_early, metrics

    answers, good, is_early, metrics = asyncio.run(probe())
    assert is_early
    for answer in answers:
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "chat_template_error"
    assert good.json()["tokens"] == encode_like_chat()
    assert 'tiercel:template_kills_total{engine="0",model_name="tiny"} 3.0' in metrics


def test_templates_that_write_too_much_are_cut():
    for name in ("string", "output"):
        body = {"messages": MESSAGES, "chat_template": HOSTILE_TEMPLATES[name]}
        response = post("/apply-template", body, trusts_templates=True)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "chat_template_error"


def test_a_template_that_raises_says_why():
    body = {"messages": MESSAGES, "chat_template": "{{ raise_exception('no user') }}"}
    response = post("/apply-template", body, trusts_templates=True)
    assert response.status_code == 400
    assert "no user" in response.json()["error"]["message"]


def test_a_model_without_a_template_takes_no_messages():
    client = FakeClient(info=fake_info(chat_template=None))
    for path in ("/tokenize", "/apply-template"):
        response = post(path, {"messages": MESSAGES}, client=client)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "chat_template_error"


@pytest.mark.parametrize("name", ["audio/speech", "images/generations", "files", "files/x/content",
                                  "batches", "fine_tuning/jobs"])  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_what_is_not_served_says_so(name, method):
    (response,) = ask((method, f"/v1/{name}"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_supported"


def documented():
    docs = [doc for module in app_module._MODULES for doc in module.DOCS]
    return {
        (path, doc.method) for doc in [*docs, *OPENAPI_DOCS] for path in (doc.path, *doc.aliases)
    }


def test_every_route_is_documented():
    routes = {
        (route.path.replace(":path", ""), "post" if "POST" in route.methods else "get")
        for route in fake_app().routes
        if route.methods
    }
    routes -= {("/", "get"), ("/favicon.ico", "get"), ("/ui/{name}", "get")}
    assert routes == documented()
    paths = get("/openapi.json").json()["paths"]
    assert {(path, method) for path, methods in paths.items() for method in methods} == routes


def test_another_method_is_405_with_allow():
    routes = [(path.replace("{id}", NAME), method) for path, method in sorted(documented())]
    others = [("POST" if method == "get" else "GET", path) for path, method in routes]
    responses = ask(*others, *[("OPTIONS", path) for path, _ in routes])
    for response, (path, method) in zip(responses, routes * 2, strict=True):
        assert response.status_code == 405, path
        assert response.headers["allow"] == ("GET, HEAD" if method == "get" else "POST")
        assert "json" in response.headers["content-type"]


def test_unknown_paths_are_404_json():
    paths = ["/nowhere", "/v1", "/v1/", "/health/", "/v2/models", "/%00", "/v1/modelsx"]
    for response in ask(*[("GET", path) for path in paths]):
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_head_has_no_body():
    (response,) = ask(("HEAD", "/version"))
    assert response.status_code == 200
    with thread_server() as server, server.connect() as sock:
        sock.sendall(b"HEAD /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = read_all(sock)
    assert answer.endswith(b"\r\n\r\n")
    assert b"content-length: " in answer


def test_the_page_is_in_the_package():
    files = read_files()
    assert {"index.html", "app.js", "katex-0.19.1/katex.min.js"} <= files.keys()
    own = [file for name, file in files.items() if "/" not in name]
    assert sum(len(file.content) for file in own) < 160 * 1024
