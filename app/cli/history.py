"""`floe-chat history`: the saved chats on the command line. Data goes to stdout, messages to stderr.

Only the commands that need the history import it: it would double the start-up time of every other command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...models import private_file
from ...models.errors import UsageError
from ...models.quantities import size
from .. import progress
from ..arguments import read_text
from ..text.plain_text import printable
from .command_names import SuggestingGroup

if TYPE_CHECKING:
    from ..history.database.store import HistoryStore

_JSON = click.option("--json", "as_json_lines", is_flag=True, help="Print one JSON object per line.")


class _Number(click.ParamType[int]):
    """The number of a saved chat, or its id."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) <= 2**62):
            text = text if len(text) < 40 else f"{text[:40]}…"
            self.fail(f"{text!r} is not a chat number; `floe-chat history list` shows the numbers.", param, ctx)
        return int(text)


NUMBER = _Number()


@click.group(cls=SuggestingGroup, short_help="List, search, show, export, import and delete chats.")
def history() -> None:
    """List, search, show, export, import and delete the chats saved on this machine.

    Every chat has a number that never changes: `list` and `search` show it, the other commands take it.

    \b
    Examples:
      floe-chat history list
      floe-chat history search "hit rate" cache
      floe-chat history show 12 | less
      floe-chat history export 12 --output experts.md
      floe-chat history export --all --format json --output chats.json
      floe-chat history import chats.json
      floe-chat history delete 12
      floe-chat history forget
    """


@history.command("list")
@click.option(
    "--limit", "-n", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="Show at most this many."
)
@_JSON
def list_(limit: int, as_json_lines: bool) -> None:
    """List chats, last used first.

    Columns: number, last use, messages on its branch, model, title (or first question).

    \b
    Examples:
      floe-chat history list -n 5
      floe-chat history list --json | jq -r .title
    """
    from ..history import json_text
    from .printing import history_lines

    with _opened(writing=False) as store:
        found = store.conversations(limit)
        more = len(store.conversations(1, found[-1])) if found else 0
    if not found:
        progress.note("no chat is saved yet")
    for each in found:
        click.echo(json_text(history_lines.summary(each)) if as_json_lines else history_lines.line(each))
    if more:
        progress.note("there are more; show them with --limit")


@history.command(short_help="Search titles and messages.")
@click.argument("words", nargs=-1, required=True)
@click.option(
    "--limit", "-n", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="Show at most this many."
)
@_JSON
def search(words: tuple[str, ...], limit: int, as_json_lines: bool) -> None:
    """Find the titles and messages that contain all WORDS, best match first.

    Case and accents do not matter. The last word may be the start of a longer one. An argument with spaces is searched
    as a phrase. If nothing is found, the exit code is 1.

    \b
    Examples:
      floe-chat history search experts
      floe-chat history search "hit rate" cach
    """
    from ..history import json_text
    from .printing import history_lines

    phrases = [f'"{word}"' if " " in word and '"' not in word else word for word in words]
    with _opened(writing=False) as store:
        hits = store.search(" ".join(phrases), limit)
    for hit in hits:
        click.echo(json_text(history_lines.hit(hit)) if as_json_lines else history_lines.hit_line(hit))
    if not hits:
        progress.note(f"nothing found for {printable(' '.join(words))!r}")
        sys.exit(1)


@history.command(short_help="Print a chat as Markdown.")
@click.argument("number", type=NUMBER)
@_JSON
def show(number: int, as_json_lines: bool) -> None:
    """Print chat NUMBER as Markdown: the branch that the chat shows.

    --json prints one object per message of that branch; `export --format json` writes all branches.

    \b
    Examples:
      floe-chat history show 12
      floe-chat history show 12 --json | jq -r 'select(.role == "assistant").text'
    """
    from ..history import as_markdown, json_text
    from .printing import history_lines

    with _opened(writing=False) as store:
        found = store.numbered(number)
        if not as_json_lines:
            click.echo(as_markdown(store.tree(found.id)), nl=False)
            return
        for message in store.messages(store.branch(found.head)):
            click.echo(json_text(history_lines.message(message)))


@history.command(short_help="Export chats as Markdown or JSON.")
@click.argument("numbers", type=NUMBER, nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All chats, instead of NUMBERS.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["markdown", "json"]),
    default="markdown",
    show_default=True,
    help="markdown: the branch that is shown, to read. json: every branch, for `import`.",
)
@click.option(
    "--output",
    "-o",
    help="A file, or a folder for one file each. End the name of a new folder with /.  [default: standard output]",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
def export(numbers: tuple[int, ...], everything: bool, form: str, output: str | None, force: bool) -> None:
    """Export chats NUMBERS as Markdown or JSON.

    Only you can read the written files (mode 0600).

    \b
    Examples:
      floe-chat history export 12 > experts.md
      floe-chat history export 12 14 --output ~/chats/        (one file each)
      floe-chat history export --all --format json --output backup.json
    """
    from ..history import as_json, as_markdown, file_name

    if everything == bool(numbers):
        raise click.UsageError("Give the numbers of chats, or --all.")
    if output == "":
        raise UsageError("--output is empty", "", "Give a file, a folder, or - for standard output.")
    with _opened(writing=False) as store:
        trees = [store.tree(each) for each in _wanted(store, numbers)]
        for number in sorted(store.left_out):
            progress.note(f"chat {number}: sampling values out of range were left out")
    if output not in (None, "-") and (folder := _folder(output)) is not None:
        for tree in trees:
            ending = ".md" if form == "markdown" else ".json"
            name = file_name(tree.conversation.number, tree.name, ending)
            _write(folder / name, as_markdown(tree) if form == "markdown" else as_json([tree]), force)
        return
    text = as_json(trees) if form == "json" else "\n".join(as_markdown(tree) for tree in trees)
    if output in (None, "-"):
        click.echo(text, nl=False)
    else:
        _write(Path(output), text, force)


@history.command("import", short_help="Add chats that `export --format json` wrote.")
@click.argument("file", type=click.Path(path_type=Path))
def import_(file: Path) -> None:
    """Add the chats in FILE, which `export --format json` wrote, and print their new numbers.

    Either all chats are added or none. Importing a file twice makes copies.

    \b
    Example:
      floe-chat history import backup.json
    """
    from ..history import parse
    from ..history.adding import add_all

    trees = parse(read_text(file), str(file), progress.note)
    with _opened(writing=True) as store:
        ids = add_all(store, trees)
        for identity in ids:
            click.echo(store.conversation(identity).number)
    progress.note(f"imported {len(ids)} chat{'' if len(ids) == 1 else 's'}")


@history.command(short_help="Delete chats, or restore them with --undo.")
@click.argument("numbers", type=NUMBER, nargs=-1, required=True)
@click.option("--undo", is_flag=True, help="Restore them, within a week.")
def delete(numbers: tuple[int, ...], undo: bool) -> None:
    """Delete chats NUMBERS. --undo restores them for a week; then they are wiped from the disk.

    Either all of them are deleted or none.

    \b
    Examples:
      floe-chat history delete 12 14
      floe-chat history delete 12 --undo
    """
    from ...engine import state_folder
    from ..history import new_id

    with _opened(writing=True) as store, store.transaction():
        for number in dict.fromkeys(numbers):
            if not undo:
                store.delete(identity := store.numbered(number).id, new_id())
                state_folder.forget(identity)
            elif (mark := store.deletion_of(number)) is not None:
                store.undo(mark)
            else:
                raise UsageError(
                    f"Chat {number} cannot be restored", "It is not among the chats deleted in the last week."
                )
    what = "restored" if undo else "deleted; --undo restores within a week"
    progress.note(f"{', '.join(map(str, dict.fromkeys(numbers)))} {what}")


@history.command(short_help="Delete what models computed of chats; the chats stay.")
@click.argument("numbers", type=NUMBER, nargs=-1)
def forget(numbers: tuple[int, ...]) -> None:
    """Delete the states of chats NUMBERS, or of all.

    They are what a model computed of a chat's text, kept so that the chat goes on after a restart without being read
    again. The chats themselves stay. The setting history.states limits their disk space; 0 keeps none.

    
    Examples:
      floe-chat history forget
      floe-chat history forget 12
    """
    from ...engine import state_folder

    before = state_folder.total()
    if numbers:
        with _opened(writing=False) as store:
            for identity in _wanted(store, numbers):
                state_folder.forget(identity)
    else:
        state_folder.delete(state_folder.files())
    progress.note(f"deleted {size(before - state_folder.total())} of states")


@contextmanager
def _opened(*, writing: bool) -> Generator[HistoryStore]:
    from ..history.database.opening import history_file, open_history, open_to_read, open_unsaved
    from ..history.database.trouble import explaining

    file = history_file()
    if not writing and not file.exists():
        store = open_unsaved()  # to look for something makes no files
    else:
        opened = open_history(file) if writing else open_to_read(file)
        store = opened.store
        for notice in opened.notices:
            progress.note(f"{notice.title}. {notice.cause}")
    try:
        with explaining(file):
            yield store
    finally:
        store.close()


def _wanted(store: HistoryStore, numbers: Sequence[int]) -> list[int]:
    if numbers:
        return [store.numbered(number).id for number in dict.fromkeys(numbers)]
    ids: list[int] = []
    page = store.conversations()
    while page:
        ids += [each.id for each in page]
        page = store.conversations(before=page[-1])
    return ids


def _folder(output: str) -> Path | None:
    """The folder that `output` names, made if need be; None: it is a file's name."""
    path = Path(output)
    if output.endswith(("/", os.sep)):
        try:
            private_file.make_folder(path)
        except OSError as error:
            title = f"The folder {path} cannot be created"
            raise UsageError(title, f"{error.strerror}.", "Give another one.") from error
    return path if path.is_dir() else None


def _write(file: Path, text: str, force: bool) -> None:
    try:
        if force and file.exists() and not file.is_file():
            file.write_text(text, encoding="utf-8")  # into a device or a pipe, which nothing should replace
        elif force:
            private_file.replace(private_file.real(file), text)
        else:
            private_file.create(file, text)
    except FileExistsError as error:
        raise UsageError(f"{file} exists", "It was not changed.", "Use --force, or another name.") from error
    except OSError as error:
        raise private_file.unwritable(file, error) from error
    progress.note(f"wrote {file}")
