"""GGUF files of a hostile author or a broken disk: damaged headers, and metadata that says something else.

Each is described as `plan` describes it, and opened as a checkpoint; a tensor is read of what opens.
"""

from __future__ import annotations

import logging
import shutil
import struct
from pathlib import Path
from random import Random

import torch
from floe_chat.models import catalog
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import FloeError
from floe_chat.models.gguf.shelf import GgufShelf
from floe_chat.models.pack.manifest import COPIED
from floe_chat.models.packing.dense_part import DensePart
from floe_chat.models.visible import visible

from .. import families
from ..helpers import make_checkpoint
from ..models.gguf.converting import convert
from ..models.gguf.test_unrecorded import made as unrecorded
from . import _hostile

_FILES: list[bytes] = []
_HEADER = 12_000  # bytes, most of them a vocabulary


def good(scratch: Path) -> None:
    """Small files of several architectures, all of which open."""
    logging.disable(logging.WARNING)
    made = [
        convert(make_checkpoint(scratch / "a", hidden=32, intermediate=64, dtype=torch.float16), scratch / "a.gguf")
    ]
    for name, kind in (
        ("deepseek_v3", "F16"),
        ("qwen3_5_moe_text", "BF16"),
        ("gpt_oss", "F16"),
        ("gemma4_text", "BF16"),
    ):
        made.append(convert(families.make(name, scratch / name), scratch / f"{name}.gguf", kind))
    for name in ("afmoe", "granitemoehybrid", "kimi_linear"):
        made.append(convert(unrecorded(name, scratch / name), scratch / f"{name}.gguf", "BF16"))
    for file in made:
        assert _opened(file, scratch / "made") == "opened"
        _FILES.append(file.read_bytes())


def attempt(seed: int, scratch: Path) -> str:
    rng = Random(seed)
    folder = scratch / "attempt"
    folder.mkdir()
    try:
        file = folder / "x.gguf"
        file.write_bytes(_changed(rng, rng.choice(_FILES)))
        return _opened(file, folder / "made")
    finally:
        shutil.rmtree(folder)


def _changed(rng: Random, content: bytes) -> bytes:
    """The file with some bytes of its header changed: anywhere, or a number that counts something."""
    head, rest = content[:_HEADER], content[_HEADER:]
    if rng.random() < 0.4:
        return _hostile.damaged(rng, head) + rest
    raw = bytearray(head)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = _value_of(rng, head)
        number = rng.choice((0, 1, 2, 3, 7, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 64) - 1))
        form = rng.choice("BIQ")
        packed = struct.pack("<" + form, number & ((1 << 8 * struct.calcsize(form)) - 1))
        raw[at : at + len(packed)] = packed
    return bytes(raw) + rest


def _value_of(rng: Random, head: bytes) -> int:
    """Where a value of a key or a tensor begins, so that most changes are not in the vocabulary's texts."""
    word = rng.choice(
        (b"general.", b"attention.", b"expert_", b"rope.", b"tokenizer.ggml.", b"blk.", b"_length", b"count")
    )
    found = [at for at in range(len(head) - 40) if head.startswith(word, at)]
    return rng.choice(found) + rng.randrange(-8, 40) if found else rng.randrange(4, len(head) - 8)


def _opened(file: Path, folder: Path) -> str:
    try:
        assert catalog.described(file).sizes.parameters > 0
    except FloeError as error:
        _check(error)
    try:
        shelf = GgufShelf(file, folder)
        for name in COPIED:
            shelf.small(name)
        checkpoint = Checkpoint(shelf)
        DensePart(checkpoint, 4)
        checkpoint.whole_expert(0, 0)
        assert checkpoint.tensor(checkpoint.dense_names()[0]).numel() and checkpoint.fingerprint()
    except FloeError as error:
        _check(error)
        return "refused"
    return "opened"


def _check(error: FloeError) -> None:
    for text in (error.title, error.cause, error.hint):
        assert "bug in floe-chat" not in text and "Traceback" not in text and text == visible(text), ascii(text)
        assert len(text) < 2100
