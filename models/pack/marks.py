"""Files by which it is known whether a folder is a finished pack, and the errors where it is none."""

from __future__ import annotations

from pathlib import Path

from ..errors import NoPackError, PackError

FILE_NAME = "manifest.json"  # written last
UNFINISHED = "packing.json"  # is in the folder from the first byte until the manifest is written
FETCHING = "download.lock"  # in a folder into which a model is downloaded


def unfinished(folder: Path) -> PackError:
    """The error for a folder without a manifest, by what is in it."""
    if (folder / UNFINISHED).exists():
        return PackError(
            f"The packed model at {folder} is incomplete",
            "Its manifest, written last, is missing: packing was interrupted.",
            "Pack it again into the same folder: floe-chat pack SRC DST.",
        )
    if (folder / FETCHING).exists():
        return PackError(
            f"The packed model at {folder} is incomplete",
            "Its manifest, written last, is missing: the download was interrupted.",
            "Continue it: floe-chat setup",
        )
    if (folder / "config.json").exists():
        return PackError(
            f"{folder} is not packed",
            "It looks like a checkpoint as published: it has a config.json but no manifest.json.",
            f"Pack it first: floe-chat pack {folder} DST, then use DST.",
        )
    return NoPackError(
        f"{folder} holds no packed model",
        "It has no manifest.json.",
        "Check the path, or pack a checkpoint into it.",
    )


def garbled(folder: Path | str, cause: str) -> PackError:
    """The error for a manifest that cannot be used; without one, a pack cannot be repaired."""
    return PackError(
        f"The packed model at {folder} is damaged", cause, "Pack the source checkpoint again, or restore a copy."
    )
