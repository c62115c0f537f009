"""`floe-chat setup`: plan, download, pack and check one model from the command line."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ....models import catalog
from ....models.errors import AccessError, FloeError, UsageError
from ....models.paths import expanded
from ....models.quantities import fetching
from ...progress import clear, note, step
from ...setup import elsewhere
from ...setup.adding import assistant as assistant_from
from ...setup.adding import assistant_of, lacks_head, source_of
from ...setup.flow import Setup, SetupProgress
from ...setup.packing_progress import time_left
from ...setup.ready_words import claims, in_short, is_remote, takes
from ...setup.setups import look_up
from ...setup.wish import Wish, bad_notes, discard, forget, of_ready, unfinished, wish
from ...text import units
from ...text.plain_text import printable

if TYPE_CHECKING:
    from ....engine.planning.machine import Machine
    from ....engine.planning.plan import Plan
    from ....models.catalog_entry import CatalogEntry

LookUp = Callable[[Wish], "tuple[CatalogEntry, str | None]"]


def offered(
    machine: Machine, wanted: Wish, entry: CatalogEntry, look_up: LookUp, *, ask: bool
) -> tuple[Wish, str | None] | None:
    """The setup of the ready pack of `entry`, and the token that it needs, once the user has agreed to it.

    None: the model is to be packed here. look_up: what is at the place of a `Wish`, and the token if one was asked for.

    Raises:
        FloeError: it cannot be used or does not fit this machine, and there is no checkpoint to pack instead.
    """
    from ....engine.planning.plan import make

    token: str | None = None
    ready = entry.ready
    assert ready is not None
    alone = entry.only_pack is not None
    if not ready.digest:
        try:
            found, token = look_up(of_ready(wanted, ready))
            if found.ready is None:
                raise UsageError(f"{ready.place} is no pack", "It holds a checkpoint.")
        except AccessError:
            raise
        except FloeError as error:
            note(f"The ready pack cannot be used: {error.title}. {error.cause} It will be packed here.")
            return None
        ready = found.ready
    packed = entry.as_pack
    assert packed is not None
    plan = make(machine, packed)
    if plan.chosen is None and not alone:
        note(f"The ready pack {ready.place} does not fit this machine. {' '.join(plan.why)}")
        return None
    for line in _lines(plan, wanted, alone=alone):
        note(line)
    if plan.chosen is None:
        raise FloeError(f"{wanted.name} does not fit this machine", " ".join(plan.why), plan.instead)
    if ask and not _agreed(alone=alone):
        return None
    return of_ready(wanted, ready), token


def _lines(plan: Plan, wanted: Wish, *, alone: bool) -> list[str]:
    from ....engine.planning.reasons import describe

    ready = plan.entry.ready
    assert ready is not None
    lines = [f"{wanted.name}: {ready.place} into {wanted.place} ({in_short(ready)})", *claims(ready)]
    if (one := plan.chosen) is not None:
        speed = f"about {one.decode.mid:.2g} tokens/s ({one.decode.low:.2g} to {one.decode.high:.2g}) on this machine."
        lines.append(f"{describe(one.spec)}: {speed}")
    lines.append(takes(ready))
    if alone and not is_remote(ready):
        lines.append(f"Without a copy: floe-chat --model {ready.place}")
    return lines


def _agreed(*, alone: bool) -> bool:
    """Whether to take it; False: pack the model here instead.

    Raises:
        UsageError: nobody can be asked. click.Abort: neither.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "The setup needs a confirmation", "Standard input is not a terminal.", "Add --yes to start without one."
        )
    if alone:
        if not click.confirm("Take it?", default=True, err=True):
            raise click.Abort
        return True
    choice = click.Choice(["y", "n", "p"], case_sensitive=False)
    answer = click.prompt(
        "Take it? (y: yes, n: no, p: pack it here instead)", default="y", type=choice, show_choices=False, err=True
    )
    if answer == "n":
        raise click.Abort
    return answer == "y"


def shorter(wanted: Wish, entry: CatalogEntry, *, ask: bool) -> CatalogEntry | None:
    """The GGUF copy of a listed model, if there is one and the person wants it instead of the original weights."""
    from ....engine.planning.reasons import costs, from_gguf, prefers

    if not ask or not sys.stdin.isatty() or wanted.local is not None or entry.ready:
        return None
    if (copy := from_gguf(entry)) is None:
        return None
    sizes = units.size(copy.download_bytes), units.size(entry.download_bytes)
    question = f"Download it as {copy.rounding} from {entry.gguf}, about {sizes[0]} instead of {sizes[1]}?"
    note(costs(copy.rounding))
    return copy if click.confirm(question, default=prefers(entry, copy), err=True) else None


def described(entry: CatalogEntry, *, named: bool) -> list[str]:
    """Which of a repository's GGUF files is taken, and what the others are, in lines; `named`: as the person asked."""
    if not entry.others or not entry.repo:
        return []
    label = entry.repo.rpartition(":")[2]
    why = "" if named else ", the first of those that lose little for their size"
    others = ", ".join(f"{name} ({units.size(nbytes)})" for name, nbytes in entry.others)
    return [f"Of its GGUF files it takes {printable(label)}{why}; there are also {printable(others)}."]


def found(wanted: Wish, entry: CatalogEntry, look: bool | None, *, ask: bool) -> elsewhere.Copy | None:
    """A copy of `entry` that the user wants to be packed instead of a download.

    look: whether its folders may be looked through; None: the user is asked, if there are such folders.
    """
    asking = ask and sys.stdin.isatty()
    if wanted.local is not None or entry.only_pack or look is False or (look is None and not asking):
        return None
    if not (said := elsewhere.programs()):
        if look:
            note("LM Studio, Ollama and llama.cpp have no folders here.")
        return None
    if look is None and not click.confirm(f"Look for a copy of {entry.name} in the folders of {said}?", True, err=True):
        return None
    copies = elsewhere.copies(entry)
    if not copies:
        note(f"There is no copy of {entry.name} in the folders of {said}.")
        return None
    for copy in copies:
        note(f"{printable(copy.called)} of {copy.program}: {describe(copy)}, {printable(str(copy.entry.folder))}")
    first = copies[0]
    question = f"Pack {printable(first.called)} instead of downloading {units.size(entry.download_bytes)}?"
    if asking and not click.confirm(question, default=not first.entry.coarse, err=True):
        return None
    return first


def describe(copy: elsewhere.Copy) -> str:
    """Its size, and what its weights were rounded to."""
    return f"{units.size(copy.bytes)}, {copy.entry.rounding or '16 bits'}"


_LOOK_S = 0.2
_LEAVING_S = 2.0  # that Ctrl+C waits for the current work, which is repeated later


@click.command(short_help="Download a model, pack it for this machine, and check it.")
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--name", help="The model's name on this machine.  [default: its listed name]")
@click.option("--up", type=int, help="Bits of the signal: 2, 3, 4, 8 or 16.  [default: chosen by the plan]")
@click.option("--rows", type=int, help="Bits of the rows: 2, 3, 4, 8 or 16.  [default: chosen by the plan]")
@click.option("--dense", type=int, help="Bits of attention: 4, 8 or 16.  [default: chosen by the plan]")
@click.option("--pack-here", is_flag=True, help="Pack the model on this machine, even if there is a ready pack of it.")
@click.option(
    "--to", metavar="FOLDER", help="Store the pack here, such as on another disk. The models folder links to it."
)
@click.option(
    "--look/--no-look",
    default=None,
    help="Look for a copy in the folders of LM Studio, Ollama and llama.cpp, and pack that.  [default: ask]",
)
@click.option("--no-draft", is_flag=True, help="Leave out the head that guesses further tokens, where there is one.")
@click.option(
    "--assistant",
    metavar="PLACE",
    help="For Gemma 4: the model that guesses its tokens, a folder or a hub id.  [default: the listed one]",
)
@click.option("--yes", "-y", is_flag=True, help="Start without asking.")
@click.option(
    "--tune/--no-tune",
    "tuning",
    default=None,
    help="Measure the model's own presets at the end; it reads a short text some 25 times.  [default: ask]",
)
@click.option("--forget", "forgetting", is_flag=True, help="Delete an unfinished setup of MODEL, downloads included.")
@click.pass_context
def setup(
    ctx: click.Context,
    model: str | None,
    name: str | None,
    pack_here: bool,
    to: str | None,
    look: bool | None,
    no_draft: bool,
    assistant: str | None,
    yes: bool,
    tuning: bool | None,
    forgetting: bool,
    **bits: Any,
) -> None:
    """Download MODEL, pack it for this machine, and check it. Then you can chat with it.

    MODEL is a listed name (`floe-chat models` lists them), a hub id (owner/name, or owner/name-GGUF:Q6_K for a GGUF
    file there), the folder of a downloaded checkpoint, or a GGUF file; without MODEL, the one that `floe-chat plan`
    recommends is offered. Before it starts, it shows what the setup takes and how fast the model will be.

    MODEL can also be a ready pack, which is fetched as it is: a repository, a folder, or the address of a folder on a
    web server, with a pack's manifest.json in it.

    Where MODEL is set up already, without the head for guessing further tokens that it was published with, that head
    is fetched and added; Gemma 4 has an assistant instead, a small model of its own.

    You can stop it at any time with Ctrl+C. The same command, or `floe-chat setup` alone, continues it. For a model
    with terms to accept, the token comes from HF_TOKEN or `hf auth login`; otherwise you are asked for one, and it is
    not saved.

    \b
    floe-chat setup mixtral-8x7b-instruct
    floe-chat setup ~/Downloads/Mixtral-8x7B-Instruct-v0.1 --name mixtral --up 4
    """
    begun = unfinished()
    if forgetting:
        _forget(begun, model, name)
        return
    for bad in bad_notes():
        note(str(bad))
    if no_draft and assistant is not None:
        raise click.UsageError("--assistant and --no-draft exclude each other")
    wanted = _begun(begun, model, name)
    given = {part: count for part, count in bits.items() if count is not None}
    token: str | None = None
    if wanted is None and not no_draft and (lacking := _headless(model, name, assistant)) is not None:
        _add_head(*lacking, assistant, ask=not yes)
        click.echo(printable(str(lacking[0])))
        return
    if wanted is None:
        called = model or _recommended(begun, ask=not yes)
        wanted, token = _planned(
            called, name, given, to=to, here_only=pack_here, look=look, ask=not yes, draft=not (no_draft or assistant)
        )
    else:
        _check_same(wanted, given, model)
        if to is not None and expanded(to).absolute() != wanted.beside:
            raise UsageError(
                f"The setup of {wanted.name} was started in another folder",
                f"It stores the pack in {wanted.beside}.",
                f"Leave --to out to continue it, or delete it first: floe-chat setup {wanted.name} --forget",
            )
        note(f"Continuing the setup of {wanted.name}.")
    _run(wanted, token)
    if assistant is not None:
        _add_head(wanted.folder, None, assistant, ask=False)
    _tune(wanted, tuning, ask=not yes)
    click.echo(printable(str(wanted.folder)))


def _forget(begun: list[Wish], model: str | None, name: str | None) -> None:
    """Delete an unfinished setup, or only the note if the note cannot be used."""
    if (wanted := _begun(begun, model, name)) is not None:
        forget(wanted)
        note(f"Deleted the unfinished setup of {wanted.name}.")
        return
    bad = next((one for one in bad_notes() if one.name in (model, name)), None)
    if bad is None:
        raise UsageError("There is no unfinished setup of that name", _names(begun), "Name the model.")
    discard(bad)
    note(f"Deleted {bad.path}, which could not be used: {bad.cause} Nothing else was deleted.")


def _begun(begun: list[Wish], model: str | None, name: str | None) -> Wish | None:
    """The unfinished setup that is meant, if one is.

    Raises:
        UsageError: the name belongs to another model's setup, or several setups of the model are unfinished.
    """
    if model is None and name is None:
        return begun[0] if len(begun) == 1 else None
    source, usual, _ = _meaning(model)
    entry = catalog.published(usual) if usual else None
    places = (source, entry.ready.place if entry and entry.ready else source)
    if name is not None:
        found = next((one for one in begun if one.name == name), None)
        if found is not None and model is not None and found.model not in places:
            raise UsageError(
                f"The name {name} is taken",
                f"It is the unfinished setup of {found.model}.",
                f"Choose another name, or delete that setup: floe-chat setup {name} --forget",
            )
        return found
    same = [one for one in begun if _is_from(one, places)]
    named = [one for one in begun if one.name == model] + [one for one in same if one.name == usual]
    if named:
        return named[0]
    if len(same) > 1:
        raise UsageError(
            f"Several setups of {source} are unfinished",
            f"Their names: {', '.join(one.name for one in same)}.",
            "Give the name of one: floe-chat setup NAME",
        )
    if not same and (taken := next((one for one in begun if one.name == usual), None)) is not None:
        raise UsageError(
            f"The name {usual} is taken",
            f"It is the unfinished setup of {taken.model}.",
            f"Choose another name with --name, or delete that setup: floe-chat setup {usual} --forget",
        )
    return same[0] if same else None


def _is_from(begun: Wish, places: tuple[str | None, ...]) -> bool:
    """Whether a setup is of a model at one of these places; of GGUF files, whichever of them if a place names none."""
    return any(
        place and place.lower() in (begun.model.lower(), begun.model.lower().partition(":")[0]) for place in places
    )


def _meaning(model: str | None) -> tuple[str | None, str | None, str]:
    """What `wish` would set up, and its name, both None if there is no such model; and the commit, if one is named."""
    try:
        source = catalog.source(model) if model else None
    except UsageError:
        source = None
    return (source.place, source.name, source.commit) if source else (None, None, "")


def _check_same(wanted: Wish, given: dict[str, int], model: str | None) -> None:
    """Raises: UsageError: other widths or another commit were given than those that the setup was started with."""
    now = {"up": (wanted.up,), "rows": (wanted.gate, wanted.down), "dense": (wanted.dense,)}
    if any(set(now[part]) != {count} for part, count in given.items()):
        raise UsageError(
            f"The setup of {wanted.name} was started with other widths",
            f"Up has {wanted.up} bits, gate {wanted.gate}, down {wanted.down}, attention {wanted.dense}.",
            f"Leave the widths out to continue it, or delete it first: floe-chat setup {wanted.name} --forget",
        )
    asked = _meaning(model)[2]
    if asked and wanted.commit and wanted.commit != asked:
        raise UsageError(
            f"The setup of {wanted.name} was started with another commit",
            f"It downloads commit {wanted.commit} of {wanted.model}.",
            f"Leave the commit out to continue it, or delete it first: floe-chat setup {wanted.name} --forget",
        )


def _headless(model: str | None, name: str | None, assistant: str | None) -> tuple[Path, Path | None] | None:
    """The folder of a pack that is set up and lacks its drafting head, and that of its checkpoint, if it is named; also
    of one that is to have another assistant.
    """
    usual = _meaning(model)[1]
    folders = [catalog.models_folder() / called for called in (name, model if name is None else None, usual) if called]
    try:
        folder = next(
            (each for each in folders if (each / "manifest.json").is_file() and (assistant or lacks_head(each))), None
        )
        local = catalog.source(model).folder if model and _meaning(model)[1] else None
    except (OSError, ValueError):
        return None  # too long a name
    return None if folder is None or (name is not None and folder.name != name) else (folder, local)


def _add_head(folder: Path, source: Path | None, assistant: str | None, *, ask: bool) -> None:
    """Add the drafting head, or assistant, of a model that is set up."""
    from ....engine.planning.footprint import Footprint
    from ....models.checking.repair import add_draft
    from ....models.pack.manifest import DRAFT, Manifest

    manifest = Manifest.read(folder)
    w, family = manifest.widths, manifest.family
    if assistant and family.assistant is None:
        raise UsageError(f"{folder.name} takes no assistant", f"{family.called} has none.", "Leave --assistant out.")
    place = str(source or manifest.source.name)
    known = assistant_of(manifest)
    if family.assistant is not None:
        place, source = assistant or known, None
    entry = next((each for each in catalog.PUBLISHED if known and each.assistant == known), None)
    sizes = entry.sizes if entry else catalog.described(folder).sizes
    takes = units.size(Footprint.of(sizes, Wish("", "", w.up, w.gate, w.down, w.dense).spec()).draft)
    if source is None and manifest.source.commit is None and family.assistant is None:
        raise UsageError(
            f"{folder.name} is set up, without the head that guesses further tokens",
            "It was packed from a folder or a GGUF file.",
            f"To add it, give the checkpoint: floe-chat setup FOLDER --name {folder.name}",
        )
    if DRAFT not in manifest.beside:
        what = "head" if family.assistant is None else "assistant"
        note(f"{folder.name} is set up, without the {what} that guesses further tokens, which makes answers faster.")
    size = f" and takes {takes}" if family.assistant is None or place == known else ""
    note(f"It comes from {printable(place)}{size}. The model can be used meanwhile.")
    if ask:
        if not sys.stdin.isatty():
            hint = "Add --yes to start without one."
            raise UsageError("Adding it needs a confirmation", "Standard input is not a terminal.", hint)
        if not click.confirm("Add it?", default=True, err=True):
            raise click.Abort
    try:
        own = family.assistant is None
        found = source_of(folder, manifest, source, head=True) if own else assistant_from(place, folder, manifest)
        with found as checkpoint:
            add_draft(checkpoint, folder, lambda what, share, _left: step(f"{what}, {share:.0%}"))
    finally:
        clear()
    note(f"{folder.name} has its {family.drafter.removeprefix('own ')} now.")


def _recommended(begun: list[Wish], *, ask: bool) -> str:
    """The model to offer where none is named: the first of `floe-chat plan` that is not here yet.

    Raises:
        UsageError: a model has to be named, since nobody can be asked or several setups are unfinished, or none fits.
    """
    from ....engine.planning.plan import offers, recommended
    from ..plan import here

    if begun:
        raise UsageError("Which model?", _names(begun), "Name one: floe-chat setup NAME")
    known = {pack.name for pack in catalog.installed()}
    first = recommended(offers(here(), [entry for entry in catalog.PUBLISHED if entry.name not in known]))
    if first is None:
        hint = "`floe-chat plan` shows what is missing. The built-in demo model always works: floe-chat"
        raise UsageError("No other listed model fits this machine", "", hint)
    name = first.entry.name
    if not ask or not sys.stdin.isatty():
        listed = ", ".join(entry.name for entry in catalog.PUBLISHED)
        raise UsageError(
            "Which model?",
            f"Recommended for this machine: {name}. Listed models: {listed}.",
            f"Name one: floe-chat setup {name}. `floe-chat plan` compares them on this machine.",
        )
    note(f"{name} is recommended for this machine; `floe-chat plan` compares all models.")
    return name


def _names(begun: list[Wish]) -> str:
    return f"Unfinished setups: {', '.join(one.name for one in begun)}." if begun else "No setup is unfinished."


def _planned(
    model: str,
    name: str | None,
    given: dict[str, int],
    *,
    to: str | None,
    here_only: bool,
    look: bool | None,
    ask: bool,
    draft: bool,
) -> tuple[Wish, str | None]:
    """What to set up, and the token if one was asked for, once the user has agreed to the plan."""
    from ....engine.planning.plan import make
    from ....models.hub.download import room
    from ..plan import here

    wanted = wish(model, name, to=to)
    entry, token = _entry(wanted)
    if entry.file_bytes and entry.repo:
        wanted = dataclasses.replace(wanted, model=entry.repo)
    if entry.only_pack and (given or here_only):
        hint = "Leave out --up, --rows, --dense and --pack-here, or give the original model."
        raise UsageError(f"{wanted.model} is packed already", "Its bits per weight cannot be changed.", hint)
    if (copy := found(wanted, entry, look, ask=ask)) is not None:
        wanted, entry = wish(str(copy.entry.folder), wanted.name, to=to), copy.entry
    machine = here()
    if (copy := shorter(wanted, entry, ask=ask)) is not None:
        wanted, entry = dataclasses.replace(wanted, model=copy.repo or ""), copy
    if wanted.to:
        machine = dataclasses.replace(machine, disk_free=room(wanted.beside))
    if entry.ready and not (given or here_only):
        taken = offered(machine, wanted, entry, _looked_up, ask=ask)
        if taken is not None:
            return taken[0], token or taken[1]
    entry = entry if draft else entry.headless
    plan = make(machine, entry)
    if plan.chosen is None and not given:
        raise FloeError(
            f"{entry.name} does not fit this machine",
            " ".join((*plan.why, plan.instead)),
            "Give the widths (--up, --rows, --dense) to pack it anyway, for another machine.",
        )
    spec = plan.chosen.spec if plan.chosen else None
    rows = given.get("rows")
    bits = {
        "up": given.get("up", spec.up if spec else 3),
        "gate": rows or (spec.gate if spec else 4),
        "down": rows or (spec.down if spec else 4),
        "dense": given.get("dense", spec.dense if spec else 4),
    }
    wanted = dataclasses.replace(wanted, **bits, draft=draft)
    for line in _told(plan, wanted, named=bool(catalog.source(model).file)):
        note(line)
    if ask:
        if not sys.stdin.isatty():
            raise UsageError(
                "The setup needs a confirmation", "Standard input is not a terminal.", "Add --yes to start without one."
            )
        if not click.confirm("Start?", default=True, err=True):
            raise click.Abort
    return wanted, token


def _entry(wanted: Wish) -> tuple[CatalogEntry, str | None]:
    """The model to set up, and the token if one had to be asked for."""
    known = catalog.published(wanted.model)
    return (known, None) if known is not None else _looked_up(wanted)


def _looked_up(wanted: Wish) -> tuple[CatalogEntry, str | None]:
    """What is there, and the token if one had to be asked for."""
    try:
        return look_up(wanted), None
    except AccessError as error:
        token = _asked(error)
        return look_up(wanted, token), token


def _told(plan: Plan, wanted: Wish, *, named: bool) -> list[str]:
    """What the setup makes, at the widths wished for, in a few lines; `floe-chat plan` has the rest.

    named: whether the person said which GGUF file to take.
    """
    from ....engine.planning.options import option
    from ....engine.planning.reasons import describe, lacks, rounded_before, shorter_file, smaller

    made = option(plan.machine, plan.entry, wanted.spec(), plan.context)
    lines = [f"{wanted.name}: {wanted.model} into {wanted.place}"]
    if made.missing:
        lines.append(f"{describe(made.spec)} does not fit this machine: {lacks(made.missing)} too little.")
    else:
        lines.append(
            f"{describe(made.spec)}: about {made.decode.mid:.2g} tokens/s "
            f"({made.decode.low:.2g} to {made.decode.high:.2g}) on this machine."
        )
    if twice := rounded_before(plan.entry, describe(made.spec)):
        lines.append(twice)
    lines += described(plan.entry, named=named)
    if wanted.local is None:
        peak, fetched = units.size(made.disk["peak"]), units.size(plan.entry.checkpoint_bytes)
        takes = fetching(plan.entry.checkpoint_bytes)
        lines.append(f"It downloads {fetched} ({takes}) and needs up to {peak} of disk meanwhile.")
        lines += filter(None, (smaller(plan.entry), shorter_file(plan.entry)))
    if draft := made.disk.get("draft"):
        what = (
            f"assistant ({plan.entry.assistant}) guesses further tokens and"
            if plan.entry.assistant
            else ("head that guesses further tokens")
        )
        lines.append(f"Its {what} takes {units.size(draft)} of it; --no-draft leaves it out.")
    if plan.pack_s is not None:
        lines.append(f"Packing takes {time_left(plan.pack_s).removesuffix(' left')} on this machine.")
    return lines


def _asked(error: AccessError) -> str:
    """A token, typed by the person; not saved."""
    if not sys.stdin.isatty():
        raise error
    note(" ".join(part for part in (error.title + ".", error.cause, error.hint) if part))
    return click.prompt("Token", hide_input=True, err=True)


def _run(wanted: Wish, token: str | None) -> None:
    from ....models.pack.manifest import Manifest

    while True:
        try:
            _follow(wanted, token)
        except AccessError as error:
            if token is not None:
                raise
            token = _asked(error)
        else:
            break
    if why := Manifest.read(wanted.folder).inexact:
        note(f"Without preset Exact: {why}")
    note(f"{wanted.name} is ready. Chat with it: floe-chat --model {wanted.name}")


def _tune(wanted: Wish, tuning: bool | None, *, ask: bool) -> None:
    """Measure the presets of a model that is ready, if the person wants that."""
    from ....models.pack.manifest import Manifest

    if tuning is None and Manifest.read(wanted.folder).tuned:
        return
    if tuning is None and ask and sys.stdin.isatty():
        note("Its presets High, Balanced and Fast are those of other models. They can be measured on this one now.")
        tuning = click.confirm("Measure them?", default=True, err=True)
    if not tuning:
        note(f"To measure its own presets: floe-chat tune {wanted.name}")
        return
    from ..quality.comparison import OWN_TOKENS
    from ..quality.tune import by_itself

    try:
        by_itself(wanted.folder, None, OWN_TOKENS, "auto", as_json=False, err=True)
    except KeyboardInterrupt:
        note(f"Stopped. {wanted.name} keeps the usual presets; to measure them: floe-chat tune {wanted.name}")
        raise


def _follow(wanted: Wish, token: str | None) -> None:
    shown = 0
    running = Setup(wanted, token).start()
    try:
        while not running.wait(_LOOK_S):
            now = running.progress()
            for notice in now.notices[shown:]:
                note(notice)
            shown = len(now.notices)
            step(line(now))
    except KeyboardInterrupt:
        running.cancel()
        running.wait(_LEAVING_S)  # not until a slow hub has answered
        note("Stopped. Everything done so far is saved; `floe-chat setup` continues.")
        raise
    finally:
        clear()
    if running.error is not None:
        raise running.error


def line(now: SetupProgress) -> str:
    """The progress in one line."""
    parts = [f"{now.step}, {now.share:.0%}" if now.share else now.step]
    if (download := now.download) is not None and download.state not in ("done", "waiting"):
        rate = f" at {units.size(download.rate)}/s" if download.rate else ""
        parts.append(download.note or f"downloaded {units.size(download.done)} of {units.size(download.total)}{rate}")
    if now.left is not None:
        parts.append(time_left(now.left))
    return " · ".join(parts)
