"""One chat, composed of its parts, which hear what the engine and the history report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

from textual.message import Message as Posted

from ...engine.events import Failed, Finished, Loaded, Loading, PrefillProgress, PresetChanged, Stats
from ..client.bridge import EngineBridge, News
from ..client.interface import Choice, Client, Refused, Submitted, TextDelta, ThoughtDelta
from ..client.thinking import THINKING_CHOSEN, limit_of_off, need_mode
from ..history import History, Message, Ready
from ..history.records import first_line
from ..settings.settings import Persona
from .answer_settings import changed, with_persona
from .answering import Answering
from .chats import Chats
from .dialogue import Dialogue
from .model import ChatModel, Phase
from .others import Others
from .questions import Questions
from .view import View


@dataclass(frozen=True, slots=True)
class Acting:
    """Runs actions on messages, by name; no version is lost."""

    _dialogue: Dialogue
    _model: ChatModel
    _answering: Answering
    _questions: Questions
    _chats: Chats
    _others: Others
    _view: View

    async def again(self) -> None:
        """Answer the last question again, or (while that answer is read for or written) three times: a terminal sends
        a key that is held as presses that follow each other.
        """
        running = self._answering.newest
        if running is not None and running.again and self._model.answering and not self._others.open:
            self._others.take_in(running)
            return
        await self.act_on_last("answer_again", "assistant", "user")
        if self._answering.newest is not running and self._answering.newest is not None:
            self._answering.newest.again = True

    async def act(self, action: str, message: Message) -> None:
        """Do `action` to a message, if nothing prevents it. Raises FloeError: the history cannot be read."""
        remark = self._view.gauges.remark
        await self._others.leave()
        if self._model.phase is not Phase.READY and action in ("answer_again", "continue_answer"):
            loading = self._model.phase is Phase.LOADING
            remark("Wait until the model has loaded" if loading else self._questions.busy)
        elif self._answering.shown:
            remark(self._questions.busy)
        else:
            await self._change(action, message)

    async def act_on_last(self, action: str, *roles: str) -> None:
        """Do `action` to the last message of one of these `roles`."""
        for message in reversed(self._dialogue.messages(self._dialogue.ids[-2:])):
            if message.role in roles:
                await self.act(action, message)
                return
        self._view.gauges.remark("There is no message yet")

    async def _change(self, action: str, message: Message) -> None:
        match action:
            case "edit_message":
                self._questions.edit(message)
            case "answer_again":
                await self._answer_again(message)
            case "continue_answer" if message.id == self._dialogue.ids[-1]:
                await self._continue(message)
            case "continue_answer":
                self._view.gauges.remark("Only the last answer can be continued")
            case "fork_chat":
                await self._chats.fork(message)
            case "delete_message":
                await self._chats.delete_from(message)
            case _:
                await self._switch(message, -1 if action == "older_version" else 1)

    async def _switch(self, message: Message, step: int) -> None:
        """Show another version of a message, and the branch that follows it."""
        await self._dialogue.settled()
        if self._dialogue.switch(message, step):
            await self._view.messages.change(self._dialogue.ids, follow=False)
            self._answering.measure_context()
            self._view.messages.select_at(message.position)
        else:
            self._view.gauges.remark(f"This message has no {'earlier' if step < 0 else 'later'} version")

    async def _answer_again(self, message: Message) -> None:
        """Answer again: an answer gets a sibling, a question is answered (again)."""
        if message.role == "assistant":
            await self._answering.start(instead=message)
            return
        at = self._dialogue.ids.index(message.id) + 1
        if at == len(self._dialogue.ids):
            await self._answering.start()
        elif (answer := self._dialogue.message(self._dialogue.ids[at])) is not None:
            await self._answer_again(answer)

    async def _continue(self, message: Message) -> None:
        remark = self._view.gauges.remark
        if message.role != "assistant":
            await self._answer_again(message)
        elif message.state == "streaming":
            remark("Another floe-chat is writing this answer")
        elif message.state == "complete" and message.stats is not None and message.stats.stop_reason == "stop":
            remark("This answer is complete")
        else:
            await self._answering.start(more_of=message)


class Thinking:
    """Applies the choice to the model and to the messages on the screen."""

    def __init__(self, client: Client, view: View) -> None:
        self._client = client
        self._view = view
        self._mode = "fold"

    def take(self, mode: str) -> None:
        """Do as the settings say."""
        if mode != self._mode:
            self._mode = mode
            self._client.think = mode != "off"
            self._view.messages.show_thinking(opened=mode == "show")

    def choose(self, mode: str) -> bool:
        """Do as the person says, or open the last answer's thinking without a `mode`; returns whether to save it.

        Raises:
            UsageError: there is no such mode.
        """
        if not mode:
            if not self._view.messages.turn_thinking():
                self._view.gauges.remark("No answer here has thinking to show")
            return False
        need_mode(mode)
        self.take(mode)
        limit = limit_of_off(self._client.thinking) if mode == "off" else ""
        self._view.gauges.remark(limit or THINKING_CHOSEN[mode])
        return True

    def tell(self) -> None:
        """A model was loaded: say if it cannot do as the person wants."""
        if self._mode == "off" and (limit := limit_of_off(self._client.thinking)):
            self._view.gauges.remark(limit)


class Setting:
    """Without an argument each command shows the current values."""

    def __init__(self, dialogue: Dialogue, questions: Questions, personas: Mapping[str, Persona], view: View) -> None:
        self._dialogue = dialogue
        self._questions = questions
        self._view = view
        self.personas = personas

    async def instruct(self, text: str) -> None:
        """Change the system prompt, or show it."""
        if not text:
            now = self._dialogue.setup.system_prompt
            await self._note(
                f"System prompt: {now}" if now else "This chat has no system prompt.", "/system TEXT sets it"
            )
            return
        self._dialogue.set_up(replace(self._dialogue.setup, system_prompt=text, persona=""))
        self._questions.show_name()
        self._view.gauges.remark("The new system prompt applies from the next question on")

    async def take_persona(self, name: str) -> None:
        """Use the system prompt and sampling values of a persona, or list all personas."""
        if not name:
            await self._list_personas()
            return
        self._dialogue.set_up(with_persona(self._dialogue.setup, self.personas, name))
        self._questions.show_name()
        self._view.gauges.remark(f"Persona {name} applies from the next question on")

    async def _list_personas(self) -> None:
        if not self.personas:
            await self._note(
                "There are no personas yet. A persona is a system prompt with a name; add one to the settings file:",
                "[personas.Tutor]",
                'system_prompt = "Explain in small steps."',
            )
            return
        now = self._dialogue.setup.persona
        lines = [
            f"{'●' if name == now else ' '} {name}: {first_line(persona.system_prompt) or 'no system prompt'}"
            for name, persona in self.personas.items()
        ]
        await self._note("Personas:", *lines, "/persona NAME uses one")

    async def set_sampling(self, words: str) -> None:
        """Change how the next answers are drawn, or show the values."""
        sampling = self._dialogue.setup.sampling
        if not words:
            values = [
                f"{name} {'random' if value is None else f'{value:g}'}" for name, value in asdict(sampling).items()
            ]
            await self._note(
                f"Sampling: {', '.join(values)}", "/set NAME VALUE changes one, such as /set temperature 0.3"
            )
            return
        name, _space, value = words.partition(" ")
        sampling = changed(sampling, name, value.strip())
        self._dialogue.set_up(replace(self._dialogue.setup, sampling=sampling))
        self._view.gauges.remark(f"{name} is {getattr(sampling, name)} from the next answer on")

    async def _note(self, *lines: str) -> None:
        await self._view.messages.note("\n".join(lines))


Do = Callable[..., Awaitable[None] | None]
"""Does an action. An action with an argument gets the text after the command, or ""."""


class ModelNotLoaded(Posted):
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
