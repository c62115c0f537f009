"""Where a model comes from: the user's hub, another mirror of it, or a folder on any web server that holds a pack."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

import httpx2

from ..checkpoint_files import is_shard
from ..errors import AccessError, FloeError, HubError, PackError, TryAgainError
from ..pack.manifest import FILE_NAME, LARGEST, is_manifest
from . import gguf_files, hub_errors
from .privacy import offline
from .ready_pack import Offer, offered, parsed
from .repository import Repo, resolve
from .repository_files import RepoFile


def look_up(place: str, revision: str = "main", token: str | None = None) -> tuple[Repo, Offer | None]:
    """A model's files, and the pack that they are, or None if they are a checkpoint; `Repo.gguf` says whether as GGUF.

    Args:
        place: owner/name, with ":Q4_K_M" for such a GGUF file, or an address (`typed_names.other_address`), to which no
            token is sent. revision, token: see `resolve`.

    Raises:
        FloeError: as `resolve`, `offered` and `gguf_files.chosen`.
    """
    if "://" not in place:
        name, _, file = place.partition(":")
        return _found(resolve(name, revision, token), file)
    if offline():
        hint = f"Unset it to fetch {place}, or give the folder of a downloaded model."
        raise TryAgainError("floe-chat is set to stay offline", "HF_HUB_OFFLINE is set.", hint)
    if place.endswith("/"):
        server = PackServer(place)
        return server, server.offer
    parts = urlsplit(place)
    mirror = Repo(parts.path.strip("/"), f"{parts.scheme}://{parts.netloc}", None)
    try:
        mirror.look_up(revision)
    except AccessError:
        raise
    except (HubError, TryAgainError):  # no mirror of a hub, or no such model: perhaps a folder of that name
        server = PackServer(place)
        return server, server.offer
    return _found(mirror)


def _found(repo: Repo, file: str = "") -> tuple[Repo, Offer | None]:
    """The pack in it; or else, if one is named or it has nothing else, the GGUF files to take."""
    offer = None if file else offered(repo)
    if file or (offer is None and not any(is_shard(each.name) for each in repo.files)):
        repo.gguf = gguf_files.chosen(repo.name, repo.files, file)
    return repo, offer


class PackServer(Repo):
    """A folder on a web server with a pack: its manifest.json, and the files that this names beside it.

    Attributes:
        offer: the pack.

    Raises:
        PackError: as `parsed`. HubError: there is no pack at this address. TryAgainError: it cannot be reached.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        super().__init__(address.rstrip("/"), f"{parts.scheme}://{parts.netloc}", None)
        content = self._get(self.url(FILE_NAME), LARGEST + 1, first=True)
        if len(content) > LARGEST:
            raise PackError(f"{self.name} cannot be used", f"Its {FILE_NAME} has more than {LARGEST >> 20} MB.")
        if not is_manifest(content):
            raise self._no_pack(f"Its {FILE_NAME} is not that of a pack.")
        self.offer = parsed(self.name, content)
        self.files = tuple(
            RepoFile(name, entry.size, entry.sha256, large=True) for name, entry in self.offer.files.items()
        )

    def url(self, name: str) -> str:
        return f"{self.name}/{quote(name)}"

    def cached(self, file: RepoFile) -> None:
        """The hub's cache has nothing of other servers."""

    def refusal(self, response: httpx2.Response, body: bytes) -> FloeError:
        if hub_errors.is_passing(response):
            return super().refusal(response, body)
        name = response.url.path.rpartition("/")[2] or FILE_NAME
        if name == FILE_NAME:
            return self._no_pack(f"It does not serve {FILE_NAME} (status {response.status_code}).")
        cause = f"The server answers with status {response.status_code}."
        return HubError(f"{hub_errors.plain(name)} of {self.name} is not served", cause, "Ask the one who runs it.")

    def _no_pack(self, cause: str) -> HubError:
        hint = "Give the address of the folder with a pack's manifest.json, or owner/name of a model on your hub."
        return HubError(f"There is no pack at {self.name}", cause, hint)
