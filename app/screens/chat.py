"""The chat: what may be sent when, and what comes of it."""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType

from ...engine.events import Sampling, Stats
from ...models.errors import FloeError
from ..bridge import (
    AnswerFinished,
    AnswerText,
    EngineBridge,
    EngineFailed,
    ModelLoading,
    ModelReady,
    PresetInForce,
    PromptRead,
    StatsArrived,
)
from ..widgets.answer import AnswerTurn, summary
from ..widgets.blocks import ErrorBlock, Note, UserTurn
from ..widgets.composer import Composer
from ..widgets.units import share
from .chat_view import ChatView
from .conversation import Conversation


class Phase(Enum):
    """What the engine does for this screen."""

    LOADING = auto()
    READY = auto()
    ANSWERING = auto()
    STOPPING = auto()
    BROKEN = auto()


class ChatScreen(ChatView):
    """One chat with one model."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", show=False),
        Binding("ctrl+n", "new_chat", "New chat", show=False),
        Binding("f3", "next_preset", "Preset", show=False),
    ]

    def __init__(
        self, bridge: EngineBridge, sampling: Sampling, max_new_tokens: int, system_prompt: str | None
    ) -> None:
        super().__init__()
        self._bridge = bridge
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._conversation = Conversation(system_prompt)
        self._phase = Phase.LOADING
        self._request: int | None = None
        self._answer: AnswerTurn | None = None
        self._waiting: UserTurn | None = None
        self._dropped = 0
        self._presets: tuple[str, ...] = ()
        self._wanted_preset = ""

    @property
    def presets(self) -> tuple[str, ...]:
        """The loaded model's presets, best first; none while it loads."""
        return self._presets

    def on_mount(self) -> None:
        super().on_mount()
        self._say("loading", "$warning")

    # What the person does

    @on(Composer.Sent)
    async def _send(self, event: Composer.Sent) -> None:
        if refusal := self._refusal():
            self._composer.take_back(event.text)
            self._status.remark(refusal)
            return
        turn = UserTurn(event.text)
        self._transcript.anchor()
        await self._transcript.add(turn)
        if self._phase is Phase.READY:
            await self._ask(turn)
        else:
            loading = self._phase is Phase.LOADING
            turn.note = "waits until the model is loaded" if loading else "waits until the last answer has stopped"
            self._waiting = turn

    def _refusal(self) -> str:
        """Why nothing can be sent now, or nothing."""
        if self._phase is Phase.BROKEN:
            return "No model is loaded: the message above says why"
        if self._phase is Phase.ANSWERING:
            return "Esc stops the running answer first"
        return "One question waits already; Esc takes it back" if self._waiting else ""

    async def action_stop(self) -> None:
        if self._waiting is not None:
            await self._take_back(self._waiting)
        elif self._phase is Phase.ANSWERING:
            self._bridge.cancel()
            self._phase = Phase.STOPPING
            self._say("stopping", "$warning")

    async def action_new_chat(self) -> None:
        if self._phase is Phase.BROKEN:
            return
        if self._phase is Phase.ANSWERING:
            await self.action_stop()
        if self._waiting is not None:
            await self._take_back(self._waiting)
        self._answer = None
        self._dropped = 0
        self._conversation.clear()
        self._status.context_used = None
        await self._transcript.begin_anew()
        self._composer.focus()

    def action_next_preset(self) -> None:
        if not self._presets:
            self._status.remark("The presets are known when the model is loaded")
        elif len(self._presets) == 1:
            self._status.remark(f"This model has one preset only: {self._presets[0]}")
        else:
            now = self._presets.index(self._wanted_preset) if self._wanted_preset in self._presets else -1
            self.choose_preset(self._presets[(now + 1) % len(self._presets)])

    def choose_preset(self, preset: str) -> None:
        """Ask for `preset` from the next token on."""
        self._wanted_preset = preset
        self._bridge.set_preset(preset)

    # What the engine does

    @on(ModelLoading)
    def _show_loading(self, event: ModelLoading) -> None:
        self._say(f"loading {share(event.fraction)}, {event.step}", "$warning")

    @on(ModelReady)
    async def _begin(self, event: ModelReady) -> None:
        self._presets, self._wanted_preset = event.loaded.presets, event.loaded.preset
        self._show_loaded(event.loaded)
        await self._become_ready("ready")

    @on(PromptRead)
    def _show_reading(self, event: PromptRead) -> None:
        if event.request == self._request and self._phase is Phase.ANSWERING:
            self._say(f"reading prompt {event.done}/{event.total}", "$accent")
            if self._answer is not None:
                self._answer.show_progress(f"reading the prompt, {event.done} of {event.total} tokens")

    @on(AnswerText)
    def _show_text(self, event: AnswerText) -> None:
        if event.request != self._request or self._answer is None:
            return
        if self._phase is Phase.ANSWERING:
            self._say("writing", "$primary")
        self._answer.feed(event.text)

    @on(StatsArrived)
    def _show_stats(self, event: StatsArrived) -> None:
        self._take_stats(event.stats, running=event.stats.request == self._request)

    @on(AnswerFinished)
    async def _finish(self, event: AnswerFinished) -> None:
        if event.request != self._request:
            return
        self._take_stats(event.stats, running=False)
        await self._end_answer(summary(event.reason, event.stats))
        await self._become_ready("stopped" if event.reason == "cancelled" else "ready")

    @on(PresetInForce)
    def _show_preset(self, event: PresetInForce) -> None:
        self._status.preset = event.preset

    @on(EngineFailed)
    async def _explain(self, event: EngineFailed) -> None:
        answering = event.request is not None and event.request == self._request
        if answering:
            self._figures.running = False
            await self._end_answer("ended by an error")
        await self._transcript.add(ErrorBlock(event.title, event.cause, event.hint))
        if answering:
            await self._become_ready("ready")
        elif self._phase is Phase.LOADING:
            self._phase = Phase.BROKEN
            self._say("no model", "$error")
            if self._waiting is not None:
                await self._take_back(self._waiting)

    async def _ask(self, turn: UserTurn) -> None:
        turn.note = ""
        self._conversation.ask(turn.text)
        try:
            submitted = self._bridge.submit(self._conversation.messages, self._sampling, self._max_new_tokens)
        except FloeError as error:
            self._conversation.withdraw()
            await self._take_back(turn)
            await self._transcript.add(ErrorBlock(error.title, error.cause, error.hint))
            return
        if submitted.dropped > self._dropped:
            many = f"{submitted.dropped} messages" if submitted.dropped > 1 else "message"
            await self._transcript.add(
                Note(f"The oldest {many} left the context window: the model no longer sees them")
            )
        self._dropped = submitted.dropped
        self._request = submitted.request
        self._phase = Phase.ANSWERING
        self._bridge.writing = True
        self._answer = AnswerTurn()
        await self._transcript.add(self._answer)
        self._status.context_used = submitted.prompt_tokens
        self._say(f"reading prompt 0/{submitted.prompt_tokens}", "$accent")

    async def _end_answer(self, footer: str) -> None:
        if self._answer is None:
            return
        answer, self._answer = self._answer, None
        answer.finish(footer)
        if not self._conversation.answer(answer.text):
            await self._transcript.add(
                Note("No answer came, so the model will not see this question again. Up brings it back")
            )

    async def _become_ready(self, words: str) -> None:
        self._request = None
        self._phase = Phase.READY
        self._bridge.writing = False
        self._say(words, "$success")
        if self._waiting is not None:
            turn, self._waiting = self._waiting, None
            await self._ask(turn)

    async def _take_back(self, turn: UserTurn) -> None:
        self._waiting = None
        self._composer.take_back(turn.text)
        await turn.remove()

    def _take_stats(self, stats: Stats, *, running: bool) -> None:
        self._show_figures(stats, running=running)
        if self._answer is not None:
            self._status.context_used = stats.context_used
