"""A command's arguments: sampling values, the question, a terminal."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from ..engine import ranges
from ..engine.events import Sampling
from ..models.errors import FloeError, UsageError

_MOST_ASKED = 64 << 20  # characters of one part of a question: no model reads that many
_SILENCE = 2.0  # seconds
_WAITING = f"floe-chat: waiting for piped input to end; add <{os.devnull} for none\n"


def need_folder() -> None:
    """Raises FloeError: the current folder is gone; torch's libraries would then fail with messages of their own."""
    try:
        Path.cwd()
    except OSError as error:
        cause = f"{error.strerror}."
        raise FloeError("The current folder no longer exists", cause, "Change to another one: cd ~") from error


def need_terminal() -> None:
    """Raises UsageError: the screen needs a terminal, and there is none or it cannot be painted on."""
    # The screen reads keys from stdin and is painted on stderr.
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError(
            "The chat screen needs a terminal",
            "Standard input, output or error is a file or a pipe.",
            'Run floe-chat in a terminal, or use: floe-chat ask "your question"',
        )
    if os.environ.get("TERM") == "dumb":
        raise UsageError(
            "The chat screen cannot be shown here",
            "The terminal says that it cannot move its cursor (TERM=dumb).",
            "Chat line by line: floe-chat --plain",
        )


def sampling_from(options: dict[str, Any], pack: Path | None) -> tuple[Sampling, int, str | None]:
    """The command line's sampling options: how to draw, the longest answer, the system prompt.

    Values not given come from the model's own generation_config.json if legal there, else from our defaults.
    `pack`: None for a server, which keeps that to itself.

    Raises:
        UsageError: a value out of its range, or a system prompt that is not text.
    """
    given = {name: value for name, value in options.items() if value is not None}
    max_tokens, system = int(given.pop("max_tokens")), given.pop("system", None)
    need_text("--system", system or "")
    sampling = Sampling(**{**_published(pack), **given})
    ranges.check(sampling)
    return sampling, max_tokens, system


def _published(pack: Path | None) -> dict[str, Any]:
    if pack is None:
        return {}
    try:
        fields = json.loads((pack / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # most models publish no sampling values
    if not isinstance(fields, dict) or not fields.get("do_sample"):
        return {}
    return {
        name: fields[name] for name, values in ranges.SAMPLING.items() if name != "seed" and fields.get(name) in values
    }


def need_text(what: str, text: str) -> None:
    """Raises UsageError: `what` is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not text", "It is not UTF-8.", "Encode it as UTF-8.") from error


def read_text(file: Path, most: int = 1 << 30) -> str:
    """A text file of the user's, of at most `most` characters.

    Raises:
        UsageError: it cannot be read, is larger, or is not UTF-8.
    """
    try:
        if not file.is_file():
            most = min(most, _MOST_ASKED)  # a pipe or a device may have no end
        with file.open(encoding="utf-8-sig") as opened:
            text = opened.read(most + 1)
    except OSError as error:
        raise UsageError(f"{file} cannot be read", f"{error.strerror}.", "Give the path of a text file.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not text", "It is not UTF-8.", "Give a text file.") from error
    if len(text) > most:
        raise _too_large(str(file), most)
    return text


def _too_large(what: str, most: int) -> UsageError:
    return UsageError(
        f"{what} is too large", f"It has more than {most >> 20:,} million characters.", "Give a shorter part of it."
    )


def question(words: tuple[str, ...], files: tuple[Path, ...]) -> str:
    """The question: the words, the files' text and the piped input, with empty lines between them.

    Raises:
        UsageError: nothing to ask, or a part that cannot be read as text, or is far too large.
    """
    parts = [" ".join(words)]
    need_text("The question", parts[0])
    for file in files:
        parts.append(read_text(file, _MOST_ASKED))
    if sys.stdin and not sys.stdin.isatty():
        # A program that starts this one may have left its own input open, and nobody would know why this one waits.
        telling = threading.Timer(_SILENCE, sys.stderr.write, (_WAITING,))
        telling.daemon = True
        telling.start()
        try:
            piped = sys.stdin.buffer.read(_MOST_ASKED + 1)
            if len(piped) > _MOST_ASKED:
                raise _too_large("The piped input", _MOST_ASKED)
            parts.append(piped.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UsageError("The piped input is not text", "It is not UTF-8.", "Pipe text.") from error
        finally:
            telling.cancel()
    text = "\n\n".join(part.strip() for part in parts if part.strip())
    if not text:
        raise UsageError("There is no question", "", 'Ask one: floe-chat ask "What is an expert?"')
    return text
