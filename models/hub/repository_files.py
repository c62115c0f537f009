"""The files of a repository on a hub: which ones we read, their hashes, and where the user's cache has them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint_files import is_shard
from ..errors import FloeError, HubError, TryAgainError
from ..tokenizer.tiktoken import WAYS
from .hub_errors import plain

MANIFEST = "manifest.json"  # of a pack; its content decides
_VOCABULARIES = frozenset({"tokenizer.model", *WAYS})
_LARGEST = 1 << 50  # bytes: a file of more is a mistake
_PLAIN = r"[A-Za-z0-9][\w.+-]{0,199}"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file in a repository, or a stretch of one.

    Attributes:
        hash: the file's sha256 if the hub stores it as a large file, else git's SHA-1 of it. of: the file, of a stretch
            that begins at `start` in it: its own bytes have no hash.
    """

    name: str
    size: int
    hash: str
    large: bool
    of: RepoFile | None = None
    start: int = 0

    @property
    def whole(self) -> RepoFile:
        """The file itself."""
        return self.of or self

    def stretch(self, start: int, end: int) -> RepoFile:
        """Its bytes [start, end), under a name that no other stretch of any file has."""
        name = f"{self.name.rpartition('/')[2]}.{self.hash[:8]}.{start}-{end}"
        return RepoFile(name, end - start, self.hash, self.large, self, start)

    def digest(self) -> Any:
        """A hash object whose digest is `hash` after the whole file."""
        if self.large:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def is_wanted(name: str) -> bool:
    """Whether we read such a file: weights as safetensors or GGUF, configuration, tokenizer; never pickles or code."""
    if re.fullmatch(rf"(?:{_PLAIN}/){{,3}}{_PLAIN}\.gguf", name, re.ASCII | re.IGNORECASE):
        return True  # in folders, too: no file of ours is called by that name
    if not re.fullmatch(_PLAIN, name, re.ASCII):  # no folders, nothing that could leave ours
        return False
    return is_shard(name) or name.endswith((".json", ".jinja")) or name in _VOCABULARIES


def is_gguf(name: str) -> bool:
    """Whether it is called like a GGUF file."""
    return name.lower().endswith(".gguf")


def listing(repo: str, content: bytes) -> tuple[str, bool, tuple[RepoFile, ...]]:
    """Commit, whether it is gated, and the files that we read, from a hub's answer about `repo` with blobs=true.

    Raises:
        TryAgainError: it is not such an answer. HubError: the repository has no file that we read.
    """
    try:
        fields: Any = json.loads(content)
        commit, siblings = fields["sha"], fields["siblings"]
        names = [_text(entry["rfilename"], 4096) for entry in siblings]
        files = tuple(_repo_file(name, entry) for name, entry in zip(names, siblings, strict=True) if is_wanted(name))
        gated = fields.get("gated", False) is not False
        if not re.fullmatch(r"[0-9a-f]{7,64}", _text(commit, 64)):
            raise ValueError("it names no commit")
        if len({file.name for file in files}) < len(files):
            raise ValueError("it lists a file twice")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TryAgainError(
            "The hub's answer about this model is invalid",
            f"{type(error).__name__}: {plain(str(error))}.",
            "Try again, or use another mirror (HF_ENDPOINT).",
        ) from error
    if not any(is_shard(file.name) or is_gguf(file.name) or file.name == MANIFEST for file in files):
        raise _no_weights(repo, names)
    return commit, gated, files


def cached(repo: str, commit: str, file: RepoFile) -> Path | None:
    """A file of this commit of `repo` in the user's hub cache (HF_HOME), if its size is right.

    Its content is not checked here; the hub's own client does not check it either.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file.name, revision=commit)
    if not isinstance(found, str):
        return None
    path = Path(found)
    return path if path.is_file() and path.stat().st_size == file.size else None


def _text(value: object, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"it has a {type(value).__name__} where a short text is expected")
    return value


def _repo_file(name: str, entry: dict[str, Any]) -> RepoFile:
    large = entry.get("lfs") is not None
    size, value = entry["size"], _text(entry["lfs"]["sha256"] if large else entry["blobId"], 64)
    if type(size) is not int or not 0 <= size <= _LARGEST:
        raise ValueError(f"{name} has no size")
    if not re.fullmatch(r"[0-9a-f]{64}" if large else r"[0-9a-f]{40}", value):
        raise ValueError(f"{name} has no hash")
    return RepoFile(name, size, value, large)


def _no_weights(repo: str, names: list[str]) -> FloeError:
    if any(name.endswith(_PICKLES) for name in names):
        cause = "Its weights are pickle files, which can run code when they are read; floe-chat never reads them."
    else:
        cause = f"It has neither *.safetensors nor *.gguf files, nor the {MANIFEST} of a pack."
    return HubError(f"{repo} cannot be used", cause, "Look for a repository of this model with *.safetensors files.")
