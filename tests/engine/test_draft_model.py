"""Another model that guesses: it follows the text wherever that goes, and no answer is another one by its guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from floe_chat.engine.decoder.draft_model import DraftModel
from floe_chat.engine.decoder.fused_pass import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.drafts import Depth, Guess
from floe_chat.engine.events import MOST_TOGETHER, Extras, Sampling
from floe_chat.engine.generate import Answer
from floe_chat.engine.loader import LoadedModel
from floe_chat.models.packing.pack import EXACT

from .. import families
from ..helpers import make_pack
from .driver import GREEDY, open_model

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


KINDS = ["mixtral", "qwen3_next", "lfm2_moe", "gpt_oss", "gemma4", "deepseek_v2", "phimoe"]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("drafter")
    for name, kind, seed in (("own", request.param, 0), ("other", "olmoe", 1)):
        families.make(kind, folder / f"{name} source", seed=seed)
        make_pack(folder / f"{name} source", folder / name, EXACT)
    return Case(*(open_model(folder / name, "Exact") for name in ("own", "own", "other")))


class Asking(Depth):
    """Asks before every pass, and computes all that is guessed; texts are read from so far back."""

    def __init__(self, far: int = FAR, part: int = FAR) -> None:
        super().__init__()
        self.far = far, part
        self.right, self.made = 0, 0

    def asks(self, preset: object, other: object) -> bool:
        return True

    def more(self, preset: object, likely: object) -> bool:
        return True

    def worth(self, guess: Guess, preset: object) -> list[int]:
        return guess.tokens

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


def test_a_model_guesses_its_own_tokens(case: Case) -> None:
    """Behind a prompt, an answer, an edit, another chat and the first one again."""
    drafter, kv, other = case.by(case.twin), KVCache(), KVCache()
    depth = Asking()

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


def test_answers_stay_the_same(case: Case) -> None:
    case.by(case.other)
    for sampling, extras in ((GREEDY, None), (WARM, None), (WARM, Extras(presence_penalty=0.3))):
        wanted = answered(case, KVCache(), PROMPT, None, sampling, extras)
        for depth in (Asking(), Asking(9, 3), Depth()):
            assert answered(case, KVCache(), PROMPT, depth, sampling, extras) == wanted
        stop = wanted[25]
        assert (
            answered(case, KVCache(), PROMPT, Asking(), sampling, extras, stop=[stop]) == wanted[: wanted.index(stop)]
        )
