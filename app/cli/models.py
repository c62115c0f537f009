"""`floe-chat models` and `floe-chat paths`: the models and folders on this machine, and how to delete a model."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click
import platformdirs

from ...models import catalog, private_file
from ...models.errors import UsageError
from ...models.quantities import memory
from ..log import log_file
from ..progress import note
from ..settings.servers import servers
from ..setup.disk_use import files
from ..setup.leftovers import clear, leftovers
from ..setup.links import shown
from ..setup.setups import remove as delete
from ..setup.wish import bad_notes, forget, unfinished
from ..text import units
from ..text.plain_text import printable
from .command_names import SuggestingGroup


@click.group(
    cls=SuggestingGroup, invoke_without_command=True, short_help="List installed, unfinished and available models."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    """List the installed models, unfinished setups, and models that can be set up.

    \b
    floe-chat models
    floe-chat models remove mixtral-8x7b-instruct
    floe-chat models card mixtral-8x7b-instruct --save
    """
    if ctx.invoked_subcommand is not None:
        return
    for bad in bad_notes():
        note(str(bad))
    found = _found()
    click.echo(json.dumps(found, indent=2) if as_json else printable(_text(found)))


@models.command(short_help="Delete a model or its unfinished setup.")
@click.argument("name")
@click.option("--linked", is_flag=True, help="Of a link, delete the pack that it leads to as well.")
@click.option("--yes", "-y", is_flag=True, help="Delete without asking.")
def remove(name: str, linked: bool, yes: bool) -> None:
    """Delete the model NAME, or its unfinished setup, from the models folder.

    Files in the Hugging Face cache are not deleted. Of a model on another disk (setup --to), only the link to it is
    deleted, unless you give --linked.
    """
    begun = next((one for one in unfinished() if one.name == name), None)
    left = next((one for one in leftovers() if one.name == name), None)
    folder = begun.place if begun else catalog.models_folder() / name
    installed = name != catalog.DEMO and any(one.name == name for one in catalog.installed())
    if begun is None and left is None and not installed:
        cause = "The demo is part of floe-chat." if name == catalog.DEMO else f"There is no {folder}."
        raise UsageError(f"There is no model {name!r} to remove", cause, "`floe-chat models` lists the models.")
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                "Deleting needs a confirmation", "Standard input is not a terminal.", "Add --yes to delete without one."
            )
        if folder.is_symlink():
            folder = folder.resolve() if linked else folder
        taken = begun.taken if begun else left.bytes if left else _bytes(folder)
        what = " and ".join(printable(str(path)) for path in (left.paths if left and not begun else [folder]))
        click.confirm(f"Delete {what} ({units.size(taken)})?", abort=True, err=True)
    if begun is not None:
        forget(begun)
    elif left is not None:
        clear(left)
    else:
        stays = folder.readlink() if folder.is_symlink() and not linked else None
        delete(name, linked=linked)
        if stays is not None:
            note(f"{stays} stays: only the link to it was deleted.")
    click.echo(f"floe-chat: deleted {printable(name)}.", err=True)


@models.command(short_help="Write a model card, for a pack that you upload.")
@click.argument("name")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write it here.  [default: stdout]")
@click.option("--save", is_flag=True, help="Write it into the pack's folder, as README.md.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def card(name: str, output: Path | None, save: bool, force: bool) -> None:
    """Write the README.md of the packed model NAME: its base model, licence, bits and measured presets.

    With it, the folder of the pack can be uploaded with the hub's own client, and `floe-chat setup` takes it as it is.
    Nothing is uploaded.
    """
    from ...models.hub.model_card import card as card_of
    from ...models.pack.manifest import Manifest

    folder = catalog.find(name)
    manifest = Manifest.read(folder)
    text = card_of(manifest, catalog.name_of(folder, manifest.name))
    if save and output is not None:
        raise click.UsageError("--save and --output both say where to write. Give one of them.")
    if save:
        output = folder / "README.md"
    if output is None:
        click.echo(printable(text), nl=False)
    else:
        _write(output, text, force=force)
    note(f"To upload it with the hub's own client: hf upload OWNER/NAME {shlex.quote(str(folder))} .")
    if "# fill in" in text:
        note('Fill in what is marked "fill in" first.')


@models.command("serve-with", short_help="Print how vLLM, SGLang and llama-server serve the same model.")
@click.argument("name")
@click.option(
    "--context", type=click.IntRange(1), default=8192, show_default=True, help="Context to reserve, in tokens."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def serve_with(name: str, context: int, as_json: bool) -> None:
    """Print the command lines that serve the checkpoint of NAME with other engines, and the memory that they need.

    NAME is an installed or a listed model, a hub id, the folder of a checkpoint, or a GGUF file. Nothing is run.
    """
    from .printing.serve_with import servings

    place, found = servings(name, context)
    if as_json:
        engines = [{**dataclasses.asdict(one), "lines": list(one.lines)} for one in found]
        click.echo(json.dumps({"checkpoint": place, "engines": engines}, indent=2))
        return
    for one in found:
        click.echo(printable(f"# {one.engine}: about {memory(one.bytes)} of {one.where} (an estimate)"))
        click.echo(printable("\n".join(one.lines)))
        click.echo(f"# then: floe-chat --connect {one.at}\n")
    note("Whether an engine supports this family, its own documentation says.")


@models.command("add-server", short_help="Save a server for --connect NAME.")
@click.argument("name")
@click.argument("url")
@click.option("--model", default="", metavar="NAME", help="The model there.  [default: the only one]")
@click.option("--key", "ask_key", is_flag=True, help="Ask for the server's key, and save it too.")
def add_server(name: str, url: str, model: str, ask_key: bool) -> None:
    """Save the server at URL as NAME: `floe-chat --connect NAME` then connects to it.

    Nothing is sent now. A key is asked for, or read from standard input, and saved in a file that only you can read.
    """
    from ..client.remote.address import Address, Key, need_key
    from ..settings.servers import SavedServer, keep, servers_file

    address = Address.parse(url)
    key = Key()
    if ask_key:
        typed = click.prompt("Key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline(1 << 14)
        key = need_key(typed, "What you typed")
    keep(SavedServer(name, address.base, model, key.value))
    note(f"Saved in {servers_file()}. Connect to it: floe-chat --connect {name}")


@models.command("remove-server", short_help="Delete a saved server and its key.")
@click.argument("name")
def remove_server(name: str) -> None:
    """Delete the saved server NAME, and its key."""
    from ..settings.servers import forget as forget_server

    forget_server(name)
    note(f"Deleted the server {name}.")


def _write(file: Path, text: str, *, force: bool) -> None:
    """Raises: UsageError: it is there, or cannot be written."""
    if file.is_dir() or (file.exists() and not force):
        kind = "a folder" if file.is_dir() else "there already"
        raise UsageError(f"{file} is {kind}", "", "Give another file, or --force to replace a file.")
    try:
        private_file.replace(file, text, private_file.SHARED)
    except OSError as error:
        raise private_file.unwritable(file, error) from error
    note(f"Wrote {file}.")


@click.command(short_help="Show where settings, chats, models and the log are.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def paths(as_json: bool) -> None:
    """Show where floe-chat stores settings, chats, models, caches, states of chats and the log."""
    from ...engine.state_folder import states_folder
    from ..history import history_file
    from ..settings.file import settings_file

    found = {
        "settings": settings_file(),
        "history": history_file(),
        "models": catalog.models_folder(),
        "cache": Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)),
        "states": states_folder(),
        "log": log_file(),
    }
    if as_json:
        click.echo(json.dumps({name: str(path) for name, path in found.items()}, indent=2))
    else:
        for name, path in found.items():
            click.echo(printable(f"{name:<10}{path}"))


def _found() -> dict[str, Any]:
    begun, left = unfinished(), leftovers()
    waiting = {one.name for one in begun} | {path.name for one in left for path in one.paths}
    installed = [one for one in catalog.installed() if one.name not in waiting]
    here = {one.name for one in installed} | waiting
    return {
        "folder": str(catalog.models_folder()),
        "installed": [
            {"name": one.name, "folder": str(one.folder), "bytes": one.bytes, "trouble": one.trouble}
            for one in installed
        ],
        "unfinished": [{"name": one.name, "model": one.model, "bytes": one.taken} for one in begun],
        "left": [
            {"name": one.name, "paths": [str(path) for path in one.paths], "bytes": one.bytes, "cause": one.cause}
            for one in left
        ],
        "servers": [{"name": one.name, "url": one.url, "model": one.model} for one in servers()],
        "listed": [
            {"name": one.name, "repo": one.repo, "checkpoint_bytes": one.checkpoint_bytes, "gated": one.gated}
            for one in catalog.PUBLISHED
            if one.name not in here
        ],
    }


def _text(found: dict[str, Any]) -> str:
    def line(name: str, about: str) -> str:
        return f"  {name:<32}{about}"

    lines = ["Installed"]
    lines += [
        line(one["name"], one["trouble"] or f"{units.size(one['bytes'])}, {shown(Path(one['folder']))}")
        for one in found["installed"]
    ]
    if found["unfinished"]:
        lines += ["", "Unfinished (`floe-chat setup` continues)"]
        lines += [
            line(one["name"], f"{units.size(one['bytes'])} so far, {one['model']}") for one in found["unfinished"]
        ]
    if found["left"]:
        lines += ["", "Left over by setups that nothing continues (`floe-chat models remove NAME` deletes it)"]
        lines += [line(one["name"], f"{units.size(one['bytes'])}, {one['cause']}") for one in found["left"]]
    if found["servers"]:
        lines += ["", "Servers (`floe-chat --connect NAME`; your questions go there)"]
        lines += [line(one["name"], " ".join(filter(None, (one["url"], one["model"])))) for one in found["servers"]]
    if found["listed"]:
        lines += ["", "Available (`floe-chat plan` ranks them for this machine, `floe-chat setup NAME` sets one up)"]
        lines += [
            line(one["name"], f"{units.size(one['checkpoint_bytes'])} to download, {one['repo']}")
            for one in found["listed"]
        ]
    return "\n".join(lines)


def _bytes(folder: Path) -> int:
    return sum(found.st_size for found in files(folder))
