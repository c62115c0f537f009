"""The files of a repository on a hub: which we read, what identifies them, and where the user may have them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import FloeError, HubError, TryAgainError
from .shelf import is_shard

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file in a repository. `hash` is its sha256 if the hub keeps it as a large file, else git's SHA-1 of it."""

    name: str
    size: int
    hash: str
    large: bool

    def digest(self) -> Any:
        """A hash object that gives `hash` once it has been fed the whole file."""
        if self.large:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def is_wanted(name: str) -> bool:
    """Whether we read such a file: weights as safetensors, configuration, tokenizer; never pickles or code."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name, re.ASCII):  # nothing in folders, nothing that leaves ours
        return False
    return is_shard(name) or name.endswith((".json", ".jinja")) or name == "tokenizer.model"


def listing(repo: str, content: bytes) -> tuple[str, bool, tuple[RepoFile, ...]]:
    """Commit, whether it is gated, and the files that we read, out of a hub's answer about `repo` with blobs=true.

    Raises:
        TryAgainError: it is no such answer. HubError: the repository has nothing that we read.
    """
    try:
        fields: Any = json.loads(content)
        commit, names = str(fields["sha"]), [str(entry["rfilename"]) for entry in fields["siblings"]]
        files = tuple(_repo_file(entry) for entry in fields["siblings"] if is_wanted(entry["rfilename"]))
        gated = fields.get("gated", False) is not False
        if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
            raise ValueError(f"{commit!r} is no commit")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TryAgainError(
            "The hub's answer cannot be understood", f"{error!r}", "Try again, or use another mirror (HF_ENDPOINT)."
        ) from error
    if not any(is_shard(file.name) for file in files):
        raise _no_weights(repo, names)
    return commit, gated, files


def cached(repo: str, commit: str, file: RepoFile) -> Path | None:
    """A file of this commit of `repo` in the user's hub cache (HF_HOME), known by its size.

    Its content has not been checked: the hub's own client does not do that either.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file.name, revision=commit)
    if not isinstance(found, str):
        return None
    path = Path(found)
    return path if path.is_file() and path.stat().st_size == file.size else None


def _repo_file(entry: dict[str, Any]) -> RepoFile:
    large = entry.get("lfs")
    name = str(entry["rfilename"])
    size, value = int(entry["size"]), str(large["sha256"] if large else entry["blobId"])
    if size < 0 or not re.fullmatch(r"[0-9a-f]{64}" if large else r"[0-9a-f]{40}", value):
        raise ValueError(f"{name} has no size or no hash")
    return RepoFile(name, size, value, large is not None)


def _no_weights(repo: str, names: list[str]) -> FloeError:
    if any(name.endswith(_PICKLES) for name in names):
        cause = "It has its weights as pickle files, which can run code when they are read: floe-chat never does."
    elif any(name.endswith(".gguf") for name in names):
        cause = "It has its weights as GGUF files, which are quantized already; floe-chat packs the original ones."
    else:
        cause = "It holds no *.safetensors files."
    return HubError(f"{repo} cannot be used", cause, "Look for a repository of this model with *.safetensors files.")
