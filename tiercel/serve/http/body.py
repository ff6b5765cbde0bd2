"""Decodes a request's JSON body into its type, or names the byte or field that is wrong.

There are three passes, each linear in the bytes and bounded. Reading checks the size. A scan over
brackets and strings checks depth, number of members and duplicate keys, which the decoder accepts.
Then msgspec checks syntax and types together. A body over 256 KiB is scanned and decoded in a
thread (`api/request_body.py`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta
from msgspec.inspect import ListType, LiteralType, StructType, Type, UnionType
from starlette.requests import Request

from tiercel.errors import InvalidRequestError
from tiercel.params import Limits
from tiercel.serve.http.errors import client_error, escaped

T = TypeVar("T")
MAX_LOOP_BYTES: Final = 256 << 10  # above this, decoding would delay other requests
_SHOWN_CHARS: Final = 80
_MAX_TOKENS_PER_MEMBER: Final = 6  # key, colon, value or two brackets, comma

# The decoder accepts integers of any size, so each integer field names its range.
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

# A string, even an unterminated one, in one match; possessive, so that no input backtracks.
_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{}\[\]:,]', re.DOTALL)
_PATH: Final = re.compile(r" - at (?:`key` in )?`\$([^`]*)`$")
_LONE_SURROGATE: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|\\u[dD][c-fC-F])"
)
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")
_STEP: Final = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of the scan.

    Attributes:
        keys: keys of the outermost object.
        num_members: number of entries of all objects and arrays.
    """

    keys: frozenset[str]
    num_members: int


def check_headers(headers: Mapping[str, str], limits: Limits) -> None:
    """Check the headers that describe the body.

    Raises:
        InvalidRequestError: 415 or 413.
    """
    kind, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        found = headers.get("content-type")
        raise client_error(
            415,
            "unsupported_media_type",
            f"Content-Type is {escaped(repr(found), _SHOWN_CHARS)}." if found else "No type given.",
            hint="Send Content-Type: application/json.",
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise client_error(
            415,
            "unsupported_media_type",
            f"Content-Encoding {escaped(headers['content-encoding'], 40)} is not supported.",
            hint="Send the body as it is.",
        )
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limits.max_body_bytes:
        raise _too_large(limits.max_body_bytes, length[:20])


def _too_large(limit: int, found: str) -> InvalidRequestError:
    return client_error(
        413,
        "body_too_large",
        f"the body has {found} bytes; the limit is {limit}.",
        hint="Send less, or raise --max-body-bytes.",
    )


async def read_bytes(request: Request, limit: int) -> bytes:
    """The bytes of a body.

    Raises:
        InvalidRequestError: 413 `body_too_large`.
        ClientDisconnect: the client has left.
    """
    chunks = bytearray()
    async for chunk in request.stream():
        if len(chunks) + len(chunk) > limit:
            raise _too_large(limit, f"more than {limit}")
        chunks += chunk
    return bytes(chunks)


def decode(data: bytes, type_: type[T], limits: Limits) -> tuple[T, tuple[str, ...]]:
    """Check and decode a body.

    Returns:
        The value, and the names of fields that its type does not have, as paths.

    Raises:
        InvalidRequestError: 400 `invalid_json` or `invalid_request`.
    """
    found = scan(data, limits)
    try:
        value = msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError as error:
        _check_syntax(data)
        raise _wrong_value(str(error), data, type_) from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _malformed(str(error), data) from None
    except UnicodeDecodeError as error:
        raise _invalid_json(f"it is no UTF-8 (byte {error.start})") from None
    _check_all_numbers(data)
    return value, unknown_fields(found.keys, type_)


def _check_syntax(data: bytes) -> None:
    """Report a syntax error before a wrong or missing field."""
    try:
        msgspec.json.decode(data)
    except msgspec.ValidationError:
        return  # a number that is too large; the error of the field's type is more precise
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _malformed(str(error), data) from None


def _check_all_numbers(data: bytes) -> None:
    """Refuse numbers that are too large also where no field reads them: 1 ns a byte."""
    try:
        msgspec.json.decode(data)
    except msgspec.ValidationError as error:
        path = _PATH.search(str(error))
        where = "" if path is None else f" at {escaped(path[1].removeprefix('.'), _SHOWN_CHARS)}"
        raise _invalid_json(f"the number{where} is too large") from None


def _malformed(message: str, data: bytes) -> InvalidRequestError:
    """The error of msgspec, which takes half a surrogate pair for the end of the data."""
    if "truncated" in message:
        has_pairs = b"\\ud" in data or b"\\uD" in data  # 20 times as fast as the expression
        lone = _LONE_SURROGATE.search(data) if has_pairs else None
        if lone is not None:
            return _invalid_json(f"a surrogate pair is not complete (byte {lone.end() - 6})")
        return _invalid_json(f"it ends too early (byte {len(data)})")
    return _invalid_json(message.removeprefix("JSON is malformed: "))


def scan(data: bytes, limits: Limits) -> Scan:
    """Check what the decoder does not: depth, number of members, duplicate keys.

    Other text that is not JSON passes here; the decoder finds it.

    Raises:
        InvalidRequestError: 400 `invalid_json`.
    """
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise _invalid_json(f"it is no UTF-8 (byte {error.start})") from None
    start = len(data) - len(data.lstrip(b" \t\r\n"))
    if data[start : start + 1] != b"{":
        found = "it is empty" if start == len(data) else "it is no object"
        raise _invalid_json(f"{found} (byte {start})")
    stack: list[set[str] | None] = []  # the keys of an open object, None for an array
    outermost: set[str] = set()
    last = b""
    num_members = 0
    for num_tokens, match in enumerate(_TOKEN.finditer(data)):
        if num_tokens > _MAX_TOKENS_PER_MEMBER * (num_members + 1):
            break  # not JSON; without this, 32 MiB of colons would take seconds
        token = match[0]
        if token in (b"{", b"["):
            _check_depth(len(stack), limits.max_json_depth, match.start())
            stack.append(None if token == b"[" else set())
            num_members += 1
        elif token in (b"}", b"]"):
            keys = stack.pop() if stack else None
            outermost = keys if not stack and keys is not None else outermost
        elif token == b",":
            num_members += 1
        elif token == b":":
            _add_key(stack, last, match.start())
        if num_members > limits.max_json_members:
            limit = limits.max_json_members
            raise _invalid_json(f"it has more than {limit} members (byte {match.start()})")
        last = token
    return Scan(frozenset(outermost), num_members)


def _check_depth(num_open: int, limit: int, position: int) -> None:
    if num_open >= limit:
        raise _invalid_json(f"it is nested deeper than {limit} (byte {position})")


def _add_key(stack: list[set[str] | None], token: bytes, position: int) -> None:
    keys = stack[-1] if stack else None
    if keys is None or token[:1] != b'"':
        return  # not JSON: the decoder says where
    try:
        # Two spellings of one key are one key.
        key = msgspec.json.decode(token, type=str) if b"\\" in token else token[1:-1].decode()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    if key in keys:
        shown = escaped(repr(key), _SHOWN_CHARS)
        raise _invalid_json(f"the key {shown} occurs twice in one object (byte {position})")
    keys.add(key)


def _invalid_json(what: str) -> InvalidRequestError:
    return client_error(
        400, "invalid_json", f"the body is not valid: {what}.", hint="Send one JSON object."
    )


def _wrong_value(message: str, data: bytes, type_: type) -> InvalidRequestError:
    """The error of msgspec, with the field before it and the value found there."""
    path = ""
    place = _PATH.search(message)
    if place is not None:
        path, message = place[1].removeprefix("."), message[: place.start()]
    missing = _MISSING.search(message)
    words = _words(type_, path) if message.startswith("Invalid ") else []
    if words:
        text = f"{path}: expected {' | '.join(words)}{_found(data, path)}."
    elif missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        text = f"{path}: this field must be given."
    else:
        rule = message.replace("`", "")
        text = f"{path or 'body'}: {rule[:1].lower()}{rule[1:]}{_found(data, path)}."
    return InvalidRequestError(escaped(text, 500), param=path or None)


def _words(type_: type, path: str) -> list[str]:
    """The words that a field may hold, if it is a choice of words."""
    kinds = _alternatives([_described(type_)])
    for key, _ in _STEP.findall(path):
        kinds = _alternatives(inner for kind in kinds for inner in _inside(kind, key))
    return [str(w) for kind in kinds if isinstance(kind, LiteralType) for w in kind.values]


@functools.cache
def _described(type_: type) -> Type:
    return msgspec.inspect.type_info(type_)  # 10 ms for a chat's body


def _alternatives(kinds: Iterable[Type]) -> list[Type]:
    unions = ([*kind.types] if isinstance(kind, UnionType) else [kind] for kind in kinds)
    return [kind for union in unions for kind in union]


def _inside(kind: Type, key: str) -> list[Type]:
    """The types of a member of an object; of an array, if `key` is empty."""
    if isinstance(kind, StructType):
        tag = [LiteralType((kind.tag,))] if key and key == kind.tag_field else []
        return tag + [field.type for field in kind.fields if field.encode_name == key]
    return [kind.item_type] if isinstance(kind, ListType) and not key else []


def _found(data: bytes, path: str) -> str:
    """The value at a path, for a message; "" where it cannot be shown plainly."""
    if len(data) > MAX_LOOP_BYTES or "[...]" in path or not path:
        return ""
    try:
        value: object = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    for key, index in _STEP.findall(path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
        else:
            return ""
    shown = msgspec.json.encode(value).decode() if not isinstance(value, dict | list) else ""
    return f", but it is {escaped(shown, _SHOWN_CHARS)}" if shown else ""


def unknown_fields(keys: Iterable[str], type_: type) -> tuple[str, ...]:
    """The keys of an object that its type does not have, sorted."""
    names = getattr(type_, "__struct_encode_fields__", None)
    return () if names is None else tuple(sorted(set(keys).difference(names)))
