"""Calls a server through litellm and prints what came as one JSON object. Argument: its URL."""

import asyncio
import json
import sys

import litellm

URL = sys.argv[1]
USER = [{"role": "user", "content": "Why is the sky blue?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}},
          "required": ["age"], "additionalProperties": False}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA, "strict": True}}


def chat(**fields):
    return litellm.completion(
        **{
            "model": "openai/tiny",
            "api_base": f"{URL}/v1",
            "api_key": "none",
            "messages": USER,
            "max_tokens": 12,
            "temperature": 0,
            "num_retries": 0,
            **fields,
        }
    )


async def cancel():
    """Begin a long answer and leave."""
    task = asyncio.ensure_future(
        litellm.acompletion(
            model="openai/tiny",
            api_base=f"{URL}/v1",
            api_key="none",
            messages=USER,
            max_tokens=4000,
            ignore_eos=True,
        )
    )
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def main():
    whole = chat()
    found = {"text": whole.choices[0].message.content, "num_tokens": whole.usage.completion_tokens}
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    found["pieces"] = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    found["answers"] = [
        choice.message.content for choice in chat(n=2, seed=3, temperature=1.5).choices
    ]
    stop = found["text"][8:12]
    found["stopped"] = [stop, chat(stop=[stop]).choices[0].message.content]
    logprobs = chat(logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs
    found["logprobs"] = [[e.token, e.logprob, len(e.top_logprobs)] for e in logprobs.content]
    tool = chat(tools=[TOOL], tool_choice="required", max_tokens=80, parallel_tool_calls=False)
    (call,) = tool.choices[0].message.tool_calls
    found["call"] = [tool.choices[0].finish_reason, call.function.name, call.function.arguments]
    form = chat(response_format=FORM, max_tokens=40).choices[0]
    found["form"] = [form.finish_reason, form.message.content]
    raw = litellm.text_completion(
        model="text-completion-openai/tiny", api_base=f"{URL}/v1", api_key="none",
        prompt="The capital of France is", max_tokens=4, temperature=0,
    )  # fmt: skip
    found["raw"] = raw.choices[0].text
    message = litellm.completion(
        model="anthropic/tiny", api_base=URL, api_key="none", messages=USER, max_tokens=12,
        temperature=0,
    )  # fmt: skip
    found["anthropic"] = message.choices[0].message.content
    try:
        chat(temperature=3)
    except litellm.BadRequestError as error:
        found["error"] = str(error)
    asyncio.run(cancel())
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
