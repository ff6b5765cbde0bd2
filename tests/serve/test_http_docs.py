"""The examples of docs/http_api.md work, and its tables name the fields that there are."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tiercel.serve.api.anthropic.messages_types import MessagesRequest
from tiercel.serve.api.openai.chat import ChatRequest
from tiercel.serve.api.openai.completions import CompletionRequest
from tiercel.serve.api.openai.embeddings import EmbeddingRequest
from tiercel.serve.api.openai.responses_types import ResponsesRequest
from tiercel.serve.api.scoring.decision_types import DecisionsRequest
from tiercel.serve.api.scoring.rerank import RerankRequest
from tiercel.serve.api.scoring.score import ScoreRequest

PAGE = (Path(__file__).parents[2] / "docs/http_api.md").read_text()
EXAMPLES = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
TYPES = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, EmbeddingRequest)
TYPES += (ScoreRequest, RerankRequest, DecisionsRequest)
UNMENTIONED = {
    # taken because other clients send them; neither change an answer nor are worth a line
    "prompt_cache_retention", "inference_geo", "speed", "cache_control",
    # known elsewhere and refused unless neutral
    "prefill",
    # said once for all routes
    "model", "stream",
}  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.split()[2].split("/", 3)[-1])
def test_an_example_works(example, server):
    command = shlex.split(example.replace("http://127.0.0.1:8000", server.url))
    command[-1] = command[-1].replace('"smollm2"', '"tiny"')
    shown = subprocess.run(
        [*command, "-w", "\n%{http_code}"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    body, _, status = shown.rpartition("\n")
    assert status == "200", body
    if not body.startswith("data: "):
        assert json.loads(body)


@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.__name__)
def test_every_field_is_in_the_page(type_):
    words = set(re.findall(r"[a-z_0-9]+", PAGE)) | set(re.findall(r"[a-z_]+\.[a-z_]+", PAGE))
    missing = set(type_.__struct_encode_fields__) - words - UNMENTIONED
    assert not missing
