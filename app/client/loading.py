"""Waiting for a model on the command line."""

from __future__ import annotations

from ...engine.events import Failed, Loaded, Loading
from ...models.errors import FloeError
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
