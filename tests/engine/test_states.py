"""Layers that keep a state: many tokens at once are what they are one by one, and a text can be gone back in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import Held, KVCache, StateCopy
from floe_chat.engine.decoder.kv_shelf import KVShelf
from floe_chat.engine.decoder.kv_stores import Layout
from floe_chat.engine.decoder.mixers.delta import chunked_rule
from floe_chat.engine.decoder.state_store import EVERY, StatefulStore
from floe_chat.engine.events import Cancel, Finished, Load, Loaded, NewTokens
from floe_chat.engine.loader import LoadedModel
from floe_chat.kernels.mixers.convolution import Convolution, convolution
from floe_chat.kernels.mixers.delta import Delta, delta_rule
from floe_chat.kernels.weights import Projection
from floe_chat.models.packing.pack import EXACT

from .. import families
from ..helpers import make_pack, relative_rms
from .driver import Engine, a_preset, answer, asking, open_model

SAME = a_preset("", 0.0, lossless=True)


@pytest.mark.parametrize(
    ("heads", "shared", "key", "value", "taps"), [(4, 2, 6, 10, 4), (1, 1, 1, 2, 2), (9, 3, 7, 19, 3)]
)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_chunks_are_the_rule(heads: int, shared: int, key: int, value: int, taps: int, tokens: int) -> None:
    torch.manual_seed(tokens)
    channels = 2 * shared * key + heads * value
    parts = torch.randn(taps, channels) / taps, torch.rand(heads) * 4, torch.randn(heads), torch.rand(value)
    delta = Delta(heads, shared, key, value, *parts, 1e-6, Projection(torch.empty(0)))
    before = torch.randn(delta.state, dtype=torch.float64)
    qkv = torch.randn(tokens, channels + heads * value, dtype=torch.float64)
    gates, ours, theirs = torch.randn(tokens, 2 * heads, dtype=torch.float64), before.clone(), before.clone()
    along = {end: torch.full_like(before, torch.nan) for end in range(EVERY, tokens, 2 * EVERY)}
    found = chunked_rule(qkv, gates, before, delta, ours, along)
    for end, copy in along.items():
        delta_rule(qkv[:end], gates[:end], before, delta, theirs)
        assert relative_rms(copy, theirs) < 1e-6
    assert relative_rms(found, delta_rule(qkv, gates, before, delta, theirs)) < 1e-6  # parameters have 32 bits
    assert relative_rms(ours, theirs) < 1e-6


def test_a_short_convolution_hands_over_the_states_on_its_way() -> None:
    mixer, given = Convolution(torch.randn(3, 5), torch.randn(5)), torch.randn(150, 15)
    before, along = torch.randn(10), {end: torch.full((10,), torch.nan) for end in (64, 128)}
    ours, theirs = before.clone(), before.clone()
    found = convolution(given, before, mixer, ours, along)
    for end, copy in along.items():
        convolution(given[:end], before, mixer, theirs)
        assert torch.equal(copy, theirs)
        assert relative_rms(convolution(given[end:], copy, mixer, theirs), found[end:]) < 1e-6
        assert torch.equal(theirs, ours)


def store(most: int | None = None) -> StatefulStore:
    layout = Layout(((1, 2),), 10_000, torch.float32, torch.device("cpu"))
    return StatefulStore(layout, [5, 0, 7], *([] if most is None else [most * 48]))


def read(own: StatefulStore, tokens: int) -> None:
    """Of each layer the state says how many tokens are there."""
    end = own.length + tokens
    own.reserve(end)
    own.begin(tokens)
    for layer, size in ((0, 5), (2, 7)):
        assert (own.state(layer) == own.length).all()
        for number, copy in own.along(layer).items():
            copy.fill_(own.length + number)
        own.next_state(layer, torch.full((size,), float(end)))
    own.length = end


def test_a_text_is_gone_back_in_to_the_copy_before() -> None:
    own = store()
    for tokens in (10, 70, 1, 1):
        read(own, tokens)
    assert (own.keeps(82), own.keeps(81), own.keeps(79), own.keeps(9)) == (82, 80, 74, 0)
    own.crop(80)
    assert own.length == 80 and (own.state(0) == 80).all() and (own.state(2) == 80).all()
    own.crop(79)
    assert own.length == 74 and (own.state(2) == 74).all()
    own.crop(3)
    assert own.length == 0 and not own.state(0).any()
    read(own, 4)
    assert (own.state(0) == 4).all() and [len(layer) for layer in own.layers()] == [2, 256, 2]


def test_single_tokens_are_not_copied_one_by_one() -> None:
    own = store()
    for _ in range(EVERY + 1):
        read(own, 1)
    assert [length for length in range(1, own.length) if own.keeps(length) == length] == [EVERY]


def test_a_pass_that_broke_off_has_changed_nothing() -> None:
    own = store()
    read(own, 7)
    own.next_state(0, torch.full((5,), 99.0))
    own.crop(7)
    read(own, 1)
    assert (own.state(0) == 8).all()


def test_copies_are_fewer_the_longer_ago() -> None:
    own = store(most=8)
    for _ in range(60):
        read(own, EVERY)
    ends = [length for length in range(1, own.length + 1) if own.keeps(length) == length]
    assert len(ends) == 8 and ends[-2:] == [own.length - EVERY, own.length]
    gaps = [after - before for before, after in zip([0, *ends], ends, strict=False)]
    assert gaps[1:] == sorted(gaps[1:], reverse=True), "no part of what is near was given up for what is far"


def test_copies_are_where_turns_begin_and_end_however_long_ago() -> None:
    own = store(most=17)
    turns: list[tuple[int, int]] = []
    for question, said in ((700, 300), (30, 700), (1000, 500), (50, 300), (40, 1000)):
        began = own.length
        for part in (*[256] * (question // 256), question % 256):
            read(own, part)
        turns.append((began, own.length))
        for _ in range(said):
            read(own, 1)
    for began, asked in turns[-3:]:
        assert own.keeps(began) == began and asked - own.keeps(asked - 1) <= EVERY, (began, asked)


def test_copies_of_a_long_prompt_are_where_its_turns_end() -> None:
    own = store(most=17)
    own.turns = [1500, 2304, 2500, 5000, 5999]
    for _ in range(24):
        read(own, 256)
    for _ in range(1000):
        read(own, 1)
    assert [turn - own.keeps(turn) for turn in own.turns] == [28, 0, 4, 8, 47]


def test_several_tokens_end_where_a_copy_is_due() -> None:
    own = store()
    assert own.unbroken(100) == EVERY and own.unbroken(9) == 9
    read(own, 10)
    assert own.unbroken(100) == EVERY
    read(own, 1)
    assert own.unbroken(100) == EVERY - 1
    own.length += EVERY - 1
    assert own.keeps(10 + EVERY) == 10 + EVERY and own.unbroken(100) == EVERY


def test_a_part_that_broke_off_leaves_the_copies_before() -> None:
    own = store(most=6)
    for tokens in (100, *[1] * 100):
        read(own, tokens)
    own.begin(256)
    assert set(own.along(0)) <= {EVERY, 2 * EVERY, 3 * EVERY} and own.along(0)
    for copy in own.along(0).values():
        copy.fill_(torch.nan)
    own.crop(200)
    assert own.length == own.keeps(200) == 200 and (own.state(0) == 200).all()
    assert own.keeps(199) == 100
    read(own, 256)
    assert own.keeps(456 - 1) == 200 + 3 * EVERY


def held_of(own: StatefulStore, most: int = 1 << 20) -> Held:
    found = own.copied(most)
    assert found is not None
    return found


def test_a_copy_of_a_text_can_be_gone_on_and_back_in() -> None:
    own, other = store(), store()
    for tokens in (100, *[1] * 100):
        read(own, tokens)
    for _, layer in attended(own):
        layer[:] = torch.arange(400.0).view(200, 1, 2)
    held = held_of(own)
    read(own, 3)
    read(other, 500)
    for length in (200, 164, 64):
        assert other.fits(held, length)
        other.put(held, length)
        assert other.length == length and (other.state(0) == length).all() and (other.state(2) == length).all()
        assert all(torch.equal(layer, torch.arange(400.0).view(200, 1, 2)[:length]) for _, layer in attended(other))
        assert other.keeps(length - 1) == max(end for end in (0, 64, 100, 164) if end < length)
    read(other, 70)
    assert (other.state(0) == 134).all() and held.keeps(300) == 200 and held.keeps(163) == 100


def attended(own: StatefulStore) -> list[tuple[int, torch.Tensor]]:
    return [(1, own.layers()[1][: own.length])]


def test_a_copy_takes_no_more_than_there_is_room_for() -> None:
    own = store()
    read(own, 640)
    entries, each = 640 * 8, 12 * 4
    for most, copies in ((entries + 3 * each, 3), (entries + each, 1)):
        held = held_of(own, most)
        assert held.nbytes() == most and len(held.copies) == copies and held.keeps(640) == 640
    assert own.copied(entries + each - 1) is None and store().copied(1 << 20) is None


BAD: dict[str, Callable[[Held], Held]] = {
    "another model's layers": lambda held: replace(held, entries=held.entries * 2),
    "another model's heads": lambda held: replace(held, entries=[held.entries[0].view(-1, 2, 1)]),
    "another type": lambda held: replace(held, entries=[held.entries[0].half()]),
    "cut off": lambda held: replace(held, entries=[held.entries[0][:-1]]),
    "no states": lambda held: replace(held, copies=[]),
    "no state there": lambda held: replace(held, copies=held.copies[:-1]),
    "other states": lambda held: replace(
        held, copies=[StateCopy(copy.length, copy.states[::-1]) for copy in held.copies]
    ),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_bad_copies_are_refused_and_nothing_is_lost(spoil: Callable[[Held], Held]) -> None:
    text, kv = list(range(200)), KVCache()
    kv.store = own = store()
    read(own, 150)
    kv.computed(text[:150], SAME)
    parked = kv.parked(1 << 20)
    assert parked is not None
    read(own, 30)
    kv.computed(text[150:180], SAME)
    assert not kv.resume(replace(parked, held=spoil(parked.held)), 150)
    assert kv.keep(text, SAME) == 180 and (own.state(2) == 180).all()
    assert kv.resume(parked, 150) and kv.length == 150 and (own.state(2) == 150).all()


def test_a_shelf_keeps_fewer_copies_before_it_drops_a_conversation() -> None:
    kv, shelf, most = KVCache(), KVShelf(3 * 640 * 8 + 12 * 48), 0
    kv.store = own = store()
    for number in range(1, 5):
        text = [number * 10_000 + at for at in range(640)]
        shelf.turn_to(kv, text, SAME)
        assert kv.keep(text, SAME) == 0
        read(own, 640)
        kv.computed(text, SAME)
        most = max(most, shelf.nbytes())
    assert most == shelf.nbytes() == 3 * 640 * 8 + 12 * 48
    for number in (1, 2, 3):
        text = [number * 10_000 + at for at in range(640)]
        shelf.turn_to(kv, [*text, 5], SAME)
        assert kv.keep([*text, 5], SAME) == 640 and (own.state(0) == 640).all()


def test_a_few_tokens_more_are_brought_back_where_states_are() -> None:
    """What a copy lacks would come on top of what is lacking since the state before."""
    kv, shelf, text = KVCache(), KVShelf(1 << 20), list(range(700))
    kv.store = own = store()
    for prompt, parts, kept in (
        (text, (90, 610), 0),
        ([*text[:70], *text[300:]], (406,), 64),
        ([*text[:100], 5], (11,), 90),
    ):
        shelf.turn_to(kv, prompt, SAME)
        assert kv.keep(prompt, SAME) == kept
        for part in parts:
            read(own, part)
        kv.computed(prompt[kept:], SAME)


def test_what_is_alike_begins_where_a_state_is() -> None:
    """Parts of a prompt end every 100 tokens, of which not all have a copy any more."""
    kv, text = KVCache(), list(range(1000))
    kv.store = own = store(most=4)
    for begun in range(0, 1000, 100):
        read(own, 100)
        kv.computed(text[begun : begun + 100], SAME, chunk=True)
    kept = kv.common(text[:950], SAME, alike=True)
    assert kept % 100 == 0 < kept < own.keeps(949) % 100 + 900 and own.keeps(kept) == kept


@pytest.fixture(scope="module", params=["lfm2_moe", pytest.param("qwen3_5_moe_text", marks=pytest.mark.thorough)])
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    source = families.make(request.param, folder / "source", num_experts_per_tok=6)  # all, as a router's ties flip
    make_pack(source, folder / "pack", EXACT)
    return folder / "pack"


@pytest.fixture(scope="module")
def alone(pack: Path) -> LoadedModel:
    return open_model(pack, "Exact")


class Chat:
    """Questions to one engine, each answered as if nothing had been there before."""

    def __init__(self, engine: Engine, alone: LoadedModel) -> None:
        self._engine, self._alone, self._asked = engine, alone, 0
        self.said, self._computed = set[int](), list[list[int]]()

    def ask(self, prompt: Sequence[int], tokens: int, stop: int | None) -> tuple[list[int], int, int]:
        """The answer, or what came of it until it was stopped behind so many tokens; how much of the prompt was not
        computed, and how much had been before, in whatever text.
        """
        self._asked += 1
        request = self._asked
        self._engine.send(asking(request, prompt, tokens=tokens))
        if stop is not None:
            while len(self._engine.tokens_of(request)) < min(stop, tokens):
                self._engine.until(NewTokens)
            self._engine.send(Cancel(request))
        finished = self._engine.end_of(request)
        assert isinstance(finished, Finished)
        said = self._engine.tokens_of(request)
        self._compare(prompt, said)
        self.said |= {*said}
        there = max((common(prompt, text) for text in self._computed), default=0)
        self._computed.append([*prompt, *said[:-1]])
        return said, finished.stats.reused_tokens, there

    def _compare(self, prompt: Sequence[int], said: list[int]) -> None:
        wanted = answer(self._alone, prompt, max_new_tokens=len(said)).tokens
        if (same := common(said, wanted)) < len(said):  # nothing but a tie is drawn otherwise
            (logits,) = self._alone.decoder.forward([*prompt, *said[:same]], KVCache())
            assert abs(float(logits[said[same]] - logits[wanted[same]])) < 1e-4


def test_a_turn_far_back_in_a_prompt_is_branched_off(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice, stop = random.Random(1), 2
    turns = [[*(dice.randrange(3, 250) for _ in range(length)), stop] for length in (90, 150, 30, 120, 80)]
    monkeypatch.setattr(StatefulStore.__init__, "__defaults__", (0,))  # four copies
    with Engine() as engine:
        engine.send(Load(str(pack), "Exact", "cpu", parked=0))
        engine.until(Loaded)
        for request, kept in enumerate((5, 2, 1)):
            prompt = [token for turn in turns[:kept] for token in turn]
            engine.send(asking(request, [*prompt, 7, 8], stop=[stop]))
            end = engine.end_of(request)
            assert isinstance(end, Finished) and 0 <= (len(prompt) - end.stats.reused_tokens) * bool(request) < EVERY


def test_answers_at_once_begin_where_the_prompt_ends(pack: Path) -> None:
    prompt = [3 + 7 * at % 200 for at in range(150)]
    with Engine() as engine:
        engine.send(Load(str(pack), "Exact", "cpu", parked=1 << 30))
        engine.until(Loaded)
        engine.send(asking(1, prompt, tokens=300))
        engine.until(NewTokens)
        engine.send(*(asking(request, prompt, tokens=300) for request in (2, 3)))
        ends = [engine.until(Finished) for _ in range(3)]
    assert {end.stats.reused_tokens for end in ends if end.request > 1} == {150}
    assert engine.tokens_of(1) == engine.tokens_of(2) == engine.tokens_of(3)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, its) in pairs if mine != its), min(len(one), len(other)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 3))])
def test_a_chat_computes_next_to_nothing_again(pack: Path, alone: LoadedModel, seed: int) -> None:
    with Engine() as engine:
        engine.send(Load(str(pack), "Exact", "cpu", parked=1 << 30))
        engine.until(Loaded)
        converse(Chat(engine, alone), random.Random(seed))


def converse(chat: Chat, dice: random.Random) -> None:
    """Conversations go on, are stopped, edited, asked again, branched off and left for one another."""
    talks = list[tuple[list[int], list[int], list[int], bool]]()
    for _ in range(14):
        question = [dice.randrange(3, 250) for _ in range(dice.choice([1, 5, 40, 70, 200]))]
        way = dice.choice(["on", "on", "edit", "again", "branch", "other", "new"]) if talks else "new"
        # Of its last turn: what was before, with the question, with the answer, and whether that came to its end.
        last = ([], [], [], False) if way == "new" else talks.pop(0 if way == "other" else -1)
        before, prompt, whole, ended = last
        if len(whole) > 420:  # the window is near
            way, whole = "branch", whole[:300]
        begin = {"edit": before, "again": before, "branch": whole[: dice.randrange(len(whole) + 1)]}.get(way, whole)
        asked = prompt if way == "again" else [*begin, *question]
        stop = dice.choice([None, None, 1, 40])
        said, reused, there = chat.ask(asked, dice.randrange(2, 130), stop)
        assert there - reused <= EVERY, way
        if way == "on" and ended:
            assert reused >= len(whole) - 1, "all but the token drawn last"
        talks.append((begin, asked, [*asked, *said], stop is None))
    assert len(chat.said) > 30, "an answer can be told from another"
