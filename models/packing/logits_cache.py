"""Logits of the 16-bit source, saved in the user's cache folder: computing them reads the whole checkpoint.

Raw float32 logits are stored, as they were computed, and add no error. Log-probabilities would add up to 3e-3 nats
(bfloat16), 3e-4 (float16) or 1e-7 (float32) to the KL divergence of a position, measured on the demo model, and a pack
that loses nothing has 1e-12. An entry is KEY.safetensors with one tensor and, written after it, KEY.json with its size
and sha256.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import platformdirs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import private_file
from ..pack.manifest import file_entry
from ..pack.tensor_file import write_tensors

FORMAT = "floe-chat source logits"
LIMIT_BYTES = 2 << 30  # of all entries together, and so of one
_NAME = "logits"


def entry_bytes(positions: int, vocabulary: int) -> int:
    """What one entry takes on disk and in memory."""
    return positions * vocabulary * torch.float32.itemsize


def key_of(source: str, ids: Tensor, keep: int) -> str:
    """The name of an entry: the source's sha256, the exact tokens, and how many positions of each row are kept."""
    from transformers import __version__

    facts = f"{FORMAT} 1, transformers {__version__}, {source}, {tuple(ids.shape)}, {keep}, "
    return hashlib.sha256(facts.encode() + ids.contiguous().numpy().tobytes()).hexdigest()


def cached(key: str, shape: tuple[int, int, int], note: Callable[[str], None], compute: Callable[[], Tensor]) -> Tensor:
    """The entry `key`, or what `compute` gives, which is then stored if the disk takes it.

    Args:
        shape: (N, keep, V) that the entry must have. note: receives a message when an entry is unusable or cannot be
            saved.
    """
    folder = _folder()
    try:
        return _load(folder, key, shape)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, SafetensorError) as error:
        note(f"The stored logits of the source are unusable ({error}) and are computed again.")
    logits = compute()
    try:
        _store(folder, key, logits)
    except OSError as error:
        note(f"The logits of the source could not be cached: {error.strerror or error}.")
    return logits


def _folder() -> Path:
    return Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)) / "source-logits"


def _load(folder: Path, key: str, shape: tuple[int, int, int]) -> Tensor:
    path = folder / f"{key}.safetensors"
    fields = private_file.read_json(folder / f"{key}.json")
    if fields != {"format": FORMAT, "key": key, **dataclasses.asdict(file_entry(path))}:
        raise ValueError("their sha256 is not the one noted")
    with safe_open(path, "pt") as file:
        logits = file.get_tensor(_NAME)
    if logits.dtype != torch.float32 or tuple(logits.shape) != shape:
        raise ValueError(f"they are {logits.dtype} {tuple(logits.shape)} instead of float32 {shape}")
    return logits


def _store(folder: Path, key: str, logits: Tensor) -> None:
    private_file.own_folder(folder)
    _make_room(folder, logits.nbytes)
    path = folder / f"{key}.safetensors"
    with private_file.replacing(path) as partial:
        write_tensors(partial, {_NAME: logits})
        entry = dataclasses.asdict(file_entry(partial))
    private_file.replace(path.with_suffix(".json"), json.dumps({"format": FORMAT, "key": key, **entry}))


def _make_room(folder: Path, nbytes: int) -> None:
    """Delete the oldest entries until `nbytes` more stay within the limit; also what an interrupted run left."""
    for path in folder.glob("*.part"):
        path.unlink(missing_ok=True)
    entries = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    total = nbytes + sum(path.stat().st_size for path in entries)
    for path in entries:
        if total <= LIMIT_BYTES:
            return
        total -= path.stat().st_size
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink()
