"""instructor, which needs an older client of OpenAI's: forms by schema and by tools."""

import json

import pytest

from tests.clients.conftest import HERE

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def found(run_client, server):
    return json.loads(run_client(HERE / "use_instructor.py", server.url).splitlines()[-1])


@pytest.mark.parametrize("way", ["JSON_SCHEMA", "TOOLS", "RESPONSES_TOOLS", "task"])
def test_a_form_comes_by_each_way(found, way):
    person = found[way]
    assert person["kind"] in ("child", "adult")
    assert isinstance(person["age"], int)


def test_a_form_grows_as_it_streams(found):
    num_parts, last = found["streamed"]
    assert num_parts > 2
    assert last == found["JSON_SCHEMA"]
