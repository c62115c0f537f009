"""`floe-chat ask`: one question in, one answer out, for pipes and scripts.

Question and answer are saved in the history, so that `ask --continue` or the screen can continue from there.
"""

from __future__ import annotations

import dataclasses
import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...engine.events import Failed, Finished, Loaded, Notice, PrefillProgress, Sampling
from ...models.catalog import short_name
from .. import progress
from ..chat.dialogue import Dialogue
from ..client.interface import UNKNOWN_WINDOW, Client, Question, TextDelta, ThoughtDelta
from ..client.loading import error_of, wait_until_loaded
from ..client.thinking import limit_of_off
from ..history import Answer, AnswerStats, ChatSetup, History, history_file
from ..history.answer import unsaved
from ..history.exporting import json_text
from ..history.live import PATIENCE_SECONDS
from ..terminal.signals import ending_in_order
from ..text.plain_text import printable

Form = Literal["text", "json", "lines"]
"""The form of stdout: text as it comes, one JSON object at the end, or one for each piece and one at the end."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The question, and which model answers it.

    Attributes:
        setup: model and system prompt, as the history saves them. number: of the saved chat to continue, which keeps
            its own system prompt; None: a new chat. saved: whether question and answer are saved. thinking: see
            `settings.THINKING`.
    """

    text: str
    setup: ChatSetup
    max_tokens: int
    number: int | None = None
    saved: bool = True
    thinking: str = "fold"


def ask(client: Client, asked: Asked, form: Form) -> int:
    """Ask, print the answer in this form, save both, and return the exit code.

    Raises:
        FloeError: there is nothing to continue, the model cannot be loaded, or the question does not fit.
    """
    with ending_in_order():
        return _ask(client, asked, form)


def _ask(client: Client, asked: Asked, form: Form) -> int:
    client.start()
    file = history_file()
    # An unsaved question may still continue a saved chat: that is read, and nothing is written.
    history = History(file if asked.saved or (asked.number is not None and file.exists()) else None)
    wait = 0.0
    try:
        if asked.number is not None and (failure := history.failure()) is not None:
            history.poll()  # which would report it again
            raise failure
        loaded = wait_until_loaded(client)
        setup = replace(asked.setup, model=client.reference, preset=loaded.preset)
        if asked.thinking == "off" and (limit := limit_of_off(client.thinking)):
            sys.stderr.write(f"floe-chat: {limit}.\n")
        if not loaded.remote:
            from ..client.costs import published_note  # torch, which a server's answer does not need

            if note := published_note(loaded.preset, Path(loaded.folder)):
                sys.stderr.write(f"floe-chat: {note}\n")
        dialogue = Dialogue(history, setup)
        if asked.number is not None:
            dialogue.open(history.numbered(asked.number).id)
        # Drawn here, so that --json can report the seed that reproduces this answer; but for rounding, where a part of
        # its prompt was kept.
        seed = setup.sampling.seed
        drawn = replace(setup.sampling, seed=secrets.randbelow(1 << 32) if seed is None else seed)
        turns, _seen = dialogue.turns(loaded.context_window or UNKNOWN_WINDOW, asking=asked.text)
        number = dialogue.number if asked.saved else 0
        question = Question(turns, drawn, asked.max_tokens, conversation=number, alike=seed is not None)
        progress.step("preparing the prompt ...")
        request = client.submit(question).request  # what does not fit is not saved
        wait = PATIENCE_SECONDS
        with _kept(dialogue, asked.text, setup) if asked.saved else unsaved() as kept:
            try:
                _answer(client, request, drawn, loaded, kept, _Output(form, shown=asked.thinking == "show"))
            except BrokenPipeError:  # the reader has closed the pipe
                kept.finish(None, "stopped")
                raise
    except (KeyboardInterrupt, SystemExit):
        client.cancel()
        wait = 0.0
        raise
    finally:
        saved = history.close_patiently(wait)  # first: the engine may write what is only a cache
        client.close()
    return 0 if saved else 1


def _kept(dialogue: Dialogue, text: str, setup: ChatSetup) -> Answer:
    """Save the question, and take the answer as it comes."""
    dialogue.ask(text)
    return dialogue.answering(short_name(setup.model), setup.preset or "")[1]


def _answer(client: Client, request: int, sampling: Sampling, loaded: Loaded, kept: Answer, output: _Output) -> None:
    output.wait(f"waiting for {client.remote or loaded.model} ...")
    while True:
        for update in client.poll(timeout=0.1):
            match update:
                case ThoughtDelta():
                    kept.think(update.text)
                    output.think(update.text, update.tokens)
                case TextDelta():
                    kept.append(update.text)
                    output.write(update.text)
                case PrefillProgress(done=done, total=total):
                    output.wait(f"reading the prompt, {done} of {total} tokens ...")
                case Finished(request=done) if done == request:
                    kept.finish(AnswerStats.of(update.stats, update.reason, output.thought_tokens))
                    output.end(update, loaded, sampling)
                    return
                case Notice(title, cause):
                    sys.stderr.write(printable(f"floe-chat: {title}. {cause}\n"))
                case Failed():
                    progress.clear()
                    raise error_of(update)
                case _:
                    pass


class _Output:
    """The answer on stdout in one of the forms. `shown`: its thinking too, which is on stderr where stdout is text."""

    def __init__(self, form: Form, *, shown: bool) -> None:
        self._form, self._shown = form, shown
        self._pieces: list[str] = []
        self._thoughts: list[str] = []
        self._ended = ""  # what the last thinking ended with
        self._waits = False
        self.thought_tokens = 0

    def wait(self, what: str) -> None:
        """Say on a terminal that nothing of the answer has come yet."""
        self._waits = True
        progress.step(what)

    def think(self, text: str, tokens: int) -> None:
        """More of what the model thinks."""
        self._end_waiting()
        self._thoughts.append(text)
        self.thought_tokens += tokens
        if self._shown and text and self._form == "lines":
            sys.stdout.write(json_text({"thinking": text}) + "\n")
            sys.stdout.flush()
        elif self._shown and text and self._form == "text":
            sys.stderr.write(text)
            sys.stderr.flush()
            self._ended = text[-1]
        elif not self._shown:
            counted = f", {self.thought_tokens:,} tokens" if self.thought_tokens else ""
            progress.step(f"thinking{counted} ...")

    def write(self, text: str) -> None:
        """More of the answer."""
        self._end_thinking()
        self._pieces.append(text)
        if self._form != "json" and text:
            sys.stdout.write(text if self._form == "text" else json_text({"text": text}) + "\n")
            sys.stdout.flush()

    def end(self, finished: Finished, loaded: Loaded, sampling: Sampling) -> None:
        """The answer has ended."""
        self._end_thinking()
        if self._thoughts and not self._pieces:
            sys.stderr.write("floe-chat: The model was still thinking at the end; --max-tokens gives it more room.\n")
        if self._form == "text":
            sys.stdout.write("\n")
            return
        stats = finished.stats
        fields: dict[str, Any] = {
            "answer": "".join(self._pieces),
            "thinking": "".join(self._thoughts),
            "stop_reason": finished.reason,
            "model": loaded.model,
            "preset": loaded.preset,
            "backend": loaded.backend,
            "remote": loaded.remote or None,
            "seed": sampling.seed,
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "new_tokens": stats.new_tokens,
            "thinking_tokens": self.thought_tokens,
            "first_token_s": stats.first_token_s,
            "decode_tokens_per_s": stats.decode_tps_mean,
            "active_neurons": stats.active_neurons,
            "bytes_per_token": stats.bytes_per_token,
            "drafter": loaded.drafter or None,
            "drafted_tokens": stats.drafted,
            "accepted_tokens": stats.accepted,
            "draft_speedup": stats.draft_speedup,
            "rows": None if stats.rows is None else dataclasses.asdict(stats.rows),
        }
        sys.stdout.write(json_text(fields) + "\n")
        sys.stdout.flush()  # the history may still have to finish

    def _end_waiting(self) -> None:
        if self._waits:
            progress.clear()
            self._waits = False

    def _end_thinking(self) -> None:
        self._end_waiting()
        if self._ended:
            sys.stderr.write("\n" if self._ended == "\n" else "\n\n")
            self._ended = ""
        elif self._thoughts and not self._pieces:
            progress.clear()
