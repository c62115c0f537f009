"""One chat, composed of its parts, which hear what the engine and the history report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from textual.message import Message

from ...engine.events import Failed, Finished, Loaded, Loading, PrefillProgress, PresetChanged, Stats
from ..client.bridge import EngineBridge, News
from ..client.interface import Choice, Client, Refused, Submitted, TextDelta, ThoughtDelta
from ..history import History, Ready
from ..settings.settings import Persona
from .acting import Acting
from .answering import Answering
from .chats import Chats
from .dialogue import Dialogue
from .model import ChatModel, Phase
from .others import Others
from .questions import Questions
from .setting import Setting
from .thinking import Thinking
from .view import View

Do = Callable[..., Awaitable[None] | None]
"""Does an action. An action with an argument gets the text after the command, or ""."""


class ModelNotLoaded(Message):
    """What was `chosen` could not be loaded; the chat continues without it."""

    def __init__(self, chosen: Choice) -> None:
        super().__init__()
        self.chosen = chosen


class Controller:
    """Asks, stops, answers again, and changes branches and chats.

    Attributes:
        view: shows the chat. dialogue: the branch on the screen. model: answers it. The others: see their classes.
    """

    def __init__(
        self,
        client: Client,
        bridge: EngineBridge,
        history: History,
        dialogue: Dialogue,
        view: View,
        max_new_tokens: int,
        personas: Mapping[str, Persona],
    ) -> None:
        self.view = view
        self.dialogue = dialogue
        self.model = ChatModel(client, dialogue, view)
        self.answering = Answering(bridge, history, dialogue, self.model, view, max_new_tokens)
        self.questions = Questions(history, dialogue, self.model, self.answering, view)
        self.others = Others(dialogue, self.model, self.answering, self.questions, view)
        self.chats = Chats(history, dialogue, self.model, self.answering, self.questions, self.others, view)
        self.acting = Acting(dialogue, self.model, self.answering, self.questions, self.chats, self.others, view)
        self.setting = Setting(dialogue, self.questions, personas, view)
        self.thinking = Thinking(client, view)

    @property
    def does(self) -> Mapping[str, Do]:
        """The functions behind a conversation's actions, by action name."""
        last = self.acting.act_on_last
        return {
            "new_chat": self.chats.begin,
            "stop": self.stop,
            "regenerate": self.acting.again,
            "others": self.others.ask,
            "more": partial(last, "continue_answer", "assistant"),
            "edit": partial(last, "edit_message", "user"),
            "fork": partial(last, "fork_chat", "assistant", "user"),
            "rename": self.chats.rename,
            "delete": self.chats.delete,
            "undo": self.chats.undo,
            "last": self.chats.open_last,
            "export": self.chats.export,
            "system": self.setting.instruct,
            "persona": self.setting.take_persona,
            "set": self.setting.set_sampling,
            "preset": self.model.take_preset,
            "mix": self.model.take_placement,
            "next_preset": self.model.next_preset,
        }

    async def stop(self) -> None:
        """Stop the answer; else stop editing, or take back the last queued question."""
        if self.model.answering:
            self.model.stop()
        else:
            await self.questions.take_back()

    def close(self) -> None:
        """The program ends: what is not sent is saved, and answers without text are removed."""
        self.questions.save()
        self.answering.close()

    async def hear(self, news: News) -> None:
        """Something happened in the engine or the history."""
        match news:
            case Loading(step, fraction):
                self.model.show_loading(step, fraction)
            case Loaded():
                if remark := self.model.take(news):
                    await self.view.messages.note(remark)
                self.thinking.tell()
                await self._become_ready("ready")
            case Submitted():
                self.answering.show_prompt(news)
            case Refused() if self.answering.live(news.request) is not None:
                await self.answering.refuse(news)
                self.questions.show_name()
                await self._end_of_all()
            case PrefillProgress():
                self.answering.show_reading(news)
            case TextDelta(request, text):
                self.answering.show_text(request, text)
            case ThoughtDelta(request, text, tokens):
                self.answering.show_thought(request, text, tokens)
            case Stats():
                self.answering.show_stats(news)
                self.others.show_stats(news)
            case PresetChanged(preset):
                self.model.take_preset_in_force(preset)
            case Finished() if self.answering.live(news.request) is not None:
                if words := await self.answering.finish(news):
                    await self._become_ready(words)
            case Failed():
                await self._explain(news)
            case Ready(_saved, interrupted):
                await self._begin(interrupted)
            case _:
                pass

    async def _become_ready(self, words: str) -> None:
        self.model.become_ready(words)
        if self.view.gauges.context_used is None:
            self.answering.measure_context()
        if self.others.open:  # what is queued follows the answer that is picked
            await self.others.go_on(stopped=words == "stopped")
        else:
            await self.questions.send_next()
        self.questions.save_soon()

    async def _explain(self, failed: Failed) -> None:
        if (running := self.answering.live(failed.request)) is not None:
            await self.answering.end(running, "failed", None)
            await (self.view.messages if running.left else running.place).explain(failed)
            await self._end_of_all()
            return
        await self.view.messages.explain(failed)
        if self.model.phase is Phase.LOADING:
            self.view.pump.post_message(ModelNotLoaded(self.model.client.chosen))
            await self.questions.take_back_queued()
            if self.model.fall_back() and self.model.name:
                await self.view.messages.note(f"{self.model.name} answers again")

    async def _end_of_all(self) -> None:
        """An answer ended without figures: if it was the last one, the model is ready."""
        if self.answering.newest is None:
            self.view.gauges.stop()
            await self._become_ready("ready")

    async def _begin(self, interrupted: int) -> None:
        """The history is open: `interrupted` answers were cut off when the last run ended."""
        if interrupted:
            many = "An answer was" if interrupted == 1 else f"{interrupted} answers were"
            words = f"{many} cut off when floe-chat last ended. The text so far is saved; /last opens the chat"
            await self.view.messages.note(words)
        await self.questions.take_over()
