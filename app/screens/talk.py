"""Questions and answers: what may be sent when, and what comes of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from textual import on

from ...engine.context import room_for_answer
from ...engine.events import Stats
from ...models.errors import FloeError
from ..bridge import AnswerFinished, AnswerText, EngineBridge, EngineFailed, ModelNotLoaded, PromptRead, StatsArrived
from ..history import Answer, AnswerStats, Attachment, History, Message, Setup, State, Unsent
from ..widgets.answer import AnswerTurn
from ..widgets.background import in_background
from ..widgets.blocks import ErrorBlock, Note
from ..widgets.composer import Composer
from ..widgets.keys import key_of
from ..widgets.plain import printable
from ..widgets.transcript import NONE_SEEN
from ..widgets.turns import UserTurn
from .engine_view import EngineView, Phase

_WAITS = {
    Phase.LOADING: "queued until the model is loaded",
    Phase.STOPPING: "queued until the last answer has stopped",
}


@dataclass(frozen=True, slots=True)
class Queued:
    """A queued question."""

    text: str
    files: tuple[Attachment, ...]
    turn: UserTurn


@dataclass(slots=True)
class Running:
    """The answer that is being written. `left`: its conversation is on the screen no more."""

    request: int
    message: Message
    answer: Answer
    pieces: list[str] = field(default_factory=list[str])
    left: bool = False


class Talk(EngineView):
    """One conversation with one model."""

    def __init__(self, bridge: EngineBridge, history: History, setup: Setup, max_new_tokens: int) -> None:
        super().__init__(bridge, history, setup)
        self._setup = setup  # of a new chat
        self._max_new_tokens = max_new_tokens
        self._live: Running | None = None
        self._queue: deque[Queued] = deque()
        self._editing: Message | None = None
        self._aside = Unsent("")  # what was in the field before that message

    # What the person does

    @on(Composer.Sent)
    async def _send(self, event: Composer.Sent) -> None:
        if refusal := self._refusal():
            self._composer.take_back(event.text, event.files)
            self._status.remark(refusal)
        elif self._editing is not None:
            await self._send_edited(self._editing, event.text, event.files)
        elif self._phase is Phase.READY and not self._queue:
            await self._ask(event.text, event.files)
        else:
            note = _WAITS.get(self._phase, "queued until the answer has ended")
            turn = UserTurn(event.text, note, files=tuple(file.name for file in event.files))
            self._queue.append(Queued(event.text, event.files, turn))
            self._transcript.anchor()
            await self._transcript.add(turn)

    def _refusal(self) -> str:
        """Why nothing can be sent now, or nothing."""
        if self._phase is Phase.BROKEN:
            return "No model is loaded: the message above says why"
        if self._editing is not None and self._phase is not Phase.READY:
            return self._busy
        return ""

    def _question_room(self) -> int | None:
        window = super()._question_room()
        return None if window is None else window - room_for_answer(window, self._max_new_tokens)

    @property
    def _busy(self) -> str:
        return f"{key_of(self, 'stop')} stops the running answer first"

    async def action_stop(self) -> None:
        """Stop the answer; else stop editing, or take back the last queued question."""
        if self._phase is Phase.ANSWERING:
            await super().action_stop()
        elif self._editing is not None:
            self._stop_editing()
        elif self._queue:
            await self._take_back(self._queue.pop())

    async def new_chat(self) -> None:
        """Start another chat; this one stays in the history."""
        if self._phase is not Phase.BROKEN:
            await self._leave()
            self._dialogue.begin_anew(self._setup_of_new(self._setup))
            await self._show_dialogue()

    # What the engine does

    @on(PromptRead)
    def _show_reading(self, event: PromptRead) -> None:
        if self._is_live(event.request) and self._phase is Phase.ANSWERING:
            self._say(f"reading prompt {event.done}/{event.total}", "$accent")
            if (turn := self._live_turn()) is not None:
                turn.show_progress(f"reading the prompt, {event.done} of {event.total} tokens")

    @on(AnswerText)
    def _show_text(self, event: AnswerText) -> None:
        if not self._is_live(event.request) or self._live is None:
            return
        if self._phase is Phase.ANSWERING:
            self._say("writing", "$primary")
        self._live.pieces.append(event.text)
        if (turn := self._live_turn()) is not None:
            turn.feed(event.text)

    @on(StatsArrived)
    def _show_stats(self, event: StatsArrived) -> None:
        self._take_stats(event.stats, running=self._is_live(event.stats.request))

    @on(AnswerFinished)
    async def _finish(self, event: AnswerFinished) -> None:
        if not self._is_live(event.request):
            return
        self._take_stats(event.stats, running=False)
        stopped = event.reason == "cancelled"
        left = self._live is not None and self._live.left
        await self._end_answer("stopped" if stopped else "complete", AnswerStats.of(event.stats, event.reason))
        await self._become_ready("stopped" if stopped and not left else "ready")

    @on(EngineFailed)
    async def _explain(self, event: EngineFailed) -> None:
        answering = event.request is not None and self._is_live(event.request)
        if answering:
            self._figures.running = False
            await self._end_answer("failed", None)
        await self._transcript.add(ErrorBlock(event.title, event.cause, event.hint))
        if answering:
            await self._become_ready("ready")
        elif self._phase is Phase.LOADING:
            await self._do_without(self._bridge.pack)

    async def _do_without(self, pack: Path) -> None:
        """A model could not be loaded: the one that answered before answers again, if there was one."""
        self.post_message(ModelNotLoaded(pack))
        while self._queue:
            await self._take_back(self._queue.pop())
        before = self._pack
        if before is None or before == pack:
            self._phase = Phase.BROKEN
            self._say("no model", "$error")
            return
        self._picked = None
        if not self._dialogue.ids:
            self._belong_to(before)
        await self._transcript.add(Note(f"{self._model} answers again"))
        self._open(before)

    # Asking and answering

    async def _ask(self, text: str, files: tuple[Attachment, ...], instead: Message | None = None) -> None:
        question = self._dialogue.ask(text, files, instead)
        if await self._answer():
            self._show_name()
        else:
            self._dialogue.withdraw(question)
            self._composer.take_back(text, files)

    async def _answer(self, instead: Message | None = None, more_of: Message | None = None) -> bool:
        """Have the last question answered, `instead` of an answer that there is or as `more_of` it.

        False if the engine refuses that, and why is on the screen.
        """
        turns, seen = self._dialogue.turns(self._window, instead or more_of)
        try:
            begun = "" if more_of is None else more_of.text
            submitted = self._bridge.prepare(turns, self._dialogue.setup.sampling, self._max_new_tokens, begun)
        except FloeError as error:
            await self._transcript.add(ErrorBlock(error.title, error.cause, error.hint))
            return False
        if more_of is not None:
            await self._transcript.change(self._dialogue.ids[:-1])
            message, answer = self._dialogue.continuing(more_of, self._model, self._status.preset)
        else:
            message, answer = self._dialogue.answering(self._model, self._status.preset, instead)
        self._live = Running(submitted.request, message, answer, [message.text])
        self._bridge.record(submitted.request, answer)
        self._phase = Phase.ANSWERING
        self._transcript.live = message.id
        await self._transcript.change(self._dialogue.ids)
        self._mark_horizon(seen, submitted.dropped)
        self._show_context(submitted.prompt_tokens)
        self._say(f"reading prompt 0/{submitted.prompt_tokens}", "$accent")
        # Not before all of this is painted: the one would slow the other down, and a small model has answered by then.
        self.call_after_refresh(self._bridge.begin)
        return True

    async def _end_answer(self, state: State, stats: AnswerStats | None) -> None:
        if (running := self._live) is None:
            return
        turn = self._live_turn()
        self._live = self._transcript.live = None
        running.answer.finish(stats, state)
        text = "".join(running.pieces)
        if text.strip():
            ended = self._dialogue.ended(running.message, text, state, stats)
            if turn is not None:
                turn.finish(ended)
        elif running.left:
            self._history.delete_message(running.message.id)
        else:
            self._dialogue.withdraw(running.message)
            await self._transcript.change(self._dialogue.ids, follow=False)
            await self._transcript.add(
                Note("The answer was empty, so the model will not see this question again. Up brings it back")
            )

    async def _become_ready(self, words: str) -> None:
        await super()._become_ready(words)
        if self._context_used is None:
            self._measure_context()
        if self._phase is Phase.READY and self._queue:
            queued = self._queue.popleft()
            await queued.turn.remove()
            await self._ask(queued.text, queued.files)

    async def _send_edited(self, message: Message, text: str, files: tuple[Attachment, ...]) -> None:
        """Put `text` in the place of an earlier message, on a branch of its own."""
        self._end_editing(self._aside)
        if message.role == "user":
            await self._ask(text, files, message)
        elif text:
            self._dialogue.rewrite(message, text)
            await self._transcript.change(self._dialogue.ids)
            self._measure_context()

    def _stop_editing(self, *, keep: bool = False) -> None:
        """Put back what was in the field before; with `keep`, what was changed stays there too."""
        kept = self._drafts if keep else (self._aside,)
        self._composer.clear()
        self._writing.chips.take_all()
        self._end_editing(*kept)

    def _end_editing(self, *drafts: Unsent) -> None:
        self._editing, self._aside = None, Unsent("")
        for draft in reversed(drafts):
            self._composer.take_back(draft.text, draft.files)
        self._show_name()

    @property
    def _drafts(self) -> tuple[Unsent, ...]:
        """What was written and is not on its way; a message that is being edited only if it was changed."""
        text, files = self._composer.text, self._writing.chips.files
        edited = self._editing
        if edited is not None and text == printable(edited.text) and set(files) <= set(edited.attachments):
            text, files = "", ()
        return tuple(draft for draft in (Unsent(text, files), self._aside) if draft.text.strip() or draft.files)

    async def _take_back(self, queued: Queued) -> None:
        await queued.turn.remove()
        self._composer.take_back(queued.text, queued.files)

    # Changing the conversation

    async def _leave(self) -> None:
        """Stop what runs for the conversation on the screen; the text that waits goes back into the field."""
        if self._phase is Phase.ANSWERING:
            await self.action_stop()
        if self._live is not None:
            self._live.left = True
        self._transcript.live = None
        while self._queue:
            await self._take_back(self._queue.pop())
        if self._editing is not None:
            self._stop_editing(keep=True)

    async def _show_dialogue(self) -> None:
        """Show the conversation from its end."""
        await self._transcript.show(self._dialogue.ids)
        if self._phase is Phase.READY:
            self._say("ready", "$success")  # what it was before belongs to the conversation that was left
        self._measure_context()
        self._show_name()
        self._ask_for_its_quality()
        self._composer.focus()

    def _measure_context(self) -> None:
        """Show what of the window this branch takes and what no longer fits; while the model answers it tells that."""
        ids = self._dialogue.ids
        if self._phase is not Phase.READY or not ids:
            self._show_context(None)
            return
        turns, seen = self._dialogue.turns(self._window)

        def show(found: tuple[int, int] | None) -> None:
            if self._phase is Phase.READY and self._dialogue.ids == ids:
                used, dropped = found or (None, 0)
                self._show_context(used)
                self._mark_horizon(seen, dropped)

        in_background(self, lambda: self._bridge.context_of(turns, self._max_new_tokens), show)

    def _mark_horizon(self, seen: list[int], dropped: int) -> None:
        """Mark what the model does not see: the first `dropped` of what it could see, and all before."""
        self._transcript.mark_horizon(None if not dropped else seen[dropped] if dropped < len(seen) else NONE_SEEN)

    def _show_name(self) -> None:
        """Say on the text field's frame which chat this is."""
        persona = self._dialogue.setup.persona
        self._writing.title(self._dialogue.name, persona)

    def _is_live(self, request: int) -> bool:
        return self._live is not None and self._live.request == request

    def _live_turn(self) -> AnswerTurn | None:
        if self._live is None or self._live.left:
            return None
        turn = self._transcript.turn(self._live.message.id)
        return turn if isinstance(turn, AnswerTurn) else None

    def _take_stats(self, stats: Stats, *, running: bool) -> None:
        if self._live is not None and not self._live.left:
            self._context_used = stats.context_used
        self._show_figures(stats, running=running)
