"""`floe-chat pack`: a local checkpoint folder into the packed layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..models.calibration import read_tokens
from ..models.catalog import asset
from ..models.checkpoint import Checkpoint
from ..models.manifest import Manifest
from ..models.pack import PackSpec, pack


def pack_folder(
    source: Path, destination: Path, spec: PackSpec, name: str, progress: Callable[[str, float], None]
) -> tuple[Manifest, int]:
    """Pack `source`, calibrating on the built-in text; returns the manifest and the pack's bytes.

    Raises:
        FloeError: whatever `Checkpoint` and `pack` raise.
    """
    checkpoint = Checkpoint(source)
    tokens = read_tokens(source, asset("calibration.txt").read_text(encoding="utf-8"))
    manifest = pack(checkpoint, destination, spec, tokens, name, progress)
    return manifest, sum(entry.size for entry in manifest.files.values())
