"""One saved chat, one prompt: the screen, the chat line by line and `ask --continue` give the model the same tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from floe_chat.app.cli.ask import Asked, ask
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import PromptTurn, Question
from floe_chat.app.history import Attachment, ChatSetup, History, history_file
from floe_chat.app.plain.plain_chat import PlainChat
from floe_chat.app.tui import FloeChatApp, Reopened
from floe_chat.engine.events import Command, Generate, Sampling

from ..helpers import edit_json, reseal
from .scripted import order, screen_text, status, until

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}[assistant]"
)
SETUP = ChatSetup("tiny", None, Sampling(temperature=0.0), "Be brief.")
OTHERS_OWN = replace(SETUP, system_prompt="Be long.")  # of new chats, as settings and --system give it
FILES = (Attachment("a.txt", "some\ntext"), Attachment("b.md", "```\nx\n```"))
TURNS = (
    PromptTurn("system", "Be brief."),
    PromptTurn("user", "Sum?\n\na.txt:\n```\nsome\ntext\n```\n\nb.md:\n````\n```\nx\n```\n````"),
    PromptTurn("assistant", "Two.", "1 + 1"),
    PromptTurn("user", "Call it"),
    PromptTurn("assistant", '<tool_call>{"name": "add"}</tool_call>\n<tool_response>2</tool_response>\nIt is', "hm"),
    PromptTurn("user", "And now?"),
)


class Noting(ChatClient):
    """Keeps the messages and the tokens of each question."""

    def __init__(self, pack: Path) -> None:
        super().__init__(pack, None, "cpu")
        self.asked: list[tuple[PromptTurn, ...]] = []
        self.prompts: list[tuple[int, ...]] = []
        send = self._session.send

        def noting(command: Command) -> None:
            if isinstance(command, Generate):
                self.prompts.append(tuple(command.prompt))
            send(command)

        self._session.send = noting

    def prepare(self, question: Question, count: int = 1) -> list[int]:
        self.asked.append(tuple(question.messages))
        return super().prepare(question, count)


@pytest.fixture
def pack(tiny_pack: Path, tmp_path: Path) -> Path:
    """The tiny model with a template that writes thinking."""
    pack = Path(shutil.copytree(tiny_pack, tmp_path / "tiny"))
    edit_json(pack / "tokenizer_config.json", lambda fields: fields.update(chat_template=TEMPLATE))
    reseal(pack)
    return pack


def saved() -> int:
    """A chat of all there can be; its id. It ends with an answer that stopped before any text."""
    history = History(history_file())
    chat = history.begin(SETUP)

    def round_of(parent: int | None, text: str, answer: str, thought: str, files: tuple[Attachment, ...] = ()) -> int:
        with history.answering(history.ask(chat, parent, text, files), "tiny", "Fast") as kept:
            kept.think(thought)
            kept.append(answer)
            kept.finish(None, "complete" if answer == "Two." else "stopped")
        return kept.id

    first = round_of(None, "Sum?", "Two.", "1 + 1", FILES)
    second = round_of(round_of(first, "Stopped", " ", "so"), "Call it", TURNS[4].text, "hm")
    round_of(second, "Stopped too", "", "so")
    assert history.close()
    return chat


@pytest.fixture
def noting(pack: Path) -> Iterator[Callable[[], Noting]]:
    made: list[Noting] = []

    def make() -> Noting:
        made.append(Noting(pack))
        return made[-1]

    yield make
    for client in made:
        client.close()


async def test_a_saved_chat_makes_one_prompt(noting: Callable[[], Noting]) -> None:
    asking, plain, shown = noting(), noting(), noting()
    saved()
    assert ask(asking, Asked("And now?", OTHERS_OWN, 3, number=1), "text") == 0

    history, chat, lines = History(history_file()), saved(), iter(["And now?", "/quit"])
    PlainChat(plain, history, OTHERS_OWN, 3, lambda _prompt: next(lines)).run(history.conversation(chat))
    assert history.close()

    history, chat = History(history_file()), saved()
    app = FloeChatApp(
        shown,
        sampling=SETUP.sampling,
        max_new_tokens=3,
        system_prompt=OTHERS_OWN.system_prompt,
        history=history,
        reopened=Reopened(chat, own_model=False),
    )
    async with app.run_test() as pilot:
        await until(pilot, lambda: status(pilot).state == "ready" and "Call it" in screen_text(pilot), 120)
        await order(pilot, "And now?")
        await until(pilot, lambda: bool(shown.prompts), 120)  # sent after it was prepared
    assert history.close()

    assert asking.asked == plain.asked == shown.asked == [TURNS]
    assert asking.prompts == plain.prompts == shown.prompts and len(asking.prompts) == 1
