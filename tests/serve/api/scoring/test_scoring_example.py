"""The worked example of docs/scoring.md over HTTP, and the files that it shows."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import httpx
import numpy as np

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "scoring.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def block(kind):
    (text,) = (text for own, text in BLOCKS if own == kind)
    return text


def test_the_example_gives_what_the_page_shows(default_server):
    """Up to the last bits of sums, which differ between processors."""
    name = httpx.get(f"{default_server.url}/v1/models").json()["data"][0]["id"]
    text = block("bash").replace("http://127.0.0.1:8000", default_server.url)
    command = shlex.split(text.replace('"smollm2"', json.dumps(name)))
    told = subprocess.run(command, capture_output=True, timeout=100, check=True).stdout
    answer, shown = json.loads(told), json.loads(block("json"))
    assert set(answer) == set(shown)
    assert np.allclose(answer["scores"], shown["scores"], atol=0.05)
    order = np.argsort([-row[0] for row in answer["scores"]]).tolist()
    assert order[:3] == np.argsort([-row[0] for row in shown["scores"]]).tolist()[:3]
    assert answer["usage"]["prompt_tokens"] == shown["usage"]["prompt_tokens"]


def test_pictures_exist():
    for name in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", PAGE):
        assert (DOCS / name).read_bytes()
