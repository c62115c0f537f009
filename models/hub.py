"""A model repository on the hub that the user chose: what is in it, its small files, and the headers of its large ones.

Our requests are our own, spoken in the hub's protocol, and not huggingface_hub's: its client stays offline in this
process for good (`models.privacy`), so that no other library can use the network while a model is being fetched.
That library says who the user is (its login) and where the user's cache lies. HF_ENDPOINT, HTTP(S)_PROXY, NO_PROXY
and SSL_CERT_FILE are honoured. The token goes to the hub's own address in a header and nowhere else, least into a file.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import ssl
import threading
import time
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

import httpx2

from . import hub_errors
from .errors import AccessError, CheckpointError, HubError, TryAgainError, UsageError
from .hub_files import RepoFile, listing
from .privacy import offline
from .shelf import INDEX, TensorPlace, header_bytes, is_shard, parse_header

HUB = "https://huggingface.co"
_LARGEST_SMALL = 32 << 20  # bytes of a JSON or tokenizer file
_FIRST_LOOK = 256 << 10  # bytes: what a shard's header usually takes
_TRIES = 3
_LONGEST_WAIT = 10.0  # seconds that a person watching waits for one answer; a download is more patient


def endpoint() -> str:
    """The hub's address: the user's mirror (HF_ENDPOINT) or huggingface.co."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def own_token() -> str | None:
    """The token in HF_TOKEN, or of the hub's own login."""
    from huggingface_hub import get_token

    return get_token() or None


def client_settings() -> dict[str, Any]:
    """What every client of ours is made with; proxies and certificates come from the environment."""
    for name in ("httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)  # below that they log addresses, and signed ones are keys
    return {
        "verify": _certificates(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
        "follow_redirects": True,
        "timeout": httpx2.Timeout(20.0, connect=10.0),
        "headers": {"user-agent": f"floe-chat/{version('floe-chat')}", "accept-encoding": "identity"},
    }


@functools.cache
def _certificates(*_where: str | None) -> ssl.SSLContext:
    """Loaded once: that takes long enough to be felt when a download is paused or cancelled meanwhile."""
    return httpx2.create_ssl_context()


def resolve(repo_id: str, revision: str = "main", token: str | None = None) -> Repo:
    """Look a repository up: one request.

    Args:
        repo_id: owner/name. revision: a branch, tag or commit. token: if not the user's own (`own_token`).

    Raises:
        UsageError: the id or the hub's address is malformed. AccessError: a token is needed or this one does not do.
        HubError: no such repository or revision, or it has nothing that we read. TryAgainError: the hub cannot be
        reached or has no time, or the user has forbidden to ask it.
    """
    _check_id(repo_id)
    if offline():
        raise TryAgainError(
            "floe-chat was told to stay offline",
            "HF_HUB_OFFLINE is set.",
            f"Unset it to fetch {repo_id}, or give a folder that holds the model.",
        )
    token = (token or "").strip() or own_token()
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise AccessError("This is no token", "It holds characters that no token has.", "Copy it again, all of it.")
    repo = Repo(repo_id, endpoint(), token)
    repo.look_up(revision)
    return repo


class Repo:
    """A repository at one commit; made by `resolve`. Its methods may be called by several threads at once.

    Attributes:
        name: owner/name. endpoint: the hub's address. commit: what the revision means now. gated: whether its publisher
        asks to accept terms first. files: those that we read. token: what requests carry; not shown, never written.
    """

    def __init__(self, name: str, address: str, token: str | None) -> None:
        self.name = name
        self.endpoint = address
        self.token = token
        self.commit = ""
        self.gated = False
        self.files: tuple[RepoFile, ...] = ()
        try:
            self._client = httpx2.Client(**client_settings())
        except OSError as error:
            raise UsageError(
                "The certificates in SSL_CERT_FILE or SSL_CERT_DIR cannot be read",
                f"{error}.",
                "Check these variables.",
            ) from error
        except (ImportError, ValueError) as error:
            raise hub_errors.no_connection(error, address) from error
        self._lock = threading.Lock()
        self._headers: dict[str, dict[str, TensorPlace]] = {}
        self._weight_map: dict[str, str] | None = None

    def file(self, name: str) -> RepoFile | None:
        return next((file for file in self.files if file.name == name), None)

    def shards(self) -> list[RepoFile]:
        """The files with weights: those that the index names, or all if there is none.

        Raises:
            CheckpointError: the index cannot be read or names files that are not there.
        """
        present = {file.name: file for file in self.files if is_shard(file.name)}
        if self.file(INDEX) is None:
            return list(present.values())
        named = sorted(set(self._index().values()))
        if missing := [name for name in named if name not in present]:
            raise CheckpointError(
                f"{self.name} is not complete", f"Its index names {missing[0]}, which is not there.", _OTHER_REVISION
            )
        return [present[name] for name in named]

    def url(self, name: str) -> str:
        """Where a file is asked for; the answer may lead to a signed address, which is not kept."""
        return f"{self.endpoint}/{self.name}/resolve/{self.commit}/{quote(name)}"

    def authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    def read(self, name: str) -> bytes | None:
        """A small file, verified; None if the repository has none of that name.

        Raises:
            FloeError: as `resolve`; also if it is larger than 32 MB or damaged on the way.
        """
        file = self.file(name)
        if file is None:
            return None
        if file.size > _LARGEST_SMALL:
            raise HubError(f"{name} of {self.name} is too large", f"It has {file.size / 1e6:.0f} MB.", _OTHER_REVISION)
        for _ in range(2):
            content = self._get(self.url(name), file.size + 1)
            digest = file.digest()
            digest.update(content)
            if digest.hexdigest() == file.hash:
                return content
        raise TryAgainError(f"{name} of {self.name} arrives damaged", "Its hash was wrong twice.", "Try again later.")

    def header(self, name: str) -> dict[str, TensorPlace]:
        """Tensor name -> its place in a shard, from the first bytes alone; remembered.

        Raises:
            CheckpointError: it is no safetensors file, or its size is not the one that its header needs.
            FloeError: as `resolve`.
        """
        with self._lock:
            if name in self._headers:
                return self._headers[name]
        file = self.file(name)
        if file is None:
            raise CheckpointError(f"{self.name} has no file {name}", "", _OTHER_REVISION)
        head = self._get(self.url(name), min(_FIRST_LOOK, file.size), first=True)
        length = 8 + header_bytes(name, head)
        if length > file.size:
            raise CheckpointError(f"{name} of {self.name} is damaged", "It ends within its header.", _OTHER_REVISION)
        if length > len(head):
            head = self._get(self.url(name), length, first=True)
        places = parse_header(name, head, file.size)
        with self._lock:
            self._headers[name] = places
        return places

    def check_index(self, headers: dict[str, dict[str, TensorPlace]]) -> None:
        """Compare the shards' headers with the index, if there is one.

        Raises:
            CheckpointError: a tensor is not where the index says, or in two shards.
        """
        where: dict[str, str] = {}
        for shard, places in headers.items():
            if twice := next((name for name in places if name in where), None):
                raise _disagree(self.name, f"{twice} is in {where[twice]} and in {shard}.")
            where |= dict.fromkeys(places, shard)
        if self.file(INDEX) is None:
            return
        named = self._index()
        for name in sorted(named.keys() | where.keys()):
            here, said = where.get(name, "no shard"), named.get(name, "nothing")
            if here != said:
                raise _disagree(self.name, f"{name} is in {here}; the index says {said}.")

    def close(self) -> None:
        self._client.close()

    def look_up(self, revision: str) -> None:
        """Ask the hub what the repository is at `revision`; `resolve` tells what may go wrong."""
        address = f"{self.endpoint}/api/models/{self.name}/revision/{quote(revision, safe='')}"
        content = self._get(f"{address}?blobs=true", _LARGEST_SMALL)
        self.commit, self.gated, self.files = listing(self.name, content)

    def _index(self) -> dict[str, str]:
        """Tensor name -> the shard that should hold it; read once."""
        if self._weight_map is None:
            content = self.read(INDEX) or b""
            try:
                named = json.loads(content)["weight_map"].items()
                self._weight_map = {str(name): str(shard) for name, shard in named}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(
                    f"{INDEX} of {self.name} cannot be read", f"{error!r}", _OTHER_REVISION
                ) from error
        return self._weight_map

    def _get(self, url: str, most: int, *, first: bool = False) -> bytes:
        """A body of `most` bytes at the most; with `first`, only the beginning of a larger one is asked for.

        What came before a connection broke is gone on from.
        """
        content = bytearray()
        failures = 0
        while True:
            had = len(content)
            headers = self.authorization() | ({"range": f"bytes={had}-{most - 1}"} if first or had else {})
            try:
                with self._client.stream("GET", url, headers=headers) as response:
                    if response.is_success:
                        if hub_errors.is_web_page(response):
                            raise hub_errors.web_page(self.endpoint)
                        if not response.headers.get("content-range", "").startswith(f"bytes {had}-"):
                            content.clear()  # all of it comes
                        _fill(content, response, most, cut=first)
                        return bytes(content[:most])
                    _bounded_error(response)
                    trouble = hub_errors.refusal(response, self.name, self.endpoint, token=self.token is not None)
                    wait = hub_errors.wait_asked(response)
                    if not hub_errors.is_passing(response) or (wait or 0) > _LONGEST_WAIT:
                        raise trouble
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                trouble, wait = hub_errors.no_connection(error, self.endpoint), None
                if not isinstance(error, (httpx2.NetworkError, httpx2.RemoteProtocolError)):
                    raise trouble from error
            if len(content) > had:
                failures = 0
                continue
            failures += 1
            if failures == _TRIES:
                raise trouble
            time.sleep(wait if wait is not None else hub_errors.backoff(failures))


_OTHER_REVISION = "Use another revision, or ask its publisher."


def _fill(content: bytearray, response: httpx2.Response, most: int, *, cut: bool) -> None:
    """Add the body to `content`; once `most` bytes are there, leave the rest or find it too long."""
    for part in response.iter_raw():
        content += part
        if cut and len(content) >= most:
            return
        if len(content) > most:
            raise HubError("The hub sends more than it should", f"Over {most:,} bytes came.", "Try again later.")


def _bounded_error(response: httpx2.Response) -> None:
    """Have the body of a refusal read where it is short enough to be a sentence."""
    if int(response.headers.get("content-length") or 1 << 20) < 1 << 16:
        response.read()


def _check_id(repo_id: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
        if repo_id.count("/") != 1:
            raise HFValidationError("It has no owner.")
    except HFValidationError as error:
        raise UsageError(
            f"{repo_id!r} is not the id of a model on a hub",
            str(error).splitlines()[0],
            "Ids are owner/name, such as mistralai/Mixtral-8x7B-Instruct-v0.1.",
        ) from None


def _disagree(repo: str, cause: str) -> CheckpointError:
    return CheckpointError(f"The shards of {repo} disagree with its index", cause, _OTHER_REVISION)
