"""One question and its answer: what the model receives, what it answers, and how much of the window that takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...engine.context import room_for_answer
from ...engine.events import Finished, PrefillProgress, Stats
from ...models.errors import FloeError
from ..background import in_background
from ..client.bridge import EngineBridge
from ..client.interface import UNKNOWN_WINDOW, Question
from ..history import Answer, AnswerStats, History, Message, MessageState
from .dialogue import Dialogue
from .model import ChatModel, Phase
from .view import View


@dataclass(slots=True)
class Running:
    """The answer that is being written. `left`: its conversation is no longer on the screen."""

    request: int
    message: Message
    answer: Answer
    pieces: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    thought_tokens: int = 0
    left: bool = False


class Answering:
    """Has the last question of the dialogue answered, one at a time."""

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
        self._live: Running | None = None

    @property
    def shown(self) -> bool:
        """Whether the answer that is being written belongs to the conversation on the screen."""
        return self._live is not None and not self._live.left

    def is_live(self, request: int | None) -> bool:
        """Whether this is the request of the answer that is being written."""
        return self._live is not None and self._live.request == request

    def question_room(self) -> int | None:
        """How many tokens a question may have; None while no model is loaded."""
        window, most = self._model.window, self._model.client.most_new(self._max_new_tokens)
        return window - room_for_answer(window, most) if window else None

    async def start(self, instead: Message | None = None, more_of: Message | None = None) -> bool:
        """Have the last question answered, `instead` of an existing answer or as `more_of` it.

        False if the engine refuses that, and why is on the screen.
        """
        dialogue, messages, gauges = self._dialogue, self._view.messages, self._view.gauges
        client, name, preset = self._model.client, self._model.name, self._model.preset
        turns, seen = dialogue.turns(self._model.window or UNKNOWN_WINDOW, instead or more_of)
        try:
            begun, thought = ("", "") if more_of is None else (more_of.text, more_of.thought)
            sampling, number = dialogue.setup.sampling, dialogue.id or 0
            question = Question(turns, sampling, self._max_new_tokens, begun, number, thought)
            submitted = client.prepare(question)
        except FloeError as error:
            await messages.explain(error)
            return False
        if more_of is not None:
            await messages.change(dialogue.ids[:-1])
            message, answer = dialogue.continuing(more_of, name, preset)
        else:
            message, answer = dialogue.answering(name, preset, instead)
        self._live = Running(submitted.request, message, answer, [message.text], [message.thought])
        if more_of is not None and more_of.stats is not None:
            self._live.thought_tokens = more_of.stats.thought_tokens
        self._bridge.record(submitted.request, answer)
        self._model.phase = Phase.ANSWERING
        messages.live = message.id
        await messages.change(dialogue.ids)
        self._mark_horizon(seen, submitted.dropped)
        gauges.show_context(submitted.prompt_tokens)
        read = submitted.prompt_tokens
        gauges.say(f"reading prompt 0/{read}" if read else f"waiting for {client.remote}", "$accent")
        # Only once this is painted: each would slow the other down, and a small model has answered by then.
        self._view.pump.call_after_refresh(client.begin)
        return True

    def leave(self) -> None:
        """Stop the answer: its conversation is left."""
        self._model.stop()
        if self._live is not None:
            self._live.left = True
        self._view.messages.live = None

    # What the engine does

    def show_reading(self, event: PrefillProgress) -> None:
        """More of the prompt is read."""
        if self.is_live(event.request) and self._model.answering:
            self._view.gauges.say(f"reading prompt {event.done}/{event.total}", "$accent")
            self._view.messages.show_progress(f"reading the prompt, {event.done} of {event.total} tokens")

    def show_text(self, request: int, text: str) -> None:
        """More of the answer came."""
        if not self.is_live(request) or self._live is None:
            return
        if self._model.answering:
            self._view.gauges.say("writing", "$primary")
        self._live.pieces.append(text)
        self._view.messages.feed(text)

    def show_thought(self, request: int, text: str, tokens: int) -> None:
        """More of what the model thinks came."""
        if not self.is_live(request) or self._live is None:
            return
        if self._model.answering:
            self._view.gauges.say("thinking", "$primary")
        self._live.thoughts.append(text)
        self._live.thought_tokens += tokens
        self._view.messages.think(text, tokens)

    def show_stats(self, stats: Stats, *, running: bool | None = None) -> None:
        """Newer figures came."""
        if self.shown:
            self._view.gauges.context_used = stats.context_used
        running = self.is_live(stats.request) if running is None else running
        self._view.gauges.show_stats(stats, running=running)

    async def finish(self, event: Finished) -> str:
        """The answer ended; returns the state to show."""
        self.show_stats(event.stats, running=False)
        stopped, shown = event.reason == "cancelled", self.shown
        thought = 0 if self._live is None else self._live.thought_tokens
        await self.end("stopped" if stopped else "complete", AnswerStats.of(event.stats, event.reason, thought))
        return "stopped" if stopped and shown else "ready"

    async def end(self, state: MessageState, stats: AnswerStats | None) -> None:
        """Save how the answer ended; an empty answer is removed."""
        if (running := self._live) is None:
            return
        messages = self._view.messages
        self._live = messages.live = None
        running.answer.finish(stats, state)
        text, thought = "".join(running.pieces), "".join(running.thoughts)
        if text.strip() or thought.strip():
            ended = self._dialogue.ended(running.message, text, state, stats, thought)
            if not running.left:
                messages.finish(ended)
                if not text.strip():
                    self._view.gauges.remark("There is no answer yet: /more lets the model think on")
        elif running.left:
            self._history.delete_message(running.message.id)
        else:
            self._dialogue.withdraw(running.message)
            await messages.change(self._dialogue.ids, follow=False)
            await messages.note(
                "The answer was empty, so the model will not see this question again. Up brings it back"
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
