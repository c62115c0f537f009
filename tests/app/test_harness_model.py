"""The class that the harness calls, beside the harness's own for transformers models."""

from __future__ import annotations

import shutil
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from floe_chat.engine.loader import load
from floe_chat.models.errors import FloeError, UsageError

from ..helpers import edit_json, reseal

if TYPE_CHECKING:
    from floe_chat.app.cli.harness.harness_model import PackLM
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

TEXT = "A crane stood with its arm raised against a grey sky – and nobody came. "
LONG = TEXT * 20  # 1480 tokens of the test's tokenizer, which has one per byte; the window is 512


def by_transformers(checkpoint: Path) -> HFLM:
    """The harness's own model, computing in float32."""

    from lm_eval.models.huggingface import HFLM

    make: Any = HFLM  # its registration hides what it takes
    return make(pretrained=str(checkpoint), dtype="float32", device="cpu")


@pytest.fixture(scope="module", params=["plain", "start token"])
def both(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, exact_pack: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PackLM, HFLM]:
    """The pack without rounding through our class, the checkpoint through theirs; with both kinds of tokenizer."""

    from floe_chat.app.cli.harness.harness_model import PackLM, read_tokenizer

    checkpoint, pack = tiny_checkpoint, exact_pack
    if request.param == "start token":
        base = tmp_path_factory.mktemp("start")
        checkpoint = Path(shutil.copytree(tiny_checkpoint, base / "checkpoint"))
        pack = Path(shutil.copytree(exact_pack, base / "pack"))
        start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        processor = {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        }
        for folder in (checkpoint, pack):
            edit_json(folder / "tokenizer.json", lambda fields: fields.update(post_processor=processor))
        reseal(pack)
    theirs = by_transformers(checkpoint)
    loaded, _ = load(pack, "Exact", "cpu", lambda _step, _share: None, library=True)
    ours = PackLM(loaded, *read_tokenizer(pack), told=lambda _step: None)
    assert ours.tok_encode("A")[:1] == ([1] if request.param == "start token" else ours.tok_encode("A"))
    return ours, theirs


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, 0, ("task", index, 1)) for index, args in enumerate(arguments)]


@pytest.mark.parametrize("chunk", [1024, 100], ids=["one pass", "several passes"])
def test_likelihoods_are_those_of_transformers(
    both: tuple[PackLM, HFLM], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from floe_chat.app.cli.harness import harness_model

    ours, theirs = both
    monkeypatch.setattr(harness_model, "CHUNK", chunk)
    wanted = requests(
        "loglikelihood",
        *((TEXT[:length], char) for length in range(2, 14) for char in string.ascii_letters + string.punctuation),
        ("Spaces go to the right  ", "side"),
        ("", TEXT),
        ("", "<s>again"),
        ("<s>[INST] Hi [/INST]", "Hello"),
        ("Grüße – 你", "好"),
        (LONG, "the end"),
        ("the beginning", LONG[:490]),
        ("\n", "after nothing"),
    )
    *found, after_nothing = ours.loglikelihood(wanted)
    expected = theirs.loglikelihood(wanted[:-1])
    for request, got, right in zip(wanted, found, expected, strict=False):
        assert got[0] == pytest.approx(right[0], abs=1e-4, rel=1e-6), request.args
        assert got[1] == right[1], request.args
    assert {greedy for _, greedy in found} == {True, False}
    assert after_nothing[0] < 0, "theirs stops at a context that is all white space"


@pytest.mark.parametrize("chunk", [1024, 100], ids=["one pass", "several passes"])
def test_texts_longer_than_the_window_are_read_as_transformers_does(
    both: tuple[PackLM, HFLM], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from floe_chat.app.cli.harness import harness_model

    ours, theirs = both
    monkeypatch.setattr(harness_model, "CHUNK", chunk)
    wanted = requests("loglikelihood_rolling", (LONG,), (TEXT,), ("",), (LONG[:512],))
    found, expected = ours.loglikelihood_rolling(wanted), theirs.loglikelihood_rolling(wanted)
    assert found == pytest.approx(expected, abs=1e-4, rel=1e-6)  # sums of up to 1480 terms


def test_answers_are_those_of_transformers(both: tuple[PackLM, HFLM]) -> None:
    ours, theirs = both
    wanted = requests(
        "generate_until",
        (TEXT, {"until": ["e", "\n"], "max_gen_toks": 40}),
        (TEXT, {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}),
        ("<s>Hi", {"until": ["</s>"], "max_new_tokens": 6}),
        (LONG, {"until": "no such text", "max_gen_toks": 6}),
    )
    found = ours.generate_until(wanted)
    assert found == theirs.generate_until(wanted) and any(found)


def test_conversations_are_written_as_transformers_does(both: tuple[PackLM, HFLM]) -> None:
    ours, theirs = both
    asked = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(asked) == theirs.apply_chat_template(asked)
    begun = [*asked, {"role": "assistant", "content": "I"}]
    assert ours.apply_chat_template(begun, False) == theirs.apply_chat_template(begun, False)
    with pytest.raises(UsageError, match="refuses"):
        ours.apply_chat_template([{"role": "critic", "content": "Hm"}])


def test_drawn_answers_repeat_with_the_run_and_differ_within_it(both: tuple[PackLM, HFLM]) -> None:
    wanted = requests("generate_until", *[(TEXT, {"until": [], "max_gen_toks": 8, "do_sample": True})] * 2)
    first = both[0].generate_until(wanted)
    assert first == both[0].generate_until(wanted) and first[0] != first[1]


def test_what_does_not_fit_the_window_is_refused(both: tuple[PackLM, HFLM]) -> None:
    ours, _ = both
    with pytest.raises(FloeError, match="likelihood of 513 tokens"):
        ours.loglikelihood(requests("loglikelihood", ("<s>", "x" * 513)))
    with pytest.raises(FloeError, match="likelihood of 0 tokens"):
        ours.loglikelihood(requests("loglikelihood", ("A", "")))
    with pytest.raises(FloeError, match="answers of 512 tokens"):
        ours.generate_until(requests("generate_until", ("A", {"until": [], "max_gen_toks": 512})))
    with pytest.raises(FloeError, match="num_beams"):
        ours.generate_until(requests("generate_until", ("A", {"until": [], "num_beams": 4})))
