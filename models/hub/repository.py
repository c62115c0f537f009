"""A model repository on the hub that the user chose: its listing, its small files, and the headers of its large files.

The requests are our own, spoken in the hub's protocol, and not huggingface_hub's: its client stays offline in this
process for good (`models.privacy`), so that no other library can use the network while a model is being fetched.
That library says who the user is (its login) and where the user's cache is. HF_ENDPOINT, HTTP(S)_PROXY, NO_PROXY
and SSL_CERT_FILE are honoured. The token goes to the hub's own address in a header and nowhere else, never into a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import threading
from pathlib import Path
from urllib.parse import quote

import httpx2

from ..checkpoint_files import INDEX, TensorPlace, header_bytes, is_shard, parse_header
from ..errors import AccessError, CheckpointError, FloeError, HubError, TryAgainError, UsageError
from . import hub_errors, hub_request
from .gguf_files import GgufFiles
from .privacy import offline
from .repository_files import RepoFile, cached, listing

HUB = "https://huggingface.co"
_LARGEST_SMALL = 32 << 20  # bytes of a JSON or tokenizer file
_LARGEST_LISTING = 16 << 20  # bytes
_FIRST_LOOK = 256 << 10  # bytes: what a shard's header usually takes
_TRIES = 3
_LONGEST_WAIT = 10.0  # seconds to wait at the hub's request while the user watches; a download is more patient
_PATIENCE_S = 90.0  # for an answer, all tries together, and as long again for each 2 MB of a file
_SLOWEST = 20_000.0  # bytes per second


def endpoint() -> str:
    """The hub's address: the user's mirror (HF_ENDPOINT) or huggingface.co."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def own_token() -> str | None:
    """The token in HF_TOKEN, or of the hub's own login."""
    from huggingface_hub import get_token

    return get_token() or None


def resolve(repo_id: str, revision: str = "main", token: str | None = None) -> Repo:
    """Look a repository up: one request.

    Args:
        repo_id: owner/name. revision: a branch, tag or commit. token: if not the user's own (`own_token`).

    Raises:
        UsageError: the id or the hub's address is malformed. AccessError: a token is needed, or one with more rights.
        HubError: no such repository or revision, or it has no file that we read. TryAgainError: the hub cannot be
        reached or is busy, or HF_HUB_OFFLINE is set.
    """
    _check_id(repo_id)
    if offline():
        raise TryAgainError(
            "floe-chat is set to stay offline",
            "HF_HUB_OFFLINE is set.",
            f"Unset it to fetch {repo_id}, or give the folder of a downloaded model.",
        )
    token = (token or "").strip() or own_token()
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise AccessError(
            "This is not a token", "It contains characters that tokens do not have.", "Copy all of it again."
        )
    repo = Repo(repo_id, endpoint(), token)
    repo.look_up(revision)
    return repo


class Repo:
    """A repository at one commit; made by `resolve`. Its methods may be called by several threads at once.

    Attributes:
        name: owner/name. endpoint: the hub's address. commit: what the revision means now. gated: whether its publisher
        asks to accept terms first. files: the ones that we read. token: sent with requests; never shown or written.
        gguf: the GGUF files to take; None: the model is in the other files.
    """

    def __init__(self, name: str, address: str, token: str | None) -> None:
        self.name = name
        self.endpoint = address
        self.token = token
        self.commit = ""
        self.gated = False
        self.files: tuple[RepoFile, ...] = ()
        self.gguf: GgufFiles | None = None
        self._stretches: dict[str, RepoFile] = {}
        self._lock = threading.Lock()
        self._headers: dict[str, dict[str, TensorPlace]] = {}
        self._weight_map: dict[str, str] | None = None

    def file(self, name: str) -> RepoFile | None:
        """A file of that name, or a stretch that was `cut`."""
        return self._stretches.get(name) or next((file for file in self.files if file.name == name), None)

    def cut(self, stretch: RepoFile) -> None:
        """From now on a stretch of a file can be fetched like a file."""
        self._stretches[stretch.name] = stretch

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
                f"{self.name} is not complete", f"Its index names {missing[0]}, which is missing.", _OTHER_REVISION
            )
        return [present[name] for name in named]

    def url(self, name: str) -> str:
        """Where a file is asked for; the answer may redirect to a signed address, which is not stored."""
        return f"{self.endpoint}/{self.name}/resolve/{self.commit}/{quote(name)}"

    def authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    def cached(self, file: RepoFile) -> Path | None:
        """See `repository_files.cached`."""
        return None if file.of is not None else cached(self.name, self.commit, file)

    def refusal(self, response: httpx2.Response, body: bytes) -> FloeError:
        """The error for a response whose status is not 2xx, with the beginning of its body."""
        return hub_errors.refusal(response, body, self.name, self.endpoint, token=self.token is not None)

    def read(self, name: str) -> bytes | None:
        """A small file, verified; None if the repository has none of that name.

        Raises:
            FloeError: as `resolve`; also if it is larger than 32 MB or arrives damaged.
        """
        file = self.file(name)
        if file is None:
            return None
        if file.size > _LARGEST_SMALL:
            raise HubError(f"{name} of {self.name} is too large", f"It has {file.size / 1e6:.0f} MB.", _OTHER_REVISION)
        for _ in range(2):
            content = self._get(self.url(name), file.size + 1, size=file.size)
            digest = file.digest()
            digest.update(content)
            if digest.hexdigest() == file.hash:
                return content
        raise TryAgainError(f"{name} of {self.name} arrived damaged", "Its hash was wrong twice.", "Try again later.")

    def piece(self, file: RepoFile, start: int, count: int) -> bytes:
        """`count` bytes of a file from `start` on, which have no hash to compare.

        Raises:
            FloeError: as `resolve`. TryAgainError: also if other bytes came, or too few.
        """
        content = b""
        for _ in range(_TRIES):  # an answer may be well-formed and shorter
            left = count - len(content)
            content += self._get(self.url(file.name), left, start=start + len(content), first=True, size=left)
            if len(content) == count:
                return content
        cause = f"{len(content):,} bytes came instead of {count:,} from {start:,} on."
        raise TryAgainError(f"{file.name} of {self.name} arrived damaged", cause, "Try again later.")

    def header(self, name: str) -> dict[str, TensorPlace]:
        """Tensor name -> its place in a shard, from the first bytes alone; remembered.

        Raises:
            CheckpointError: it is not a safetensors file, or its size does not fit its header.
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
            head = self._get(self.url(name), length, first=True, size=length)
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

    def look_up(self, revision: str) -> None:
        """Ask the hub for the repository's listing at `revision`. Raises: see `resolve`."""
        address = f"{self.endpoint}/api/models/{self.name}/revision/{quote(revision, safe='')}"
        content = self._get(f"{address}?blobs=true", _LARGEST_LISTING)
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

    def _get(self, url: str, most: int, *, size: int = 0, start: int = 0, first: bool = False) -> bytes:
        """A body of at most `most` bytes; with `first`, only the beginning of a larger one is asked for.

        Resets, time-outs and busy servers are tried again; a broken answer is continued where it broke.

        Args:
            size: bytes to expect, if known, for which more time is given. start: what begins there is the body.
        """
        patience = _PATIENCE_S + size / _SLOWEST
        try:
            return hub_request.complete(asyncio.wait_for(self._tries(url, most, start, first=first), patience))
        except TimeoutError as error:
            raise TryAgainError(
                f"{self.endpoint} is too slow", f"It did not answer in full within {patience:.0f} seconds.", _LATER
            ) from error

    async def _tries(self, url: str, most: int, start: int, *, first: bool) -> bytes:
        content = bytearray()
        failures = 0
        async with hub_request.new_client(self.endpoint) as client:
            while True:
                had = len(content)
                wait = None
                try:
                    trouble, wait = await self._try(client, url, content, most, start, first=first)
                    if trouble is None:
                        return bytes(content[:most])
                except (httpx2.HTTPError, httpx2.InvalidURL, ssl.SSLError, ConnectionError) as error:
                    trouble = hub_errors.no_connection(error, self.endpoint)
                    if not hub_errors.is_broken(error):
                        raise trouble from error
                if len(content) > had:
                    failures = 0
                    continue
                failures += 1
                if failures == _TRIES:
                    raise trouble
                await asyncio.sleep(wait if wait is not None else hub_errors.backoff(failures))

    async def _try(
        self, client: httpx2.AsyncClient, url: str, content: bytearray, most: int, start: int, *, first: bool
    ) -> tuple[FloeError | None, float | None]:
        """Add to `content` what one request brings; a passing refusal and the wait that it asks for, or None twice."""
        had = len(content)
        wanted = f"bytes={start + had}-{start + most - 1}"
        headers = self.authorization() | ({"range": wanted} if first or had else {})
        async with hub_request.opened(client, url, headers) as (response, _redirects):
            if response.is_success:
                if hub_errors.is_web_page(response):
                    raise hub_errors.web_page(self.endpoint)
                hub_request.check_plain(response, self.endpoint)
                if not response.headers.get("content-range", "").startswith(f"bytes {start + had}-"):
                    if start:
                        raise HubError(
                            f"{self.endpoint} serves no parts of files", "All of it came.", "Use another mirror."
                        )
                    content.clear()  # all of it comes
                await _fill(content, response, most, cut=first)
                return None, None
            body = await hub_request.short_body(response)
            trouble = self.refusal(response, body)
            wait = hub_errors.wait_asked(response)
            passing = hub_errors.is_passing(response) or hub_errors.is_expired(response, self.endpoint)
            if not passing or (wait or 0) > _LONGEST_WAIT:
                raise trouble
            return trouble, wait


_LATER = "Try again later, or from another network."
_OTHER_REVISION = "Use another revision, or ask its publisher."


async def _fill(content: bytearray, response: httpx2.Response, most: int, *, cut: bool) -> None:
    """Add the body to `content`. At `most` bytes, leave the rest (`cut`) or refuse the body as too long."""
    async for part in response.aiter_raw():
        content += part
        if cut and len(content) >= most:
            return
        if len(content) > most:
            raise HubError("The hub sent more than it should", f"It sent more than {most:,} bytes.", "Try again later.")


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
            "Write owner/name, for example mistralai/Mixtral-8x7B-Instruct-v0.1.",
        ) from None


def _disagree(repo: str, cause: str) -> CheckpointError:
    return CheckpointError(f"The shards of {repo} disagree with its index", cause, _OTHER_REVISION)
