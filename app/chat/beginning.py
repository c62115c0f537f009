"""The start of a chat or a question: settings, command line and a saved chat combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click
from click.core import ParameterSource

from ...engine import state_folder
from ...engine.events import SpreadBy
from ...engine.ranges import Wanted
from ...models import catalog
from ...models.errors import FloeError, UsageError
from ...models.quantities import memory_size
from ..arguments import sampling_from
from ..client.chat_client import ChatClient
from ..client.interface import Client
from ..settings.file import read, settings_file, with_installed_model
from ..settings.settings import disk_size, fill
from ..text.plain_text import printable
from . import model_choice

if TYPE_CHECKING:
    from ...engine.events import Sampling
    from ..history import ChatSetup, Conversation
    from ..settings.settings import Settings


# Options about this machine's models; and the names of options that differ from their fields'.
_HERE = ("preset", "device", "vram", "placement", "predictor", "drafter", "draft", "parallel", "balance")
_CALLED = {"placement": "mix", "draft": "no-draft", "drafter": "draft"}


@dataclass(frozen=True, slots=True)
class Beginning:
    """Which model answers, and how.

    Attributes:
        system: the system prompt, if one is set. chat: the saved chat to continue. own_model: `client` has that chat's
            model, or should have: no `--model` was given. remark: why it has another one, or what of the chat a server
            gets, or "". thinking: what to do with the model's, see `settings.THINKING`. local: makes an engine for
            models of this machine, where `client` is a server.
    """

    settings: Settings
    client: Client
    local: Callable[[Path], ChatClient]
    preset: str | None
    sampling: Sampling
    max_tokens: int
    system: str | None
    chat: Conversation | None = None
    own_model: bool = True
    remark: str = ""
    thinking: str = "fold"

    @property
    def setup(self) -> ChatSetup:
        """Of a new chat."""
        from ..history import ChatSetup

        return ChatSetup(self.client.reference, self.preset, self.sampling, self.system or "", self.settings.persona)


def begin(ctx: click.Context, options: dict[str, Any], *, last: bool = False, chat: int | None = None) -> Beginning:
    """The command's `options`, with the settings where the command line says nothing; nothing is loaded yet.

    Args:
        last: continue the chat that was written to last. chat: continue the chat with this number or id.

    Raises:
        UsageError: an option cannot be used, or there is no such chat or model. FloeError: something cannot be read.
    """
    if last and chat is not None:
        raise click.UsageError("--continue opens the last chat. Give either --continue or --chat N.")
    given = [name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    _name_cards(options, given)
    address, key_file = options.pop("connect"), options.pop("key_file")
    found = read(settings_file())
    if "model" not in given and address is None:
        found = with_installed_model(found, settings_file())
    for problem in found.problems:
        click.echo(printable(f"floe-chat: {settings_file()}: {problem}; {problem.effect}"), err=True)
    options = fill(options, given, found.settings)
    if (drafter := options.pop("drafter")) and "drafter" in given and "draft" in given:
        raise click.UsageError("--no-draft guesses no tokens. Give either --no-draft or --draft NAME.")
    options["draft"] = drafter if drafter and (options["draft"] or "drafter" in given) else options["draft"]
    saved = model_choice.saved_chat(chat) if last or chat is not None else None
    if address is not None:
        return _connected(address, key_file, options, given, found.settings, saved)
    if key_file is not None:
        raise click.UsageError("--key-file is the key of a server. Give --connect URL too.")
    if "placement" in given and options["device"] == "cpu":
        raise click.UsageError("--mix divides a card's memory. With --device cpu all experts are in RAM.")
    own_model, remark = "model" not in given, ""
    if saved is not None and own_model and (model := saved.setup.model):
        try:
            catalog.find(model, saved=True)
            options["model"] = model
            if "preset" not in given:
                options["preset"] = _own_preset(saved, catalog.find(model, saved=True)) or options["preset"]
        except FloeError as error:
            remark = model_choice.missing(model, error, options["model"])
    pack, preset = catalog.find(options.pop("model")), options.pop("preset")
    if drafter and "drafter" in given:
        need_drafter(drafter, pack)
    thinking = options.pop("thinking", found.settings.thinking)
    local = _engine(options, found.settings, think=thinking != "off")
    sampling, max_tokens, system = sampling_from(options, pack)
    started = found.settings, local(pack, preset), local, preset
    return Beginning(*started, sampling, max_tokens, system, saved, own_model, remark, thinking)


class _Local(Protocol):
    def __call__(self, pack: Path, preset: str | None = None, /) -> ChatClient: ...


def _engine(options: dict[str, Any], settings: Settings, *, think: bool) -> _Local:
    """What makes an engine for models of this machine, by the options about that, which are taken out."""
    device, vram, kept = (options.pop(name, None) for name in ("device", "vram", "kv_memory"))
    named = {name: value for name in ("placement", "predictor", "draft") if (value := options.pop(name)) is not None}
    advanced = replace(settings.advanced, **named)
    Wanted.of(advanced.placement)
    parked, most = 0 if kept == "0" else memory_size(kept), memory_size(vram)
    spread = SpreadBy(*(options.pop(name) for name in ("parallel", "balance")))
    if not (states := disk_size(settings.states)):
        state_folder.delete(state_folder.files())  # of earlier starts
    states = states if settings.save_history else 0

    def make(pack: Path, preset: str | None = None, /) -> ChatClient:
        own = pack, preset, "auto" if device is None else device, most, advanced
        return ChatClient(*own, think=think, parked=parked, spread=spread, states=states)

    return make


def _name_cards(options: dict[str, Any], given: list[str]) -> None:
    """Several cards are named as one device is, with commas between them."""
    if (devices := options.pop("devices", None)) is None:
        return
    if "device" in given:
        raise click.UsageError("--device names one device and --devices several. Give one of them.")
    options["device"] = devices
    given[given.index("devices")] = "device"


def _connected(
    address: str,
    key_file: Path | None,
    options: dict[str, Any],
    given: Sequence[str],
    settings: Settings,
    saved: Conversation | None,
) -> Beginning:
    """As `begin`, with the server at `address`."""
    from ..client.remote.address import Address, Key, read_key
    from ..client.remote.client import RemoteClient
    from ..settings.servers import SavedServer, is_name, server

    here = [f"--{_CALLED.get(name, name)}" for name in _HERE if name in given]
    if here:
        raise click.UsageError(f"{here[0]} is for models of this machine. A server decides that itself.")
    kept = server(address) if is_name(address) else SavedServer("", address)
    model = options.pop("model") if "model" in given else kept.model or None
    for name in ("model", "preset"):
        options.pop(name, None)
    thinking = options.pop("thinking", settings.thinking)
    local = _engine(options, settings, think=thinking != "off")
    sampling, max_tokens, system = sampling_from(options, None)
    key = Key(kept.key) if kept.key and key_file is None else read_key(key_file)
    at = Address.parse(kept.url)
    client = RemoteClient(at, key, model, think=thinking != "off")
    remarks = [] if at.encrypted or at.loopback else [client.privacy]
    if saved is not None and not saved.setup.model.startswith(f"{at.base}/"):
        remarks.append(model_choice.sent_away(saved.setup.model, client.remote))
    remark = " ".join(remarks)
    started = settings, client, local, None
    return Beginning(*started, sampling, max_tokens, system, saved, remark=remark, thinking=thinking)


def _own_preset(chat: Conversation, pack: Path) -> str | None:
    """The preset that the chat was answered with, if its model still has it."""
    from ...engine import quality_presets
    from ...models.pack.packed_model import PackedModel

    with suppress(FloeError):
        return quality_presets.get(chat.setup.preset or "", PackedModel.open(pack).manifest).name
    return None


def need_drafter(name: str, pack: Path) -> None:
    """Raises FloeError: no pack of this name is there, or it cannot guess tokens for `pack`. Whether RAM has room is
    known when that is loaded.
    """
    from ...engine.context import CONTEXT
    from ...engine.planning import drafter

    drafter.of_packs(name, pack, CONTEXT)


def need_saving(beginning: Beginning) -> None:
    """Raises UsageError: a saved chat is to be opened, and the settings turn saving off."""
    if beginning.chat is not None and not beginning.settings.save_history:
        raise UsageError(
            "No saved chat can be opened",
            "Saving is turned off: history.save is false in the settings.",
            "Turn it on, or continue without saving: floe-chat ask --continue",
        )
