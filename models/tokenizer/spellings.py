"""Whether the tokens of two packs stand for the same texts, by their tokenizer.json alone, which nothing runs here."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..errors import damaged
from ..pack.manifest import Manifest

_FILE, _LARGEST = "tokenizer.json", 64 << 20  # bytes


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Tokenizer(msgspec.Struct):
    model: _Model


def alike(one: Path, other: Path) -> bool:
    """Whether two packs' tokens are the same, but for added ones.

    Raises:
        PackError: one has no manifest or no tokenizer that can be read.
    """
    first, second = (Manifest.read(folder).files.get(_FILE) for folder in (one, other))
    if first is not None and second is not None and first.sha256 == second.sha256:
        return True
    return _vocabulary(one) == _vocabulary(other)


def _vocabulary(folder: Path) -> dict[str, int]:
    path = folder / _FILE
    try:
        if path.stat().st_size > _LARGEST:
            raise damaged(folder, f"{_FILE} is larger than a tokenizer.")
        vocabulary = msgspec.json.decode(path.read_bytes(), type=_Tokenizer).model.vocab
    except (OSError, msgspec.MsgspecError) as error:
        raise damaged(folder, f"{_FILE} cannot be read: {error}.") from error
    if isinstance(vocabulary, dict):
        return vocabulary
    return {text: number for number, (text, _score) in enumerate(vocabulary)}
