"""Client of a model hub through huggingface-hub's session: a repository's list, a file's bytes.

The library provides the user's token, proxy and certificates, and the meaning of the hub's errors.
Its own download function is not used: it does not check the hash of a file that came by plain
HTTP, and it does not resume an interrupted download (huggingface-hub 2.4). Every address, also of
redirects, must be https; plain http is allowed to this machine only, for a local mirror or a test.

Importing this needs the extra `hub`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import msgspec
from huggingface_hub import constants, errors, get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from tiercel.errors import ModelNotFoundError
from tiercel.loader.hub_names import HubName, RemoteFile, show
from tiercel.loader.store import Content
from tiercel.version import __version__

MAX_LISTING_BYTES = 16 << 20
MAX_REDIRECTS = 5

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_REFUSED_RANGE = 416
_WANTED = (200, 206, _REFUSED_RANGE)


class ConnectionLostError(Exception):
    """The hub did not answer, or the connection broke: worth another attempt."""


class _LargeFile(msgspec.Struct):
    sha256: str
    size: int


class _File(msgspec.Struct, rename={"name": "rfilename", "blob_id": "blobId"}):
    name: str
    size: int | None = None
    blob_id: str | None = None
    lfs: _LargeFile | None = None


class _Repository(msgspec.Struct):
    sha: str
    siblings: list[_File]


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of a file from `start` on."""

    start: int
    chunks: Iterator[bytes]


class HubClient:
    """A hub at one address."""

    def __init__(self, endpoint: str) -> None:
        """Check the address; nothing is sent yet.

        Raises:
            ModelNotFoundError: the address is neither https nor this machine.
        """
        self._endpoint = endpoint
        self._is_local = _is_loopback(endpoint)
        self._check_address(endpoint, "HF_ENDPOINT")
        headers = build_hf_headers(library_name="tiercel", library_version=__version__)
        self._headers = headers | {"accept-encoding": "identity"}

    def list_files(self, name: HubName, revision: str) -> Listing:
        """The files of a repository at a branch, tag or commit, with sizes and hashes.

        Raises:
            ModelNotFoundError: the repository is missing or private, or the answer is no list.
            ConnectionLostError: the hub cannot be reached.
        """
        quoted = revision.replace("/", "%2F")  # the only character in it that needs quoting
        url = f"{self._endpoint}/api/models/{name.repository}/revision/{quoted}?blobs=true"
        with self._opened(url, name, revision, {}) as response, _named_losses():
            data = _read_at_most(response, MAX_LISTING_BYTES)
        try:
            if len(data) > MAX_LISTING_BYTES:
                raise ValueError(f"it has over {MAX_LISTING_BYTES} bytes")  # noqa: TRY301 - as below
            found = msgspec.json.decode(data, type=_Repository)
            files = tuple(_remote_file(file) for file in found.siblings)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise ModelNotFoundError(
                f"{name.repository}: the hub's answer is not a list of files: {error!s:.120}.",
                hint=f"Check that {show(self._endpoint)} is a model hub.",
            ) from error
        if not _COMMIT.fullmatch(found.sha):
            raise ModelNotFoundError(
                f"{name.repository}: the hub names the commit {show(found.sha)!r}.",
                hint=f"Check that {show(self._endpoint)} is a model hub.",
            )
        return Listing(found.sha, files)

    @contextlib.contextmanager
    def file(self, name: HubName, commit: str, file: RemoteFile, start: int) -> Iterator[Body]:
        """A file's bytes from `start` on; from 0 where the server does not support ranges.

        Raises:
            ModelNotFoundError: the file is private, does not exist, or has another size.
            ConnectionLostError: the connection failed; also raised while the bytes are read.
        """
        url = hf_hub_url(name.repository, file.name, revision=commit, endpoint=self._endpoint)
        headers = {"range": f"bytes={start}-"} if start else {}
        with self._opened(url, name, commit, headers) as response:
            if response.status_code == _REFUSED_RANGE:
                yield Body(0, iter(()))
            elif response.status_code == httpx2.codes.PARTIAL_CONTENT:
                begin = _range_start(response, start, file.content.size_bytes)
                yield Body(begin, _chunks(response))
            else:
                yield Body(0, _chunks(response))

    @contextlib.contextmanager
    def _opened(
        self, url: str, name: HubName, revision: str, headers: dict[str, str]
    ) -> Iterator[httpx2.Response]:
        """Follow redirects by hand: each address is checked before the request.

        httpx2 drops the token from the headers when a redirect leads to another origin.
        """
        session = get_session()
        timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        with _named_losses():
            request = session.build_request(
                "GET", url, headers=self._headers | headers, timeout=timeout
            )
        for _ in range(MAX_REDIRECTS):
            self._check_address(str(request.url), name.repository)
            with _named_losses():
                response = session.send(request, stream=True, follow_redirects=False)
            with contextlib.closing(response):
                if response.next_request is None:
                    self._check_status(response, name, revision)
                    yield response
                    return
                request = response.next_request
        raise ModelNotFoundError(
            f"{name.repository}: the hub redirected over {MAX_REDIRECTS} times.",
            hint=f"Check that {show(self._endpoint)} is a model hub.",
        )

    def _check_address(self, url: str, what: str) -> None:
        if url.startswith("https://") or (self._is_local and _is_loopback(url)):
            return
        raise ModelNotFoundError(
            f"{what}: the address {show(url.partition('?')[0])} is not https.",
            hint="Models are fetched over https only (http from this machine itself).",
        )

    def _check_status(self, response: httpx2.Response, name: HubName, revision: str) -> None:
        """Turn the hub's refusal into a one-line error."""
        if response.status_code in _WANTED:
            return
        where = name.repository
        login = "log in with 'hf auth login' or set HF_TOKEN"
        try:
            hf_raise_for_status(response)
        except errors.GatedRepoError as error:
            raise ModelNotFoundError(
                f"{where}: the repository is gated: its owner wants conditions accepted.",
                hint=f"Accept them at {show(self._endpoint)}/{where}, then {login}.",
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ModelNotFoundError(
                f"{where}: the repository has no revision {show(revision)}.",
                hint="Give a branch, a tag or a commit with --revision.",
            ) from error
        except errors.RemoteEntryNotFoundError as error:
            raise ModelNotFoundError(
                f"{where}: the file is not there any more.", hint="Run tiercel pull again."
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ModelNotFoundError(
                f"{where}: the hub has no such repository, or it is private.",
                hint=f"Check the name; for a private one {login}.",
            ) from error
        except errors.HfHubHTTPError as error:
            status = response.status_code
            if status == httpx2.codes.UNAUTHORIZED:
                raise ModelNotFoundError(
                    f"{where}: the hub does not accept your token.", hint=f"Again, {login}."
                ) from error
            if status >= 500 or status in (408, 429):
                raise ConnectionLostError(f"the hub answered HTTP {status}") from error
            raise ModelNotFoundError(
                f"{where}: the hub answered HTTP {status}.", hint=f"Check the name, or {login}."
            ) from error
        raise ModelNotFoundError(
            f"{where}: the hub answered HTTP {response.status_code}.",
            hint=f"Check that {show(self._endpoint)} is a model hub.",
        )


def _remote_file(file: _File) -> RemoteFile:
    """A file of a listing as a `RemoteFile`.

    Raises:
        ValueError: the entry has no size or no hash.
    """
    digest, size = file.blob_id or "", file.size
    if file.lfs is not None:
        digest, size = file.lfs.sha256, file.lfs.size
    if size is None or not 0 <= size < 1 << 60 or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{show(file.name)} has no size or hash")
    return RemoteFile(file.name, Content(size, digest))


def _range_start(response: httpx2.Response, start: int, size_bytes: int) -> int:
    """The first byte of a partial answer, checked against the requested range."""
    found = _RANGE.fullmatch(response.headers.get("content-range", ""))
    if found is None or int(found.group(1)) != start or int(found.group(3)) != size_bytes:
        raise ConnectionLostError("the server sent another part of the file than the requested one")
    return start


def _read_at_most(response: httpx2.Response, limit: int) -> bytes:
    """The body; of a body over the limit only its beginning, but more than the limit."""
    data = bytearray()
    for chunk in response.iter_bytes():
        data += chunk
        if len(data) > limit:
            break
    return bytes(data)


def _chunks(response: httpx2.Response) -> Iterator[bytes]:
    with _named_losses():
        yield from response.iter_bytes()  # as they arrive: none wait to fill a chunk and get lost


@contextlib.contextmanager
def _named_losses() -> Iterator[None]:
    """Turn errors of the network into our own messages."""
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise ModelNotFoundError(
            "HF_HUB_OFFLINE is set: huggingface-hub asks no network.", hint="Unset it."
        ) from None
    except httpx2.TimeoutException as error:
        raise ConnectionLostError("the hub took too long to answer") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ConnectionLostError(reason) from error


def _is_loopback(url: str) -> bool:
    """Whether a plain http address is this machine itself."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        return False
    if parsed.scheme != "http":
        return False
    try:
        return ipaddress.ip_address(parsed.host).is_loopback
    except ValueError:
        return parsed.host == "localhost"
