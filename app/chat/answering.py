"""A question and its answers: what the model receives, what it answers, and how much of the window that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...engine.context import room_for_answer
from ...engine.events import Finished, PrefillProgress, Stats
from ...models.errors import FloeError
from ..background import in_background
from ..client.bridge import EngineBridge
from ..client.interface import UNKNOWN_WINDOW, Question, Refused, Submitted
from ..history import Answer, AnswerStats, History, Message, MessageState
from .dialogue import Dialogue
from .model import ChatModel, Phase
from .view import AnswerView, View


@dataclass(slots=True)
class Running:
    """An answer that is being written, and afterwards what came.

    Attributes:
        place: shows it. seen: the messages that went with the question. instead: the answer in whose place it was asked
            for. more_of: the answer that it continues. asked: the question, if it is new. edited: its earlier version.
            again: the key asked for it that asks for three if it is held. left: it is shown nowhere any more. removed:
            it had no text when it was stopped.
    """

    request: int
    message: Message
    answer: Answer
    place: AnswerView
    seen: list[int]
    instead: Message | None = None
    more_of: Message | None = None
    asked: Message | None = None
    edited: Message | None = None
    pieces: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    thought_tokens: int = 0
    again: bool = False
    left: bool = False
    removed: bool = False

    @property
    def so_far(self) -> Message:
        """The message with all that came."""
        return replace(self.message, text="".join(self.pieces), thought="".join(self.thoughts))

    @property
    def blank(self) -> bool:
        """Whether nothing came yet that is worth keeping."""
        return not any(piece.strip() for piece in (*self.pieces, *self.thoughts))


class Answering:
    """Has the last question of the dialogue answered: once, or several times side by side."""

    def __init__(
        self,
        bridge: EngineBridge,
        history: History,
        dialogue: Dialogue,
        model: ChatModel,
        view: View,
        max_new_tokens: int,
    ) -> None:
        self._bridge = bridge
        self._history = history
        self._dialogue = dialogue
        self._model = model
        self._view = view
        self._max_new_tokens = max_new_tokens
        self._live: dict[int, Running] = {}

    @property
    def shown(self) -> bool:
        """Whether an answer that is being written belongs to the conversation on the screen."""
        return any(not running.left for running in self._live.values())

    @property
    def newest(self) -> Running | None:
        """The answer being written that was asked for last."""
        return self._live[max(self._live)] if self._live else None

    def live(self, request: int | None) -> Running | None:
        """The answer that is being written to this request."""
        return None if request is None else self._live.get(request)

    def question_room(self) -> int | None:
        """How many tokens a question may have; None while no model is loaded."""
        window, most = self._model.window, self._model.client.most_new(self._max_new_tokens)
        return window - room_for_answer(window, most) if window else None

    async def start(
        self,
        instead: Message | None = None,
        more_of: Message | None = None,
        asked: Message | None = None,
        edited: Message | None = None,
    ) -> bool:
        """Have the last question answered, `instead` of an existing answer or as `more_of` it; `asked`: it is new, and
        a version of `edited`.

        False if it cannot be asked now, and why is on the screen.
        """
        dialogue, messages, name, preset = self._dialogue, self._view.messages, self._model.name, self._model.preset
        question, seen = self._question(instead or more_of, more_of)
        try:
            (request,) = self._model.client.prepare(question)
        except FloeError as error:
            await messages.explain(error)
            return False
        if more_of is not None:
            await messages.change(dialogue.ids[:-1])
            message, answer = dialogue.continuing(more_of, name, preset)
        else:
            message, answer = dialogue.answering(name, preset, instead)
        running = self._follow(request, message, answer, messages, seen)
        running.instead, running.more_of, running.asked, running.edited = instead, more_of, asked, edited
        if more_of is not None and more_of.stats is not None:
            running.thought_tokens = more_of.stats.thought_tokens
        messages.live = message.id
        await messages.change(dialogue.ids)
        self._begin()
        return True

    async def start_beside(self, places: Sequence[AnswerView], beside: Message | None) -> list[Running]:
        """Have the last question answered once for each of `places`, as siblings of the answer `beside`, which stays
        the one that the chat shows; without one, the first answer does.

        Raises:
            FloeError: the engine refuses that.
        """
        question, seen = self._question(beside)
        drawn = replace(
            question, sampling=replace(question.sampling, seed=None)
        )  # a chosen seed would repeat an answer
        requests = self._model.client.prepare(drawn, len(places))
        begun = self._dialogue.beside(beside, len(places), self._model.name, self._model.preset)
        given = zip(requests, begun, places, strict=True)
        found = [self._follow(request, *answer, place, seen) for request, answer, place in given]
        self._begin()
        return found

    def _question(self, before: Message | None, more_of: Message | None = None) -> tuple[Question, list[int]]:
        """The last question (the last one `before` an answer), and the messages that go with it."""
        turns, seen = self._dialogue.turns(self._model.window or UNKNOWN_WINDOW, before)
        begun, thought = ("", "") if more_of is None else (more_of.text, more_of.thought)
        sampling, number = self._dialogue.setup.sampling, self._dialogue.number
        return Question(turns, sampling, self._max_new_tokens, begun, number, thought), seen

    def _follow(self, request: int, message: Message, answer: Answer, place: AnswerView, seen: list[int]) -> Running:
        """Take what comes for this request as the text of `answer`."""
        running = Running(request, message, answer, place, seen, pieces=[message.text], thoughts=[message.thought])
        self._live[request] = running
        self._bridge.record(request, answer)
        self._model.phase = Phase.ANSWERING
        return running

    def _begin(self) -> None:
        """Let the engine begin with what was prepared."""
        self._view.gauges.say("preparing the prompt", "$accent")
        # Only once this is painted: each would slow the other down, and a small model has answered by then.
        self._view.pump.call_after_refresh(self._model.client.begin)

    def show_in_chat(self, running: Running) -> None:
        """Show an answer that is being written beside others as the last one of the chat, which already ends in it."""
        running.message = self._dialogue.message(running.message.id) or running.message
        self._dialogue.remember(running.so_far)
        running.place = self._view.messages
        self._view.messages.live = running.message.id

    def let_go(self, running: Running) -> None:
        """Stop an answer that is shown nowhere any more: what came of it is kept."""
        if running.request in self._live and not running.left:
            self._model.client.cancel(running.request)
            running.left = True
            if running.blank:
                running.removed = True
                running.answer.finish(None, "stopped")
                self._dialogue.withdraw(running.message, running.instead)

    def close(self) -> None:
        """The program ends, and the history marks what is being written as stopped."""
        for running in tuple(self._live.values()):
            if running.blank:
                self.let_go(running)

    def leave(self) -> None:
        """Stop all answers: their conversation is left."""
        self._model.stop()
        for running in self._live.values():
            running.left = True
        self._view.messages.live = None

    # What the engine does

    def show_prompt(self, submitted: Submitted) -> None:
        """A prompt was made of the question."""
        if (running := self.live(submitted.request)) is None:
            return
        self._mark_horizon(running.seen, submitted.dropped)
        gauges, read = self._view.gauges, submitted.prompt_tokens
        gauges.show_context(read)
        if self._model.answering:
            gauges.say(f"reading prompt 0/{read}" if read else f"waiting for {self._model.client.remote}", "$accent")

    async def refuse(self, refused: Refused) -> None:
        """No prompt can be made of the question: all is as before, and a new question is in the field again."""
        running, messages, dialogue = self._live.pop(refused.request), self._view.messages, self._dialogue
        in_chat, before = running.place is messages, running.more_of
        if in_chat:
            messages.live = None
        if before is None:
            running.answer.finish(None, "failed")
            dialogue.withdraw(running.message, running.instead)
        else:
            running.answer.finish(before.stats, before.state)
            ended = dialogue.ended(running.message, before.text, before.state, before.stats, before.thought)
            running.place.finish(ended)
        if running.asked is not None:
            dialogue.withdraw(running.asked, running.edited)
            self._view.field.take_back(running.asked.text, running.asked.attachments)
        if in_chat:
            await messages.change(dialogue.ids)
        await running.place.explain(refused.error)

    def show_reading(self, event: PrefillProgress) -> None:
        """More of the prompt is read."""
        if (running := self.live(event.request)) is not None and self._model.answering:
            self._view.gauges.say(f"reading prompt {event.done}/{event.total}", "$accent")
            running.place.show_progress(f"reading the prompt, {event.done} of {event.total} tokens")

    def show_text(self, request: int, text: str) -> None:
        """More of the answer came."""
        if (running := self.live(request)) is not None:
            if self._model.answering:
                self._view.gauges.say("writing", "$primary")
            running.pieces.append(text)
            running.place.feed(text)

    def show_thought(self, request: int, text: str, tokens: int) -> None:
        """More of what the model thinks came."""
        if (running := self.live(request)) is not None:
            if self._model.answering:
                self._view.gauges.say("thinking", "$primary")
            running.thoughts.append(text)
            running.thought_tokens += tokens
            running.place.think(text, tokens)

    def show_stats(self, stats: Stats, *, last: bool = False) -> None:
        """Newer figures came, or an answer's `last`."""
        if self.shown:
            self._view.gauges.context_used = stats.context_used
        going_on = stats.request in self._live and not (last and len(self._live) == 1)
        self._view.gauges.show_stats(stats, running=going_on)

    async def finish(self, event: Finished) -> str:
        """An answer ended; returns the state to show, "" while others are being written."""
        self.show_stats(event.stats, last=True)
        running, shown = self._live[event.request], self.shown
        stopped = event.reason == "cancelled"
        stats = AnswerStats.of(event.stats, event.reason, running.thought_tokens)
        await self.end(running, "stopped" if stopped else "complete", stats)
        if self._live:
            return ""
        return "stopped" if stopped and shown else "ready"

    async def end(self, running: Running, state: MessageState, stats: AnswerStats | None) -> None:
        """Save how an answer ended; an empty answer is removed."""
        del self._live[running.request]
        if running.removed:
            return
        messages = self._view.messages
        in_chat = running.place is messages
        if in_chat:
            messages.live = None
        running.answer.finish(stats, state)
        found = running.so_far
        ended = self._dialogue.ended(running.message, found.text, state, stats, found.thought)
        if not running.blank:
            if not running.left:
                running.place.finish(ended)
                if in_chat and not found.text.strip():
                    self._view.gauges.remark("There is no answer yet: /more lets the model think on")
            return
        shown = running.message.id in self._dialogue.ids
        self._dialogue.withdraw(running.message, running.instead)
        if not in_chat and not running.left:
            running.place.finish(ended)
        elif shown:
            await messages.change(self._dialogue.ids, follow=False)
            await messages.note(
                "The answer was empty; the one before it is shown again"
                if running.instead is not None
                else "The answer was empty, so the model will not see this question again. Up brings it back"
            )

    # The window

    def measure_context(self) -> None:
        """Show how much of the window this branch takes, and what no longer fits. While the model answers, its figures
        show that.
        """
        ids, gauges = self._dialogue.ids, self._view.gauges
        if self._model.phase is not Phase.READY or not ids:
            gauges.show_context(None)
            return
        turns, seen = self._dialogue.turns(self._model.window or UNKNOWN_WINDOW)

        def show(found: tuple[int, int] | None) -> None:
            if self._model.phase is Phase.READY and self._dialogue.ids == ids:
                used, dropped = found or (None, 0)
                gauges.show_context(used)
                self._mark_horizon(seen, dropped)

        client = self._model.client
        in_background(self._view.pump, lambda: client.context_of(turns, self._max_new_tokens), show)

    def _mark_horizon(self, seen: list[int], dropped: int) -> None:
        """Mark what the model does not see: the first `dropped` messages it could have seen, and all before them."""
        self._view.messages.mark_horizon(seen[dropped:] if dropped else None)
