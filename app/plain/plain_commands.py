"""The slash commands of `floe-chat --plain`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import NamedTuple, Protocol

from ...engine.events import Rule
from ...engine.quality_presets import PUBLISHED
from ...engine.ranges import PLACEMENTS, Wanted
from ...models import catalog
from ...models.errors import UsageError
from ...models.quantities import size
from ..chat.answer_settings import changed, listed, with_persona
from ..chat.dialogue import Dialogue
from ..chat.export_file import write_chat
from ..chat.model_choice import start_with
from ..client.interface import Choice, Client
from ..client.thinking import THINKING_CHOSEN, limit_of_off, need_mode
from ..history import AnswerStats, Attachment, ChatSetup, Conversation, History, Message, footer, read_attachment
from ..settings.file import settings_file
from ..settings.servers import servers
from ..settings.settings import Persona
from ..text_files import meant
from .plain_lines import remark, say
from .plain_markdown import plain_text

_LISTED = 20
_OTHERS = 3  # answers at a time
_DIGITS = 18  # of a chat's number at most: it fits 64 bits


class _Command(NamedTuple):
    usage: str
    does: str
    run: Callable[[str], None]


class Chat(Protocol):
    """The chat that commands change, see `PlainChat`."""

    client: Client
    history: History
    dialogue: Dialogue
    setup: ChatSetup
    personas: Mapping[str, Persona]
    presets: tuple[str, ...]
    preset: str
    thinking: str
    files: list[Attachment]
    stats: AnswerStats | None

    def ask(self, text: str, instead: Message | None = None) -> None:
        """Ask a question, in place of another or after the last answer."""

    def answer(self, instead: Message | None = None, *, fresh: bool = False) -> None:
        """Answer the last question, again if `instead` is its answer, by a `fresh` seed."""

    def show(self) -> None:
        """Print the chat from its beginning."""

    def use(self, chosen: Choice, placement: str | None = None) -> None:
        """Let another model or a server answer."""

    def set_quality(self, quality: Rule | str) -> None:
        """Answer with a preset, or with shares set by hand."""


class PlainCommands:
    """Runs lines that begin with a slash."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._deleted: list[tuple[int, int]] = []  # the mark for `undo`, and its chat
        commands = (
            _Command("/new", "starts a new chat; this one is saved", self._new),
            _Command("/again", "answers the last question again", self._again),
            _Command("/others", "answers it three times more, one after the other", self._others),
            _Command("/pick NUMBER", "continues with another answer to the last question", self._pick),
            _Command("/edit TEXT", "asks TEXT instead of your last question; the old version is saved", self._edit),
            _Command("/file PATH", "attaches a text file to your next question", self._attach),
            _Command("/history [WORDS]", "lists your last chats, or those that contain the words", self._history),
            _Command("/open NUMBER", "continues the chat with that number", self._open),
            _Command("/last", "continues your last chat", self._last),
            _Command("/rename TITLE", "gives this chat a title", self._rename),
            _Command("/export [FILE]", "writes this chat to a .md or .json file", self._export),
            _Command("/delete", "deletes this chat", self._delete),
            _Command("/undo", "restores the chat that you deleted last", self._undo),
            _Command("/models [NAME]", "lists the installed models, or switches to NAME", self._models),
            _Command("/preset [NAME]", "lists the quality presets, or uses NAME", self._preset),
            _Command("/mix [KIND]", "shows where experts are, or loads the model with another mix", self._mix),
            _Command(
                "/system [TEXT]", "shows this chat's system prompt, or sets it; /system none removes it", self._system
            ),
            _Command("/persona [NAME]", "lists the personas, or uses NAME", self._persona),
            _Command(
                "/thinking [fold|show|off]",
                "reads what the model thought before its last answer; or folds, shows or leaves out thinking",
                self._think,
            ),
            _Command("/set [NAME VALUE]", "shows the sampling values, or sets one: /set temperature 0.3", self._set),
            _Command("/stats", "shows the figures of the last answer", self._stats),
            _Command("/help", "shows this list", self._help),
            _Command("/quit", "quits, as Ctrl+D does", self._help),
        )
        self._commands = {command.usage.partition(" ")[0]: command for command in commands}
        same = {"/?": "/help", "/clear": "/new", "/retry": "/again", "/list": "/history", "/model": "/models"}
        self._by_name = self._commands | {other: self._commands[name] for other, name in same.items()}

    def obey(self, name: str, argument: str) -> None:
        """Run the command `name`. Raises FloeError: there is none of that name, or it cannot be done."""
        command = self._by_name.get(name)
        if command is None:
            close = difflib.get_close_matches(name, self._by_name, n=1)
            hint = f"Did you mean {close[0]}?" if close else "/help lists the commands."
            raise UsageError(f"There is no command {name}", "", hint)
        if not argument and " " in command.usage and "[" not in command.usage:
            raise UsageError(f"{name} needs more", "", f"Write: {command.usage}")
        command.run(argument)

    # Chats

    def _new(self, _argument: str) -> None:
        self._chat.dialogue.begin_anew(self._chat.setup)
        remark("Your next question starts a new chat.")

    def _again(self, _argument: str) -> None:
        last = self._last_message("assistant", "user")
        self._chat.answer(last if last.role == "assistant" else None)

    def _others(self, _argument: str) -> None:
        for at in range(_OTHERS):
            last = self._last_message("assistant", "user")
            if at == 0:
                remark("Ctrl+C stops the answer that is being written, and asks for no more.")
            self._chat.answer(last if last.role == "assistant" else None, fresh=True)
            if self._chat.stats is None or self._chat.stats.stop_reason == "cancelled":
                break
        last = self._last_message("assistant", "user")
        if last.siblings > 1:
            remark(f"This is answer {last.sibling} of {last.siblings}. /pick NUMBER continues with another one.")

    def _pick(self, number: str) -> None:
        last = self._last_message("assistant")
        self._chat.history.settle()
        digits = number.isdecimal() and len(number) <= _DIGITS
        if not digits or not self._chat.dialogue.switch(last, int(number) - last.sibling):
            raise UsageError(f"There is no answer {number!r}", f"The last question has {last.siblings}.", "")
        say(plain_text(self._last_message("assistant").text))

    def _edit(self, text: str) -> None:
        self._chat.ask(text, self._last_message("user"))

    def _last_message(self, *roles: str) -> Message:
        dialogue = self._chat.dialogue
        for message in reversed(dialogue.messages(dialogue.ids[-2:])):
            if message.role in roles:
                return message
        raise UsageError("There is no question in this chat yet", "", "Write one and press Enter.")

    def _attach(self, path: str) -> None:
        file = read_attachment(meant(path))
        self._chat.files.append(file)
        names = ", ".join(one.name for one in self._chat.files)
        remark(f"Attached to your next question: {names}.")

    def _history(self, words: str) -> None:
        history = self._chat.history
        if words:
            lines = list(dict.fromkeys(f"{hit.number}: {hit.name}" for hit in history.search(words, _LISTED)))
            remark("\n".join(lines) or f"No chat contains {words!r}.")
            return
        lines = [f"{one.number}: {one.name}, {one.messages} messages" for one in history.conversations(_LISTED)]
        remark("\n".join(lines) or "There are no chats yet.")

    def _open(self, number: str) -> None:
        if not number.isdecimal() or len(number) > _DIGITS:
            raise UsageError(f"{number!r} is not a chat number", "", "/history lists the numbers.")
        self._show(self._chat.history.numbered(int(number)))

    def _last(self, _argument: str) -> None:
        if (newest := self._chat.history.newest()) is None:
            raise UsageError("There is no earlier chat", "", "Write a question.")
        self._show(newest)

    def _show(self, found: Conversation) -> None:
        self._chat.dialogue.open(found.id)
        self._chat.show()

    def _identity(self) -> int:
        if (identity := self._chat.dialogue.id) is None:
            raise UsageError("This chat is empty", "", "Ask something first.")
        return identity

    def _rename(self, title: str) -> None:
        self._identity()
        name = " ".join(title.split())
        self._chat.dialogue.rename(name)
        self._chat.history.settle()
        remark(f"This chat is called {name}.")

    def _export(self, name: str) -> None:
        identity = self._identity()
        self._chat.history.settle()
        remark(f"Written to {write_chat(self._chat.history.tree(identity), name)}.")

    def _delete(self, _argument: str) -> None:
        identity = self._identity()
        self._deleted.append((self._chat.history.delete(identity), identity))
        self._chat.history.settle()
        self._chat.dialogue.begin_anew(self._chat.setup)
        remark("This chat is deleted. /undo restores it; your next question starts a new one.")

    def _undo(self, _argument: str) -> None:
        if not self._deleted:
            raise UsageError(
                "There is nothing to restore", "", "/undo restores a chat that you deleted since the start."
            )
        mark, identity = self._deleted.pop()
        self._chat.history.undo(mark)
        self._chat.history.settle()
        self._show(self._chat.history.conversation(identity))

    # What answers, and how

    def _models(self, name: str) -> None:
        chosen = self._chat.client.chosen
        if name:
            saved = next((one for one in servers() if one.name == name), None)
            self._chat.use(saved or catalog.find(name))
            answers = self._chat.client.reference
            if saved is None:
                start_with(settings_file(), answers)
            if self._chat.dialogue.ids:
                self._chat.dialogue.set_up(replace(self._chat.dialogue.setup, model=answers))
            return
        for one in catalog.installed():
            remark(f"{one.name}: {one.trouble or size(one.bytes)}{' (answers now)' if one.folder == chosen else ''}")
        for one in servers():
            remark(f"{one.name}: remote, {one.url}{' (answers now)' if one == chosen else ''}")

    def _preset(self, name: str) -> None:
        chat = self._chat
        published = [rule.name for rule in PUBLISHED]
        wanted = next((preset for preset in (*chat.presets, *published) if preset.lower() == name.lower()), None)
        if wanted is None or not chat.presets:
            problem = f"There is no preset {name!r}. " if name else ""
            listed = f"Presets, best quality first: {', '.join(chat.presets)}; as published: {', '.join(published)}."
            listed += f" In use: {chat.preset}."
            remark(f"{problem}{listed}" if chat.presets else f"{chat.client.remote} decides about quality.")
            return
        chat.set_quality(wanted)
        remark(f"{wanted} is used from the next answer on.")

    def _mix(self, kind: str) -> None:
        chat = self._chat
        if not kind:
            remark(f"Placement: {chat.client.placement}. There are {', '.join(PLACEMENTS)} and pool:SIZE.")
            return
        if chat.client.remote:
            raise UsageError(f"{chat.client.remote} decides where experts are")
        Wanted.of(kind)
        chat.use(chat.client.chosen, kind)

    def _system(self, text: str) -> None:
        setup = self._chat.dialogue.setup
        if not text:
            remark(setup.system_prompt or "This chat has no system prompt.")
            return
        self._chat.dialogue.set_up(replace(setup, system_prompt="" if text == "none" else text, persona=""))
        remark(
            "The system prompt is removed." if text == "none" else "The system prompt applies from the next answer on."
        )

    def _persona(self, name: str) -> None:
        if not name:
            remark(listed(self._chat.personas))
            return
        self._chat.dialogue.set_up(with_persona(self._chat.dialogue.setup, self._chat.personas, name))
        remark(f"The persona {name} applies from the next question on.")

    def _think(self, mode: str) -> None:
        chat = self._chat
        if mode:
            need_mode(mode)
            chat.thinking = mode
            chat.client.think = mode != "off"
            limit = limit_of_off(chat.client.thinking) if mode == "off" else ""
            remark(f"{limit or THINKING_CHOSEN[mode]}.")
            return
        thought = self._last_message("assistant").thought
        say(plain_text(thought.strip()) if thought else "The last answer has no thinking.")

    def _set(self, words: str) -> None:
        sampling = self._chat.dialogue.setup.sampling
        name, _space, value = words.partition(" ")
        if not words:
            for field in fields(sampling):
                value = getattr(sampling, field.name)
                remark(f"{field.name}: {'random' if value is None else value}")
            return
        sampling = changed(sampling, name, value.strip())
        self._chat.dialogue.set_up(replace(self._chat.dialogue.setup, sampling=sampling))
        remark(f"{name} is {getattr(sampling, name)} from the next answer on.")

    def _stats(self, _argument: str) -> None:
        remark(footer(self._chat.stats) if self._chat.stats else "There is no answer yet.")

    def _help(self, _argument: str) -> None:
        first = (
            "Write a question and press Enter. A line that ends in \\ continues on the next. Ctrl+C stops an answer."
        )
        remark("\n".join([first, *(f"{one.usage}: {one.does}." for one in self._commands.values())]))
