"""`floe-chat ask` and a model that thinks: stdout has the answer alone."""

from __future__ import annotations

import json

import pytest
from floe_chat.app.cli.ask import Asked, Form, ask
from floe_chat.app.client.interface import TextDelta, ThoughtDelta, Update
from floe_chat.app.history import ChatSetup, history_file, open_history
from floe_chat.engine.events import Finished

from ..helpers import run_cli
from .scripted import LOADED, ScriptedClient, stats


class Thinker(ScriptedClient):
    """Thinks, then answers, unless it is cut before that."""

    def __init__(self, kind: str = "optional", *, cut: bool = False) -> None:
        super().__init__()
        self.kind, self._cut = kind, cut

    def poll(self, timeout: float = 0.0) -> list[Update]:
        if not self.asked:
            return [LOADED]
        thought: list[Update] = [ThoughtDelta(1, "They ask\n", 3), ThoughtDelta(1, "me.", 2)]
        answer: list[Update] = [] if self._cut else [TextDelta(1, "Yes"), TextDelta(1, ".")]
        return [*thought, *answer, Finished(1, "length" if self._cut else "stop", stats(1))]


def asked(client: Thinker, thinking: str, form: Form = "text", *, saved: bool = False) -> int:
    return ask(client, Asked("hi", ChatSetup(), 100, saved=saved, thinking=thinking), form)


@pytest.mark.parametrize(
    ("thinking", "err"), [("fold", ""), ("show", "They ask\nme.\n\n"), ("off", "")], ids=["fold", "show", "off"]
)
def test_the_answer_alone_is_on_stdout(thinking: str, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(Thinker(), thinking) == 0
    assert capsys.readouterr() == ("Yes.\n", err)


@pytest.mark.parametrize(("kind", "told"), [("less", "asked to think less"), ("always", "has no switch")])
def test_a_model_that_has_to_think_says_so(kind: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked(Thinker(kind), "off")
    out, err = capsys.readouterr()
    assert out == "Yes.\n" and told in err


def test_json_has_both_apart(capsys: pytest.CaptureFixture[str]) -> None:
    for thinking in ("fold", "show"):
        asked(Thinker(), thinking, "json")
        out, err = capsys.readouterr()
        fields = json.loads(out)
        assert (fields["answer"], fields["thinking"], fields["thinking_tokens"]) == ("Yes.", "They ask\nme.", 5)
        assert err == ""


def test_lines_of_json_show_thinking_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    answer = [{"text": "Yes"}, {"text": "."}]
    asked(Thinker(), "fold", "lines")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()][:-1] == answer
    asked(Thinker(), "show", "lines")
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert shown[:-1] == [{"thinking": "They ask\n"}, {"thinking": "me."}, *answer] and shown[-1]["answer"] == "Yes."


def test_an_answer_that_ended_in_its_thinking_says_so_and_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(Thinker(cut=True), "fold", saved=True) == 0
    out, err = capsys.readouterr()
    assert out == "\n" and "still thinking" in err and "--max-tokens" in err
    store = open_history(history_file()).store
    (chat,) = store.conversations()
    _question, answer = store.messages(store.branch(store.conversation(chat.id).head))
    assert (answer.text, answer.thought) == ("", "They ask\nme.")
    assert answer.stats is not None and answer.stats.thought_tokens == 5
    store.close()


def test_a_wrong_word_is_refused() -> None:
    ran = run_cli("ask", "hi", "--thinking", "loud")
    assert ran.code == 2 and "fold" in ran.err and ran.out == ""
