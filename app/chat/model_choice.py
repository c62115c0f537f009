"""Which model answers: the start model, which the settings save, and the model of a saved chat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...models import catalog
from ...models.errors import FloeError, UsageError
from ..client.interface import Choice
from ..settings.file import change, read

if TYPE_CHECKING:
    from ..history import Conversation

_FIRST_ID = 1 << 40  # ids start here; smaller values are the numbers that `floe-chat history list` shows


def reference(chosen: Choice) -> str:
    """The name under which a chat saves that `chosen` answers it; a server's model may get another one there."""
    return catalog.reference(chosen) if isinstance(chosen, Path) else f"{chosen.url}/models/{chosen.model}"


def start_with(file: Path, model: str) -> None:
    """Save `model` (as `--model` takes it) as the one for the next start; nothing is written if it is saved already.

    Raises:
        FloeError: the settings cannot be written, see `settings_file.change`.
    """
    if read(file).settings.model != model:
        change(file, {"chat.model": model})


def missing(model: str, error: FloeError, instead: str) -> str:
    """A sentence: the `model` of a saved chat cannot answer, and which one answers `instead` ("": none).

    `error`: what `catalog.find(model, saved=True)` raised.
    """
    name = catalog.short_name(model)
    address, found, _id = model.partition("/models/")
    if found and address.startswith(("http://", "https://")):
        said = f"This chat was answered by {name} at {address}: floe-chat --connect {address} continues it there."
        return f"{said} {catalog.short_name(instead)} answers instead." if instead else said
    why = "is not installed any more" if isinstance(error, UsageError) else f"cannot be used: {error.title}"
    said = f"This chat was answered by {name}, which {why}."
    return f"{said} {catalog.short_name(instead)} answers instead." if instead else said


def sent_away(model: str, host: str) -> str:
    """A sentence: the chat that the local `model` answered goes to the server at `host` with the next question."""
    return f"{catalog.short_name(model)} answered this chat. Your next question sends all of it to {host}."


def saved_chat(number: int | None) -> Conversation:
    """The saved chat with this number or id, or the last used one (None).

    Raises:
        UsageError: there is no such chat. FloeError: the history cannot be read.
    """
    from ..history.database.opening import history_file, open_to_read, open_unsaved
    from ..history.database.trouble import explaining

    file = history_file()
    store = open_to_read(file).store if file.exists() else open_unsaved()  # looking for a chat creates no files
    try:
        with explaining(file):
            if number is not None:
                return store.conversation(number) if number >= _FIRST_ID else store.numbered(number)
            found = store.newest()
    finally:
        store.close()
    if found is None:
        raise UsageError("There is no chat to continue", "No chat is saved yet.", "Start one without --continue.")
    return found
