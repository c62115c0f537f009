"""The one family of errors that users see: what happened, why, and what to do."""

from __future__ import annotations

import shlex
from pathlib import Path

_MOST = 2000  # characters of each part


class FloeError(Exception):
    """A failure explained to the user.

    Args:
        title: what happened, a short sentence without a full stop.
        cause: why, in the terms of the thing that failed.
        hint: what the user can do about it.

    Each part is cut at 2,000 characters: causes quote files and answers of other programs.
    `exit_code` follows the command line's convention: 1 failure, 2 usage, 3 try again.
    """

    exit_code = 1

    def __init__(self, title: str, cause: str = "", hint: str = "") -> None:
        self.title, self.cause, self.hint = map(_cut, (title, cause, hint))
        super().__init__(self.title)

    def __str__(self) -> str:
        return "\n".join(part for part in (self.title, self.cause, self.hint) if part)


class UsageError(FloeError):
    """The user asked for something that does not exist or cannot be combined."""

    exit_code = 2


class TryAgainError(FloeError):
    """The request is fine; the same call may work later."""

    exit_code = 3


class PackError(FloeError):
    """A packed model that cannot be used: incomplete, of another version, or damaged."""


class NoTemplateError(PackError):
    """A base model, which cannot chat."""


class NoPackError(PackError):
    """The folder is not a packed model."""

    exit_code = 2


class CheckpointError(FloeError):
    """A source checkpoint that cannot be read, or is not a Mixture-of-Experts model of a supported family."""


class NoCheckpointError(CheckpointError):
    """The folder is not a checkpoint."""

    exit_code = 2


class HubError(FloeError):
    """A hub that lacks the requested data, or sends something else."""


class AccessError(HubError):
    """A hub that requires a token, or one with more rights: another token helps, repeating the request does not."""


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]} …"


def damaged(folder: Path, cause: str) -> PackError:
    """The error for a packed folder whose files cannot be trusted."""
    return PackError(f"The packed model at {folder} is damaged", cause, verify_hint(folder))


def verify_hint(folder: Path) -> str:
    """What to do about a packed folder whose files cannot be used."""
    return f"Run `floe-chat verify {shlex.quote(str(folder))}` to see what is damaged and how to repair it."
