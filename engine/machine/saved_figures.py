"""Measurements on this machine, saved in the user's cache for the next start, in files that only the user can read."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import msgspec
import platformdirs

from ...models import private_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_log = logging.getLogger("floe_chat.engine")
_FORMAT = 1

Rate = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Latency = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]


def rates_folder() -> Path:
    """The folder of measured rates."""
    return Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)) / "rates"


class Record:
    """A dataclass to save. Its fields are checked by their types."""

    __slots__ = ()

    def save(self: DataclassInstance, file: Path) -> None:
        """Replace `file`; a cache that cannot be written only means measuring again, which the log says."""
        try:
            private_file.own_folder(file.parent)
            private_file.replace(file, json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}))
        except OSError as error:
            _log.warning("What was measured could not be saved in %s: %s", file, error)

    @classmethod
    def load(cls, file: Path) -> Self | None:
        """The saved record, or None if there is none or it is unusable, which the log explains."""
        try:
            fields = private_file.read_json(file)
            if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
                raise ValueError("it has another format")
            if fields.keys() != {field.name for field in dataclasses.fields(cls)}:  # pyright: ignore[reportArgumentType]
                raise ValueError("its fields are different")
            return msgspec.convert(fields, cls, str_keys=True)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("The saved rates in %s are ignored: %s", file, error)
            return None
