"""One answer, start to end: prefill in chunks, the window's edge, the reasons to stop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from floe_chat.engine import context
from floe_chat.engine.decoder.decoders import Decoder, LibraryDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.events import Sampling
from floe_chat.engine.experts.moe_layer import PREFILL_CHUNK, SHORTEST_CHUNK
from floe_chat.engine.generate import generate
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.kernels.sampling import draw
from floe_chat.models.errors import PackError
from torch import Tensor

from .driver import GREEDY, a_preset, answer, layer_by_layer, open_model, silent

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


@pytest.mark.parametrize(
    ("length", "wanted", "got", "reason"),
    [
        *((5, wanted, wanted, "length") for wanted in (0, 1, 7)),
        *((WINDOW - left, left + 50, left, "context") for left in (1, 10)),
    ],
)
def test_an_answer_has_the_length_asked_for_or_ends_where_the_window_does(
    loaded: LoadedModel, length: int, wanted: int, got: int, reason: str
) -> None:
    result = answer(loaded, prompt_of(length), max_new_tokens=wanted)
    assert len(result.tokens) == got and result.reason == reason


def limited(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, *, most: int, errors: list[Exception]) -> None:
    """Let the device's memory run out with each of these errors in turn, at passes of more than `most` tokens."""
    forward = loaded.decoder.forward

    def tried(ids: Sequence[int], kv: KVCache) -> Tensor:
        if len(ids) > most and errors:
            raise errors.pop(0)
        return forward(ids, kv)

    monkeypatch.setattr(loaded.decoder, "forward", tried)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["torch", "cublas", "triton"],
)
def test_a_prompt_that_memory_is_too_small_for_is_read_in_smaller_parts(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Where all is on a card, no pool gives way."""
    loaded, prompt = open_model(tiny_pack), prompt_of(100)
    assert loaded.control.make_room is None
    want = answer(loaded, prompt, max_new_tokens=4).tokens
    limited(loaded, monkeypatch, most=30, errors=[error] * 9)
    found = answer(loaded, prompt, max_new_tokens=4)
    assert (found.tokens, found.progress) == (want, [25, 50, 75, 100])
    said = [notice.cause for notice in loaded.control.notices]
    assert len(said) == 2 and "50 tokens at a time" in said[0] and "25 tokens" in said[1]


def test_memory_that_is_too_small_for_the_least_ends_the_answer(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = open_model(tiny_pack)
    limited(loaded, monkeypatch, most=0, errors=[torch.OutOfMemoryError("CUDA out of memory")] * 99)
    with pytest.raises(torch.OutOfMemoryError, match="nothing can be freed"):
        answer(loaded, prompt_of(100), max_new_tokens=1)
    assert loaded.control.chunk == SHORTEST_CHUNK
    other = open_model(tiny_pack)
    limited(other, monkeypatch, most=0, errors=[RuntimeError("CUDA error: an illegal memory access")])
    with pytest.raises(RuntimeError, match="illegal"):
        answer(other, prompt_of(100), max_new_tokens=1)


def test_a_token_that_memory_is_too_small_for_moves_keys_and_values_to_ram(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(mix=Mix(gpu=2))
    loaded, _ = load(tiny_pack, None, "throttled:1gb", silent, vram=1 << 30, parts=parts)
    try:
        prompt, kv = prompt_of(50), KVCache()
        want = answer(loaded, prompt, max_new_tokens=4).tokens
        loaded.control.make_room = None
        run = generate(
            loaded.decoder, kv, prompt, GREEDY, max_new_tokens=4, stop_ids=(), window=WINDOW, control=loaded.control,
            telemetry=loaded.telemetry,
        )  # fmt: skip
        next(run)
        assert not kv.spilled()
        limited(loaded, monkeypatch, most=0, errors=[torch.OutOfMemoryError("CUDA out of memory") for _ in range(2)])
        assert [step.token for step in run] == want and kv.spilled()
    finally:
        loaded.close()


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


@dataclass
class Talk:
    """Turns of a conversation over one cache, each compared with the same prompt on an empty one."""

    loaded: LoadedModel
    decoder: Decoder
    kv: KVCache

    def run(self, prompt: list[int], kv: KVCache, steps: int | None = None, tokens: int = 12) -> list[int]:
        """The answer; after `steps` steps of the generator it is left alone, as a cancelled one is."""
        self.loaded.telemetry.begin(1, len(prompt), 0.0)
        running = generate(
            self.decoder,
            kv,
            prompt,
            GREEDY,
            max_new_tokens=tokens,
            stop_ids=(),
            window=WINDOW,
            control=self.loaded.control,
            telemetry=self.loaded.telemetry,
        )
        seen = list(itertools.islice(running, steps))
        self.progress = [step.done for step in seen if step.token is None]
        return [step.token for step in seen if step.token is not None]

    def turn(self, prompt: list[int], *reused: int) -> list[int]:
        """An answer that must be that of an empty cache, with `reused` tokens of the prompt not computed again.

        Of several numbers one must hold.
        """
        fresh = self.run(prompt, KVCache())
        assert self.reused() == 0 and self.progress[0] > 0
        answer = self.run(prompt, self.kv)
        assert answer == fresh and len(set(answer)) > 2
        assert (found := self.reused()) in reused
        assert self.progress[0] == (found or min(PREFILL_CHUNK, len(prompt))) and self.progress[-1] == len(prompt)
        return answer

    def reused(self) -> int:
        stats = self.loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=WINDOW)
        return stats.reused_tokens


@pytest.fixture(scope="module")
def exact(exact_pack: Path) -> LoadedModel:
    return open_model(exact_pack, "Exact")


@pytest.fixture(params=["lean", "library"])
def talk(request: pytest.FixtureRequest, exact: LoadedModel) -> Iterator[Talk]:
    preset = exact.control.preset
    yield Talk(exact, exact.decoder if request.param == "lean" else LibraryDecoder(exact.model), KVCache())
    exact.control.preset = preset
    exact.control.cancelled.clear()


def test_each_turn_computes_only_what_is_new(talk: Talk) -> None:
    text = prompt_of(20)
    first = talk.turn(text, 0)
    # The token drawn last was never computed.
    second = talk.turn(text + first + prompt_of(7), 31)
    talk.turn(text + first + prompt_of(7) + second + prompt_of(290), 31 + 1 + 7 + 11)


def test_an_edited_message_is_computed_from_the_edit_on(talk: Talk) -> None:
    text = prompt_of(300)
    answer = talk.turn(text, 0)
    edited = [*text[:270], 7 if text[270] != 7 else 8, *text[271:]]
    talk.turn(edited, 270)
    talk.turn(text + answer + prompt_of(4), 270)


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_an_answer_that_was_left_alone_leaves_what_it_computed(talk: Talk, steps: int) -> None:
    text = prompt_of(PREFILL_CHUNK + 44)
    left = talk.run(text, talk.kv, steps=steps)
    there = PREFILL_CHUNK if steps == 1 else len(text) + max(0, len(left) - 1)
    # Where several tokens come of one call, the last that was taken has been computed for the next one.
    talk.turn(text + left + prompt_of(9), there, there + (len(left) > 1))


def test_a_finer_preset_computes_all_anew_and_a_coarser_one_does_not(talk: Talk) -> None:
    text = prompt_of(50)
    talk.loaded.control.preset = a_preset("", 0.6, lossless=True)
    talk.turn(text, 0)
    talk.loaded.control.preset = a_preset("", 0.3, lossless=True)
    talk.turn(text, 0)
    talk.loaded.control.preset = a_preset("", 0.6, lossless=True)
    talk.run(text, talk.kv)
    assert talk.reused() == 50


def test_conversations_take_no_more_memory_than_the_window(talk: Talk) -> None:
    sizes: list[int] = []
    for number in range(14):
        talk.run([*prompt_of(90 + 37 * (number % 7)), 3], talk.kv, tokens=2)
        sizes.append(talk.kv.nbytes())
    # 2 layers, keys and values of the whole window, hidden 64 over all heads, float32
    assert max(sizes) <= 2 * 2 * WINDOW * 64 * 4
    assert max(sizes[7:]) == max(sizes[:7])


def test_prompt_tokens_per_second_count_computed_tokens(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(talk.loaded.telemetry, "clock", lambda: float(next(clock)))
    rates: list[float | None] = []
    for more in ([], [3]):
        talk.run([*prompt_of(40), *more], talk.kv, steps=3)
        stats = talk.loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=WINDOW)
        rates.append(stats.prefill_tps)
    assert rates == [40.0, 1.0]


@pytest.mark.parametrize("said", [512, None, ...])
def test_the_window_is_the_configurations(said: Any) -> None:
    config = SimpleNamespace() if said is ... else SimpleNamespace(max_position_embeddings=said)
    assert context.window(config) == (512 if said == 512 else context.DEFAULT_WINDOW)


@pytest.mark.parametrize("later", [False, True], ids=["prompt", "later"])
@pytest.mark.parametrize("path", ["compiled", "layer by layer", "library", "plain"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=1)], ids=["greedy", "sampled"])
def test_logits_that_are_not_numbers_blame_the_pack(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, path: str, later: bool
) -> None:
    if path == "layer by layer":
        layer_by_layer(monkeypatch)
    if path == "library":
        monkeypatch.setattr(loaded, "decoder", LibraryDecoder(loaded.model))
    if path == "plain":
        monkeypatch.setattr("floe_chat.engine.sampling.native_ends.draw", draw)
        layer_by_layer(monkeypatch)
    prompt = prompt_of(5)
    drawn = answer(loaded, prompt, sampling=sampling, max_new_tokens=1).tokens
    weight: torch.Tensor = loaded.model.model.embed_tokens.weight
    assert drawn[0] not in prompt
    spoiled, kept = (drawn if later else prompt[-1:]), weight.detach().clone()
    try:
        with torch.no_grad():
            weight[spoiled] = torch.nan
        loaded.control.narrow = later
        with pytest.raises(PackError, match="not numbers") as error:
            answer(loaded, prompt, sampling=sampling, max_new_tokens=4)
    finally:
        loaded.control.narrow = False
        with torch.no_grad():
            weight.copy_(kept)
    assert "floe-chat verify" in error.value.hint and "come from the embedding" in error.value.cause
    assert ("range of float16" in error.value.cause) == later
    assert answer(loaded, prompt, sampling=sampling, max_new_tokens=1).tokens == drawn
