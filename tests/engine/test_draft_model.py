"""Another model that guesses: it follows the text wherever that goes, and no answer is another one by its guesses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from floe_chat.engine.decoder.draft_model import DraftModel
from floe_chat.engine.decoder.fused_pass import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.drafts import Depth
from floe_chat.engine.events import MOST_TOGETHER, Advanced, Extras, Loaded, Sampling
from floe_chat.engine.experts.moe_layer import Cancelled
from floe_chat.engine.generate import Answer
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.planning import disk_tier
from floe_chat.models.packing.pack import EXACT, PackSpec

from .. import families
from ..helpers import edit_json, make_checkpoint, make_pack
from .driver import GREEDY, a_preset, open_model, silent
from .test_head_guesses import Asking

WARM = Sampling(temperature=0.8, top_k=40, min_p=0.01, repetition_penalty=1.1, seed=5)
PROMPT = [5, 9, 17, 3, 42, 5, 9, 17, 200, 7, 11, 60, 61, 3, 42]
FAR = 1000


@dataclass
class Case:
    """A model, itself as its drafter, and another one of the same vocabulary."""

    loaded: LoadedModel
    twin: LoadedModel
    other: LoadedModel

    def by(self, drafter: LoadedModel) -> DraftModel:
        """The model's drafter from now on, which has read nothing."""
        assert isinstance(self.loaded.decoder, FusedDecoder) and isinstance(drafter.decoder, FusedDecoder)
        made = DraftModel("It", drafter.decoder, drafter.control, drafter.window, 0.3)
        self.loaded.decoder.draft_with(made)
        return made


KINDS = ["qwen3_next", "mixtral", "lfm2_moe", "gpt_oss", "gemma4", "deepseek_v2", "phimoe"]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("drafter")
    for name, kind, seed in (("own", request.param, 0), ("other", "olmoe", 1)):
        families.make(kind, folder / f"{name} source", seed=seed)
        make_pack(folder / f"{name} source", folder / name, EXACT)
    return Case(*(open_model(folder / name, "Exact") for name in ("own", "own", "other")))


class Reaching(Asking):
    """Texts are read from so far back."""

    def __init__(self, far: int = FAR, part: int = FAR) -> None:
        super().__init__()
        self.far = far, part

    def reach(self, preset: object, left: int) -> tuple[int, int]:
        return self.far


def answered(
    case: Case,
    kv: KVCache,
    prompt: Sequence[int],
    depth: Depth | None,
    sampling: Sampling = GREEDY,
    extras: Extras | None = None,
    most: int = 40,
    stop: Sequence[int] = (),
) -> list[int]:
    loaded = case.loaded
    loaded.telemetry.begin(1, len(prompt), 0.0)
    answer = Answer(
        *(loaded.decoder, kv, prompt, sampling),
        max_new_tokens=most,
        stop_ids=stop,
        window=loaded.window,
        control=loaded.control,
        telemetry=loaded.telemetry,
        extras=extras,
        depth=depth,
    )
    answer._repeats = None  # pyright: ignore[reportPrivateUsage]
    found = list[int]()
    while not answer.end:
        found += [one.token for one in answer.step() if one.token is not None]
    return found


@pytest.mark.some(2)
def test_a_model_guesses_its_own_tokens(case: Case) -> None:
    """Behind a prompt, an answer, an edit, another chat and the first one again."""
    drafter, kv, other = case.by(case.twin), KVCache(), KVCache()
    depth = Reaching()

    def check(kv: KVCache, prompt: list[int], most: int = 40) -> list[int]:
        found = answered(case, kv, prompt, depth, most=most)
        counts = case.loaded.telemetry.answer
        assert counts.accepted == counts.drafted > most // 2
        assert found == answered(case, KVCache(), prompt, None, most=most)
        return [*prompt, *found]

    text = check(kv, PROMPT, 90)  # states have copies every 64 tokens
    longer = check(kv, [*text, 8, 9, 10, 11, 12, 13, 8, 8, 60])
    check(kv, [*longer[:50], 30, 31, 32])
    check(other, [*PROMPT[::-1], *PROMPT])
    check(kv, longer[:70])
    assert drafter.behind <= MOST_TOGETHER


@pytest.mark.some(1)
def test_answers_stay_the_same(case: Case) -> None:
    case.by(case.other)
    for sampling, extras in ((GREEDY, None), (WARM, None), (WARM, Extras(presence_penalty=0.3))):
        wanted = answered(case, KVCache(), PROMPT, None, sampling, extras)
        for depth in (Reaching(), Reaching(9, 3), Depth()):
            assert answered(case, KVCache(), PROMPT, depth, sampling, extras) == wanted
        stop = wanted[25]
        assert (
            answered(case, KVCache(), PROMPT, Reaching(), sampling, extras, stop=[stop]) == wanted[: wanted.index(stop)]
        )


@pytest.fixture(scope="module")
def packs(tiny_checkpoint: Path, tiny_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, a smaller one, and others that cannot guess for it."""
    folder = tmp_path_factory.mktemp("drafters")

    def swapped(fields: dict[str, Any]) -> None:
        vocabulary = fields["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    sources = {name: make_checkpoint(folder / f"{name} source", layers=1, seed=3) for name in ("small", "foreign")}
    edit_json(sources["foreign"] / "tokenizer.json", swapped)
    sources["wide"] = families.make("mixtral", folder / "wide source", vocab_size=300)
    for name, source in sources.items():
        make_pack(source, folder / name, PackSpec(), name)
    shutil.copytree(folder / "small", folder / "unfinished")
    (folder / "unfinished" / "manifest.json").unlink()
    return {"model": tiny_pack, **{name: folder / name for name in (*sources, "unfinished")}}


def opened(
    packs: dict[str, Path], name: str, device: str = "cpu", vram: int | None = None
) -> tuple[LoadedModel, Loaded]:
    drafting = Advanced(draft=str(packs.get(name, packs["model"].parent / name)))
    return load(packs["model"], None, device, silent, vram=vram, advanced=drafting)


def test_a_pack_is_opened_to_guess(packs: dict[str, Path]) -> None:
    loaded, event = opened(packs, "small")
    assert event.drafter == "small" and "with small guessing tokens" in event.reason and not loaded.control.notices
    assert isinstance(loaded.decoder.head, DraftModel) and 0 < loaded.decoder.head.cost < 1
    case, kv = Case(loaded, loaded, loaded), KVCache()
    assert answered(case, kv, PROMPT, Reaching()) == answered(case, KVCache(), PROMPT, None)
    assert loaded.telemetry.answer.drafted == 0  # the last one was without
    loaded.control.cancelled.set()
    with pytest.raises(Cancelled):
        loaded.decoder.head.follow([*PROMPT, *PROMPT], FAR, FAR)


WHY = {
    "foreign": "different tokenizers",
    "wide": "Its vocabulary has 300 tokens, that of tiny 259",
    "unfinished": "not a packed model|manifest",
    "nothing": "no model",
    "model": "cannot guess its own tokens",
}


@pytest.mark.parametrize("name", WHY)
def test_what_cannot_guess_is_said(packs: dict[str, Path], name: str) -> None:
    loaded, event = opened(packs, name)
    assert loaded.decoder.head is None and event.drafter == "" and ", without guesses by " in event.reason
    (notice,) = loaded.control.notices
    assert re.search(WHY[name], f"{notice.title}. {notice.cause}") and "Answers come without" in notice.cause
    assert any("drafts by" in word and "no effect" in word for word in event.advanced)


def test_there_has_to_be_room(packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "room", lambda: 1)
    loaded, event = opened(packs, "small")
    assert event.drafter == "" and "next to the model" in loaded.control.notices[0].cause


def test_a_model_with_a_pool_is_guessed_for(packs: dict[str, Path]) -> None:
    loaded, event = opened(packs, "small", "throttled:8gb", 4 << 20)
    try:
        assert event.drafter == "small"
        case = Case(loaded, loaded, loaded)
        drafted = answered(case, KVCache(), PROMPT, Reaching())
        assert loaded.telemetry.answer.drafted > 0
        assert drafted == answered(case, KVCache(), PROMPT, None)
    finally:
        loaded.close()


def test_reading_is_worth_a_share_of_what_guesses_gain() -> None:
    depth, preset = Depth(0.1), a_preset("", 0.3)
    depth.took(preset, 0, 40, 40.0)
    far, part = depth.reach(preset, 100)
    assert far > 100 < part and depth.reach(preset, 10_000)[0] > 2 * far and depth.reach(preset, 1)[0] == 32
    for _ in range(40):
        depth.read(preset, 100, 50.0)  # reading a token takes half as long as writing one
    assert depth.reach(preset, 100)[0] == 32 and depth.reach(preset, 100)[1] == 32 < part
    for _ in range(40):
        depth.read(preset, 100, 0.01)
    assert depth.reach(preset, 100)[0] > far
