"""`/export`: write a chat to a file of the user's choice."""

from __future__ import annotations

from pathlib import Path

from ...models import private_file
from ...models.errors import UsageError
from ..history import Tree, as_json, as_markdown, file_name
from ..text_files import meant


def write_chat(tree: Tree, name: str = "") -> Path:
    """Write a chat to a file that is not there yet and return its path.

    Args:
        name: as the person typed it; a name that ends in .json gets every branch, any other Markdown. Without one, the
            file is named after the chat and goes into the working folder.

    Raises:
        FloeError: it cannot be written.
    """
    file = meant(name) if name else Path(file_name(tree.conversation.number, tree.name, ".md"))
    text = as_json([tree]) if file.suffix == ".json" else as_markdown(tree)
    try:
        private_file.create(file, text)
    except FileExistsError as error:
        raise UsageError(f"{file} exists", "It was not changed.", "Give another name: /export FILE") from error
    except ValueError as error:
        raise UsageError(f"{file} cannot be written", f"{error}.", "Give another name: /export FILE") from error
    except OSError as error:
        raise private_file.unwritable(file, error) from error
    return file.absolute()
