"""Tool calls as models write them, one writer per format: the other side of the parsers."""

import json
from dataclasses import dataclass

BAR = "\uff5c"
DSML = f"{BAR}DSML{BAR}"


@dataclass
class Tool:
    """A function as the server knows it."""

    name: str
    parameters: dict | None = None
    description: str | None = None
    strict: bool | None = None


LOOK_UP = Tool(
    "look_up",
    {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "limit": {"type": "integer"},
            "kind": {"type": "string", "enum": ["noun", "verb"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "deep": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"$ref": "#/$defs/maybe"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
        "required": ["word", "kind"],
        "$defs": {"maybe": {"type": ["boolean", "null"]}},
    },
    "Looks a word up.",
)
NOW = Tool("now")
MIXED = Tool(
    "mixed",
    {
        "type": "object",
        "properties": {"x": {"type": ["string", "integer"]}, "y": {"const": 3}},
        "required": ["x"],
    },
)
TOOLS = (LOOK_UP, NOW, MIXED)


def dump(value):
    return json.dumps(value, ensure_ascii=False)


def hermes(calls):
    bodies = [dump({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def llama3(calls):
    return "; ".join(dump({"name": name, "parameters": arguments}) for name, arguments in calls)


def raw(value):
    return value if isinstance(value, str) else dump(value)


def qwen3_coder(calls):
    blocks = []
    for name, arguments in calls:
        values = [
            f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in arguments.items()
        ]
        blocks.append(f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>")
    return "\n".join(blocks)


def dsml(group):
    def write(calls):
        text = f"<{DSML}{group}>\n"
        for name, arguments in calls:
            text += f'<{DSML}invoke name="{name}">\n'
            for key, value in arguments.items():
                kind = "true" if isinstance(value, str) else "false"
                text += f'<{DSML}parameter name="{key}" string="{kind}">{raw(value)}'
                text += f"</{DSML}parameter>\n"
            text += f"</{DSML}invoke>\n" if arguments else f"\n</{DSML}invoke>\n"
        return f"{text}</{DSML}{group}>"

    return write


def deepseek_v3(calls):
    parts = [
        f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>{name}\n```json\n"
        f"{dump(arguments)}\n```<{BAR}tool▁call▁end{BAR}>"
        for name, arguments in calls
    ]
    return f"<{BAR}tool▁calls▁begin{BAR}>" + "\n".join(parts) + f"<{BAR}tool▁calls▁end{BAR}>"


def deepseek_v31(calls):
    parts = [
        f"<{BAR}tool▁call▁begin{BAR}>{name}<{BAR}tool▁sep{BAR}>{dump(arguments)}"
        f"<{BAR}tool▁call▁end{BAR}>"
        for name, arguments in calls
    ]
    return f"<{BAR}tool▁calls▁begin{BAR}>" + "".join(parts) + f"<{BAR}tool▁calls▁end{BAR}>"


def gemma(opening, closing, quote):
    def value_text(value):
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{value_text(v)}" for key, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(value_text, value)) + "]"
        return dump(value)

    def write(calls):
        return "".join(f"{opening}call:{name}{value_text(args)}{closing}" for name, args in calls)

    return write


def python_text(value):
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return "'" + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + "'"
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}": {python_text(v)}' for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python_text, value)) + "]"
    return repr(value)


def pythonic(calls):
    return "[" + ", ".join(
        f"{name}({', '.join(f'{key}={python_text(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    ) + "]"  # fmt: skip


WRITERS = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3,
    "pythonic": pythonic,
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
}
