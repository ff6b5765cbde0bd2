"""`/v1/embeddings`: one vector per text, pooled from hidden states as the model's file says.

A request to a model without a pooling type is refused: the mean of a chat model's hidden states is
a vector, but not a useful embedding.
"""

from __future__ import annotations

import base64
import math
import struct
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tiercel.params import LIMITS, SamplingParams
from tiercel.serve.api.model_routes import model_routes
from tiercel.serve.api.split_prompts import Prompt, check_token_ids, split_prompts
from tiercel.serve.generation.admission import check_counts
from tiercel.serve.generation.generation import Generation, GenerationRequest
from tiercel.serve.generation.prompts import encode_text
from tiercel.serve.http.errors import JSON_TYPE, client_error, unsupported_parameter
from tiercel.serve.http.logs import request_log
from tiercel.serve.http.route_docs import RouteDoc
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState, sender_of


class EmbeddingRequest(Struct, kw_only=True):
    """The body of a request."""

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=LIMITS.max_tokens)] | None = None
    user: object = UNSET


class Embedding(Struct, frozen=True):
    """One vector: numbers, or little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Struct, frozen=True):
    """The vectors, in the order of the texts."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


DOCS: Final = (
    RouteDoc(
        "/v1/embeddings",
        "Vectors of texts.",
        EmbeddingRequest,
        EmbeddingAnswer,
        "post",
        errors=(404, 429, 503),
    ),
)


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""
    return model_routes(state, ("/v1/embeddings",), EmbeddingRequest, _answer)


async def _answer(
    state: ServerState, model: ServedModel, request: Request, body: EmbeddingRequest
) -> Response:
    model.check_name(body.model)
    if model.info.pooling is None:
        raise client_error(
            400,
            "unsupported_model",
            f"{model.name} is no embedding model.",
            hint="Serve one whose file says how to pool.",
            param="model",
        )
    if body.dimensions not in (None, model.info.hidden_size):
        raise unsupported_parameter(
            "dimensions", f"must be {model.info.hidden_size} for this model"
        )
    texts = split_prompts(body.input, "input")
    check_counts(len(texts), 1, state.settings.limits, "input")
    prompts = [await _input_ids(state, model, text) for text in texts]
    wanted = GenerationRequest(
        tuple(prompts),
        SamplingParams(),
        max_tokens=0,
        pooling=model.info.pooling,
        param="input",
        sender=sender_of(request),
    )
    generation = Generation(state, model, wanted, is_stream=False)
    generation.start()
    try:
        await generation.wait_finished()
        num_tokens = generation.usage().prompt
    finally:
        generation.report(request_log(request))
    data = []
    for index, completion in enumerate(generation.completions):
        vector = completion.request.embedding
        assert vector is not None, "a request with pooling ends with its vector"
        data.append(Embedding(index, shown(vector, body.encoding_format)))
    result = EmbeddingAnswer(data, model.name, EmbeddingUsage(num_tokens, num_tokens))
    return Response(msgspec.json.encode(result), media_type=JSON_TYPE)


async def _input_ids(state: ServerState, model: ServedModel, text: str | list[int]) -> list[int]:
    if isinstance(text, str):
        special = state.settings.parse_special
        return await encode_text(state, model, text, parse_special=special, add_special=True)
    check_token_ids(model, text, "input")
    return text


def shown(vector: npt.NDArray[np.float32], encoding: str | None) -> list[float] | str:
    """A vector, normalised to length 1, in the requested encoding.

    Args:
        vector: (hidden_size,), of any norm.
        encoding: ``base64``, else a list.
    """
    numbers: list[float] = vector.tolist()
    length = math.hypot(*numbers) or 1.0
    unit = [number / length for number in numbers]
    if encoding != "base64":
        return unit
    return base64.b64encode(struct.pack(f"<{len(unit)}f", *unit)).decode()
