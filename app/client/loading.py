"""What belongs to loading a model: waiting for it on the command line, and a tokenizer that is another model's."""

from __future__ import annotations

from pathlib import Path

from ...engine.events import Failed, Loaded, Loading
from ...models.errors import FloeError, damaged
from ...models.tokenizer.chat_process import ChatProcess
from .. import progress
from .interface import Client


def wait_until_loaded(client: Client) -> Loaded:
    """The model, once it answers; its loading is shown on stderr.

    Raises:
        FloeError: it cannot be loaded.
    """
    while True:
        for update in client.poll(timeout=0.1):
            match update:
                case Loading():
                    progress.step(f"{update.step} ...")
                case Loaded():
                    progress.clear()
                    return update
                case Failed():
                    raise error_of(update)
                case _:
                    pass


def error_of(failed: Failed) -> FloeError:
    """What the engine reports, to be raised."""
    error = FloeError(failed.title, failed.cause, failed.hint)
    error.exit_code = failed.exit_code
    return error


def foreign_token(found: ChatProcess | FloeError | None, vocabulary: int, pack: Path) -> FloeError | None:
    """Why the tokenizer of `pack` does not belong to its model of `vocabulary` tokens, or cannot be used at all; None
    if the model has all of its tokens.
    """
    if not isinstance(found, ChatProcess) or found.largest[0] < vocabulary:
        return found if isinstance(found, FloeError) else None
    number, text = found.largest
    cause = f"Its tokenizer has a token {number:,} ({text[:40]!r}); the model has {vocabulary:,} tokens."
    return damaged(pack, cause)
