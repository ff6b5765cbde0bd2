"""Further real models, given by the folder in TIERCEL_TEST_MODELS; deselected by default."""

import os
from pathlib import Path

import pytest

from tests import parity
from tiercel.llm import LLM

pytestmark = pytest.mark.models
NAMES = [name for name in parity.CASES if not name.startswith("smollm2")]


@pytest.fixture(params=NAMES)
def real_model(request):
    case = parity.CASES[request.param]
    path = Path(os.environ.get("TIERCEL_TEST_MODELS", ".")) / case["file"]
    if not path.is_file():
        pytest.skip(f"{case['file']} is not in TIERCEL_TEST_MODELS")
    return path, case


@pytest.mark.parametrize(
    ("dtype", "profile"),
    [("float32", parity.FP32), ("auto", parity.BITS16)],
    ids=["fp32", "default"],
)
def test_parity(real_model, dtype, profile):
    path, case = real_model
    with LLM(path, dtype=dtype) as llm:
        parity.check(parity.measure(llm, case), profile)
