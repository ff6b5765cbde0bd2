"""Calls a server through instructor and prints what came as one JSON object. Argument: its URL."""

import asyncio
import json
import sys
from typing import Annotated, Literal

import instructor
import openai
from pydantic import BaseModel, Field

URL = sys.argv[1]
MODES = ("JSON_SCHEMA", "TOOLS", "RESPONSES_TOOLS")


class Person(BaseModel, extra="forbid"):
    """A form for an answer; nothing else may stand in it, or a small model goes on and on."""

    kind: Literal["child", "adult"]
    age: Annotated[int, Field(ge=0, le=99)]


FIELDS = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Describe a child."}],
    "response_model": Person,
    "max_retries": 0,
    "temperature": 0,
}


def asked(mode):
    """The form, by one way of asking for it."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    made = instructor.from_openai(client, mode=instructor.Mode[mode])
    bound = "max_output_tokens" if "RESPONSES" in mode else "max_tokens"
    return made.create(**FIELDS, **{bound: 120}).model_dump()


def streamed():
    """The kinds that a partial answer had as it grew, and the last one."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    parts = [part.model_dump() for part in made.create_partial(**FIELDS, max_tokens=120)]
    return len(parts), parts[-1]


async def of_task():
    """The form, through the asynchronous client."""
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    return (await made.create(**FIELDS, max_tokens=120)).model_dump()


found = {mode: asked(mode) for mode in MODES}
found["streamed"] = streamed()
found["task"] = asyncio.run(of_task())
sys.stdout.write(json.dumps(found) + "\n")
