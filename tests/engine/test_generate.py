"""One answer, start to end: prefill in chunks, the window's edge, the reasons to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine import context
from floe_chat.engine.events import Sampling
from floe_chat.engine.generate import PREFILL_CHUNK, KVCache
from floe_chat.engine.loader import LoadedModel
from floe_chat.models.errors import UsageError

from .driver import GREEDY, answer, open_model

WINDOW = 512


@pytest.fixture(scope="module")
def loaded(tiny_pack: Path) -> LoadedModel:
    return open_model(tiny_pack)


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("length", [1, PREFILL_CHUNK - 1, PREFILL_CHUNK, PREFILL_CHUNK + 1, WINDOW - 1])
def test_prefill_tells_its_progress_chunk_by_chunk(loaded: LoadedModel, length: int) -> None:
    progress = answer(loaded, prompt_of(length), max_new_tokens=1).progress
    assert progress == [*range(PREFILL_CHUNK, length, PREFILL_CHUNK), length]


@pytest.mark.parametrize("wanted", [0, 1, 7])
def test_an_answer_has_the_length_asked_for(loaded: LoadedModel, wanted: int) -> None:
    result = answer(loaded, prompt_of(5), max_new_tokens=wanted)
    assert len(result.tokens) == wanted and result.reason == "length"


@pytest.mark.parametrize("left", [1, 2, 10])
def test_an_answer_ends_where_the_window_does(loaded: LoadedModel, left: int) -> None:
    result = answer(loaded, prompt_of(WINDOW - left), max_new_tokens=left + 50)
    assert len(result.tokens) == left and result.reason == "context"


@pytest.mark.parametrize("length", [0, WINDOW, WINDOW + 1])
def test_prompts_that_leave_no_room_are_refused(loaded: LoadedModel, length: int) -> None:
    with pytest.raises(ValueError, match="window"):
        answer(loaded, prompt_of(length))


@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(loaded: LoadedModel, place: int) -> None:
    free = answer(loaded, prompt_of(6), max_new_tokens=12).tokens
    stop = free[place]
    first = free.index(stop)
    result = answer(loaded, prompt_of(6), max_new_tokens=12, stop_ids=(99_999, stop))
    assert result.tokens == free[:first] and result.reason == "stop"


def test_a_stop_token_in_the_prompt_stops_nothing(loaded: LoadedModel) -> None:
    prompt = prompt_of(6)
    free = answer(loaded, prompt, max_new_tokens=8).tokens
    harmless = next(token for token in prompt if token not in free)
    assert answer(loaded, prompt, max_new_tokens=8, stop_ids=(harmless,)).tokens == free


def test_the_same_seed_gives_the_same_answer(loaded: LoadedModel) -> None:
    warm = Sampling(temperature=2.0, min_p=0.0, seed=11)
    first, second = (answer(loaded, prompt_of(4), sampling=warm).tokens for _ in range(2))
    other = answer(loaded, prompt_of(4), sampling=Sampling(temperature=2.0, min_p=0.0, seed=12)).tokens
    assert first == second != other


def test_values_out_of_range_are_refused_before_anything_is_computed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*_arguments: Any, **_named: Any) -> None:
        raise AssertionError("the model was called")

    monkeypatch.setattr(loaded.model, "forward", computed)
    with pytest.raises(UsageError):
        answer(loaded, prompt_of(4), sampling=Sampling(temperature=-1))


def test_an_answer_leaves_nothing_behind_for_the_next(loaded: LoadedModel) -> None:
    alone = answer(loaded, prompt_of(9)).tokens
    answer(loaded, prompt_of(300), max_new_tokens=3)
    assert answer(loaded, prompt_of(9)).tokens == alone


def test_the_cache_says_how_large_it_is(loaded: LoadedModel) -> None:
    kv = KVCache()
    assert kv.nbytes() == 0
    with torch.inference_mode():
        loaded.model(input_ids=torch.tensor([prompt_of(10)]), past_key_values=kv.cache, use_cache=True)
    # 2 layers, keys and values, 10 tokens, hidden 64 over all heads, float32
    assert kv.nbytes() == 2 * 2 * 10 * 64 * 4


class Configuration:
    """What a model's configuration may say of its window."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": None}, context.DEFAULT_WINDOW),
        ({}, context.DEFAULT_WINDOW),
    ],
)
def test_the_window_is_the_configurations(fields: dict[str, Any], expected: int) -> None:
    assert context.window(Configuration(**fields)) == expected


@pytest.mark.parametrize(("wanted", "room"), [(10, 10), (512, 256), (256, 256), (1, 1)])
def test_an_answer_may_claim_half_the_window(wanted: int, room: int) -> None:
    assert context.room_for_answer(WINDOW, wanted) == room


def test_greedy_is_what_the_names_say() -> None:
    assert GREEDY.temperature == 0
