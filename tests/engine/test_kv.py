"""What of a conversation is kept for its next turn, where keys and values lie, and how earlier ones come back."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache, KVStore, LibraryStore
from floe_chat.engine.decoder.kv_shelf import LEAST, KVShelf
from floe_chat.engine.decoder.kv_stores import BLOCK, GROUP, BorrowingStore, GrowingStore, Layout
from floe_chat.engine.events import Advanced, Finished, Load, Loaded, Notice, Unload
from floe_chat.engine.quality_presets import Preset
from floe_chat.engine.session import NO_ROOM
from floe_chat.kernels.entries import CODES
from floe_chat.kernels.rule import Rule
from torch import Tensor

from .driver import Engine, a_preset, asking
from .offloading import needs_of

SAME = a_preset("", 0.5, 0.5, drop=0.2, major=0.4)
FINER = a_preset("", 0.3, 0.5, drop=0.2, major=0.4)
EXACT = a_preset("", 0.0, lossless=True)
LOGITS = torch.randn(1, 5)


def holding(*parts: tuple[list[int], Preset]) -> KVCache:
    """A cache in which these ids were computed at these presets."""
    kv = KVCache()
    for ids, preset in parts:
        kv.computed(ids, preset)
    return kv


@pytest.mark.parametrize(
    ("held", "prompt", "kept"),
    [
        ([], [1, 2, 3], 0),
        ([1, 2, 3], [1, 2, 3, 4, 5], 3),
        ([1, 2, 3], [1, 2, 3], 2),  # the last one's logits are wanted
        ([1, 2, 3, 4], [1, 2], 1),
        ([1, 2, 3, 4], [1, 9, 3, 4, 5], 1),
        ([1, 2, 3], [9, 1, 2, 3], 0),
    ],
)
def test_the_common_beginning_is_kept(held: list[int], prompt: list[int], kept: int) -> None:
    kv = holding((held, SAME))
    assert kv.keep(prompt, SAME) == kept == kv.length


def test_no_value_of_a_preset_is_overlooked() -> None:
    rule = SAME.rule
    others = {"x_bits": replace(SAME, x_bits=SAME.x_bits + 1), "without_weak": replace(SAME, without_weak=True)}
    for field in dataclasses.fields(Rule):
        value = getattr(rule, field.name)
        more = (0.0, 1.0) if isinstance(value, tuple) else not value if isinstance(value, bool) else value + 0.1
        other = replace(rule, **{field.name: more})
        others[field.name] = replace(SAME, rule=other)
    assert {field.name for field in dataclasses.fields(Preset)} == {"name", "rule", "x_bits", "without_weak"}
    for name, other in others.items():
        kept = [holding(([1, 2], a)).keep([1, 2, 3], b) for a, b in ((SAME, other), (other, SAME))]
        assert sorted(kept) == [0, 2], name


def test_a_preset_that_changed_on_the_way_keeps_what_came_before() -> None:
    kv = holding(([1, 2, 3], EXACT), ([4, 5], SAME), ([6], EXACT))
    assert kv.keep([1, 2, 3, 4, 5, 6, 7], EXACT) == 3


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([(6, SAME, True), (6, SAME, True), (3, SAME, False)], 12),
        ([(6, SAME, True), (3, SAME, False), (1, SAME, False), (6, SAME, True)], 6),  # token by token, then from there
        ([(6, FINER, True), (6, SAME, True)], 0),
        ([(6, SAME, True), (6, FINER, True)], 6),
        ([(4, SAME, False)], 0),
        ([(16, SAME, True)], 0),  # the prompt's last token has to be computed, in its part
    ],
)
def test_only_what_reading_the_prompt_gives_is_alike(parts: list[tuple[int, Preset, bool]], kept: int) -> None:
    kv, prompt = KVCache(), list(range(16))
    for count, preset, chunk in parts:
        kv.computed(prompt[kv.length : kv.length + count], preset, chunk=chunk)
    assert kv.common(prompt, SAME, alike=True) == kept
    assert kv.keep(prompt, SAME, alike=True) == kept == kv.length


def test_a_prompt_that_was_read_whole_is_alike_with_its_logits() -> None:
    prompt = list(range(8))
    kv = KVCache()
    kv.computed(prompt[:6], SAME, chunk=True)
    kv.computed(prompt[6:], SAME)
    kv.read(6, LOGITS)
    kv.computed([8, 9], SAME)  # an answer
    for other, kept in ((prompt, 8), ([*prompt, 8], 6), (prompt[:7], 6), ([*prompt[:7], 9], 6)):
        assert kv.common(other, SAME, alike=True) == kept
    assert kv.common(prompt, FINER, alike=True) == 0 and kv.common(prompt, SAME) == 8
    assert kv.logits is None  # it is behind more
    assert kv.keep(prompt, SAME, alike=True) == 8 and kv.logits is not None and torch.equal(kv.logits, LOGITS)
    kv.cut(7)
    kv.computed(prompt[7:], SAME)  # its last token by itself
    kv.read(7, LOGITS)
    assert kv.common(prompt, SAME) == 8 and kv.common(prompt, SAME, alike=True) == 6


def test_what_is_computed_again_is_not_alike() -> None:
    kv = KVCache()
    kv.computed([1, 2, 3], SAME, chunk=True)
    kv.computed([4, 5, 6], SAME, chunk=True)
    kv.cut(5)
    assert kv.common([1, 2, 3, 4, 5, 6, 7], SAME, alike=True) == 3
    kv.read(3, LOGITS)
    assert not kv.turn(1, 6) and kv.logits is not None
    assert kv.turn(1, 5) and kv.turn(1, 5), "a pass that broke off begins again"
    assert kv.logits is None and not kv.common([1, 2, 3, 4, 5, 6, 7], SAME), "nothing serves before that"
    kv.computed([6], SAME)
    assert not kv.turn(1, 5) and kv.common([1, 2, 3, 4, 5, 6, 7], SAME) == 6
    assert kv.common([1, 2, 3, 4, 5, 6, 7], SAME, alike=True) == 0
    assert kv.turn(1, 7) and kv.length == 6


def test_a_long_prompt_is_turned_as_one_from_its_first_part_on() -> None:
    kv = KVCache()
    kv.keep([1, 2, 3, 4], SAME)
    assert not kv.turn(2, 3) and kv.long
    kv.computed([1, 2], SAME)
    assert not kv.turn(2, 3), "and nothing is read twice"
    kv.keep([1, 2, 9], SAME)
    assert kv.turn(1, 3) and not kv.long


def test_keys_of_one_kind_are_not_taken_for_another() -> None:
    kv = KVCache()
    kv.store_of(LibraryStore, LibraryStore)
    with pytest.raises(TypeError, match="LibraryStore"):
        kv.store_of(GrowingStore, lambda: grown(4))


def grown(window: int, *, layers: int = 2, heads: int = 3, dim: int = 5) -> GrowingStore:
    return GrowingStore(Layout(((2 * heads, dim),) * layers, window, torch.float32, torch.device("cpu")))


def put(store: GrowingStore, part: Sequence[Tensor] | Tensor) -> None:
    """Append (T, *entry) of each layer."""
    end = store.length + len(part[0])
    store.reserve(end)
    for place, both in zip(store.places(end), part, strict=True):
        place.copy_(both)
    store.length = end


@pytest.mark.parametrize("layers", [1, GROUP, 2 * GROUP + 3])
def test_what_is_written_is_read_again_through_growth_and_cropping(layers: int) -> None:
    heads, window = 3, 3 * BLOCK + 17
    store = grown(window, layers=layers)
    whole = torch.randn(layers, window, 2 * heads, 5)
    end = 0
    for size in (1, 1, BLOCK - 2, 1, 70, BLOCK, 1):
        put(store, whole[:, end : end + size])
        end += size
    store.crop(BLOCK + 30)
    whole[:, BLOCK + 30 :] = torch.randn_like(whole[:, BLOCK + 30 :])
    put(store, whole[:, BLOCK + 30 :])
    for first, last in ((0, window), (7, 8), (window - 40, window)):
        assert torch.equal(torch.cat(store.seen(first, last)), whole[:, first:last])
        for layer in range(layers):
            assert torch.equal(store.layers()[layer][first:last], whole[layer, first:last])


def test_memory_grows_seldom_and_up_to_the_window() -> None:
    window = 40 * BLOCK - 3
    store = grown(window)
    sizes: list[int] = []
    for length in range(1, window + 1):
        store.reserve(length)
        store.length = length
        assert length <= store.capacity <= window
        if store.nbytes() not in sizes:
            sizes.append(store.nbytes())
    assert len(sizes) <= 11 and sizes == sorted(sizes)
    assert sizes[0] == 2 * BLOCK * 6 * 5 * 4 and sizes[-1] == 2 * window * 6 * 5 * 4
    with pytest.raises(ValueError, match="window"):
        store.reserve(window + 1)


class Lender:
    """A room of plain memory; what is not lent is filled with NaN."""

    def __init__(self, nbytes: int) -> None:
        self.memory, self.size = torch.full((nbytes,), 255, dtype=torch.uint8), 0

    def vacant(self) -> bool:
        return True

    def let(self, store: KVStore) -> None:
        self.lend(0)

    def lend(self, nbytes: int) -> None:
        assert nbytes <= self.memory.numel()
        self.size = nbytes
        self.memory[: self.memory.numel() - nbytes] = 255

    def lent(self) -> Tensor:
        return self.memory[self.memory.numel() - self.size :]


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(6))
def test_borrowed_memory_is_no_more_than_needed_and_keeps_what_is_in_it(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    layers, window = 1 + 2 * seed, 7 * BLOCK + 19
    entries = tuple((2, 7) if seed > 3 and layer % 3 == 1 else (4, 3) for layer in range(layers))  # of two kinds
    token = sum(4 * rows * dim for rows, dim in entries)
    room = Lender(window * token + 64)
    store = BorrowingStore(Layout(entries, window, torch.float32, torch.device("cpu")), room)
    held = [torch.empty(0, *entry) for entry in entries]

    def drawn(most: int) -> int:
        return int(torch.randint(0, most + 1, (1,), generator=random))

    for turn in range(30):
        kept = drawn(store.length) if turn % 3 == 0 else store.length
        store.crop(kept)
        store.trim(kept + 1)
        more = drawn(min(700, window - kept))
        part = [torch.randn(more, *entry, generator=random) for entry in entries]
        held = [torch.cat([mine[:kept], new]) for mine, new in zip(held, part, strict=True)]
        put(store, part)
        assert store.length == len(held[0]) <= store.capacity < max(kept + 1, len(held[0])) + BLOCK
        assert store.nbytes() == room.size == store.capacity * token
        for layer, memory in enumerate(store.layers()):
            assert torch.equal(memory[: store.length], held[layer])
    with pytest.raises(ValueError, match="window"):
        store.reserve(window + 1)


def spilling(most: int, *, wide: int = 21, window: int = 9 * BLOCK) -> Layout:
    """11 layers, every third one with entries of another width."""
    entries = tuple((wide if layer % 3 == 2 else 21,) for layer in range(11))
    return Layout(entries, window, CODES, torch.device("cpu"), most)


@pytest.mark.parametrize("borrowing", [False, True], ids=["its own", "borrowed"])
@pytest.mark.parametrize(
    ("blocks", "wide"), [(0, 21), (1, 21), (5, 21), (5, 54), (17, 21), (40, 21), (40, 9), (99, 21)]
)
def test_what_a_device_has_no_room_for_is_in_ram(blocks: int, wide: int, borrowing: bool) -> None:
    """Room for so many blocks of a layer: longer chats move layer after layer out, shorter ones take them back."""
    layout = spilling(blocks * BLOCK * 21, wide=wide)
    store = BorrowingStore(layout, Lender(layout.most or 0)) if borrowing else GrowingStore(layout)
    sizes = [size for (size,) in layout.entries]
    held = [torch.empty(0, size, dtype=CODES) for size in sizes]
    random = torch.Generator().manual_seed(blocks)
    versions: set[object] = set()
    for turn, length in enumerate((1, 300, 301, 900, 2000, 2304, 40, 700, 2200)):
        store.crop(min(length, store.length))
        store.trim(length)
        new = [torch.randint(-127, 128, (length - store.length, n), generator=random, dtype=CODES) for n in sizes]
        held = [torch.cat([mine[: store.length], some]) for mine, some in zip(held, new, strict=True)]
        store.reserve(length)
        for place, part in zip(store.places(length), new, strict=True):
            place.copy_(part)
        store.length = length
        for seen in (store.layers(), [layer for group in store.seen(0, length) for layer in group]):
            assert all(torch.equal(layer[:length], mine) for layer, mine in zip(seen, held, strict=True))
        near = sum(end * store.capacity <= blocks * BLOCK * 21 for end in itertools.accumulate(sizes))
        assert store.nbytes() == sum(sizes[:near]) * store.capacity <= max(1, layout.most or 0)
        assert store.spilled() == sum(sizes[near:]) * store.capacity
        versions.add(store.version())
        assert turn > 5 or store.capacity <= -(-length // BLOCK) * BLOCK * 3 // 2 + BLOCK
    assert len(versions) > 3


def test_a_device_with_less_than_it_promised_keeps_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = GrowingStore(spilling(20 * BLOCK * 21)), getattr(GrowingStore, "_allot")  # noqa: B009

    def allot(self: GrowingStore, near: int, capacity: int) -> None:
        if near > 2:
            raise torch.OutOfMemoryError
        real(self, near, capacity)

    monkeypatch.setattr(GrowingStore, "_allot", allot)
    whole = torch.randint(-127, 128, (11, 4 * BLOCK, 21), dtype=CODES)
    for end in (BLOCK, 4 * BLOCK):
        start = store.length
        store.reserve(end)
        for place, part in zip(store.places(end), whole[:, start:end], strict=True):
            place.copy_(part)
        store.length = end
    assert store.nbytes() == 2 * store.capacity * 21 and torch.equal(torch.cat(store.seen(0, 4 * BLOCK)), whole)


def test_a_device_that_cannot_grow_what_it_has_keeps_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they grow by copying, those of some layers are there twice, and an answer ended where there was no room."""
    store = GrowingStore(spilling(1 << 20))
    whole = torch.randint(-127, 128, (11, 4 * BLOCK, 21), dtype=CODES)

    def put_all(start: int, end: int) -> None:
        store.reserve(end)
        for place, part in zip(store.places(end), whole[:, start:end], strict=True):
            place.copy_(part)
        store.length = end

    put_all(0, BLOCK)
    real, calls = Tensor.new_empty, list[int]()
    really = getattr(GrowingStore, "_allot")  # noqa: B009

    def new_empty(self: Tensor, *size: int) -> Tensor:
        calls.append(1)
        if len(calls) > 1:  # there are two groups
            raise torch.OutOfMemoryError
        return real(self, *size)

    def allot(self: GrowingStore, near: int, capacity: int) -> None:
        if near > 5:
            raise torch.OutOfMemoryError
        really(self, near, capacity)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(GrowingStore, "_allot", allot)
    put_all(BLOCK, 4 * BLOCK)
    assert store.spilled() and torch.equal(torch.cat(store.seen(0, 4 * BLOCK)), whole)
    near, version = store.nbytes(), store.version()
    assert store.spill() and store.nbytes() < near // 2 and store.version() != version
    assert torch.equal(torch.cat(store.seen(0, 4 * BLOCK)), whole)
    while store.nbytes():
        assert store.spill()
    assert not store.spill() and torch.equal(torch.cat(store.seen(0, 4 * BLOCK)), whole)


def test_a_new_conversation_gives_borrowed_memory_back() -> None:
    room = Lender(1 << 20)
    kv = KVCache()
    store = BorrowingStore(Layout(((2, 2),) * 1, 20 * BLOCK, torch.float32, torch.device("cpu")), room)
    kv.store_of(GrowingStore, lambda: store)
    put(store, torch.zeros(1, 10 * BLOCK, 2, 2))
    kv.computed([5] * 10 * BLOCK, SAME)
    kv.keep([5] * (3 * BLOCK), SAME)
    assert store.capacity == 3 * BLOCK
    kv.keep([7, 8], SAME)
    assert store.capacity == BLOCK and store.length == 0 and kv.nbytes() == room.size


def test_the_librarys_cache_is_cropped_where_a_pass_broke_off() -> None:
    from transformers import DynamicCache

    store = LibraryStore(DynamicCache)
    whole = torch.randn(2, 1, 3, 10, 4)
    for layer in range(2):
        store.cache.update(whole[0][:, :, : 9 - layer], whole[1][:, :, : 9 - layer], layer)  # layer 1 is behind
    store.crop(6)
    for layer in range(2):
        keys, values = store.cache.update(whole[0][:, :, 6:], whole[1][:, :, 6:], layer)
        assert torch.equal(keys, whole[0]) and torch.equal(values, whole[1])
    store.crop(0)
    assert store.nbytes() == 0
    keys, _ = store.cache.update(whole[0], whole[1], 0)
    assert torch.equal(keys, whole[0])


def test_a_chat_that_outgrows_its_device_says_so_once(tiny_pack: Path) -> None:
    needs = needs_of(tiny_pack, 2, 16, BLOCK)
    vram, advanced = needs.least() + 40 * needs.row, Advanced(kv_bits="16", context=BLOCK)  # room for BLOCK tokens
    short, long = [40 + n % 200 for n in range(100)], [40 + n % 190 for n in range(BLOCK + 50)]
    with Engine() as engine:
        engine.send(Load(str(tiny_pack), None, "throttled:1gb", vram, advanced))
        engine.until(Loaded)
        for request, conversation, prompt, said in (
            (1, 7, short, 0),
            (2, 7, [*short, *long[:200]], 1),
            (3, 7, [*short, *long[:210]], 1),  # nobody wants to read it after each question
            (4, 8, long, 2),
            (5, 7, [*short, *long[:220]], 2),
        ):
            engine.send(replace(asking(request, prompt, tokens=3), conversation=conversation))
            assert isinstance(engine.end_of(request), Finished)
            assert engine.seen.count(NO_ROOM) == said, request
        assert sum(isinstance(event, Notice) for event in engine.seen) == 2
        engine.send(Load(str(tiny_pack), None, "throttled:1gb", vram, advanced))
        engine.send(replace(asking(6, long, tokens=3), conversation=7))
        engine.end_of(6)
        assert engine.seen.count(NO_ROOM) == 3, "another model's chat"


LAYERS, ENTRY, WINDOW = 9, (2, 3), 4096
LAYOUT = Layout((ENTRY,) * LAYERS, WINDOW, torch.float32, torch.device("cpu"))
TOKEN = LAYERS * 6 * 4  # bytes


def entry_of(conversation: Sequence[int], at: int) -> Tensor:
    """What a layer would have for a token: it depends on all before it."""
    seen = hash(tuple(conversation[: at + 1])) & 0xFFFF
    return torch.arange(6.0).view(ENTRY) + seen


class Talks:
    """A cache whose entries are those of `entry_of`, and its shelf."""

    def __init__(self, most: int, *, borrowing: bool = False) -> None:
        self.kv, self.shelf = KVCache(), KVShelf(most)
        store = BorrowingStore(LAYOUT, Lender(LAYOUT.nbytes(LAYERS, WINDOW))) if borrowing else GrowingStore(LAYOUT)
        self.kv.store = self.store = store

    def ask(self, prompt: list[int], answer: Sequence[int] = ()) -> int:
        """Compute what is missing; how much of the prompt was there."""
        self.shelf.turn_to(self.kv, prompt, SAME)
        kept = self.kv.keep(prompt, SAME)
        talk = [*prompt, *answer]
        self.store.reserve(len(talk))
        for number, layer in enumerate(self.store.layers()):
            for at in range(kept, len(talk)):
                layer[at] = entry_of(talk, at) + number
        self.store.length = len(talk)
        self.kv.computed(talk[kept:], SAME)
        for number, layer in enumerate(self.store.layers()):
            for at in (0, kept - 1, kept, len(talk) - 1):
                if at >= 0:
                    assert torch.equal(layer[at], entry_of(talk, at) + number), (number, at)
        return kept


def talk(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(1, 1 << 30) + at for at in range(length)]


@pytest.mark.some(1)
@pytest.mark.parametrize("borrowing", [False, True])
def test_two_conversations_in_turn(borrowing: bool) -> None:
    talks = Talks(1 << 30, borrowing=borrowing)
    one, two = talk(1, 200), talk(2, 300)
    assert talks.ask(one) == talks.ask(two) == 0
    for turn in range(4):
        one, two = one + talk(10 + turn, 70), two + talk(20 + turn, 90)
        assert (talks.ask(one), talks.ask(two)) == (len(one) - 70, len(two) - 90)
    assert talks.shelf.nbytes() == len(one) * TOKEN  # nothing is there twice


def test_a_common_beginning_serves_all() -> None:
    """Such as a long system prompt."""
    talks, system = Talks(1 << 30), talk(0, 500)
    assert talks.ask(system + talk(1, 80)) == 0
    assert talks.ask(system + talk(2, 80)) == 500
    assert talks.ask(talk(3, 100)) == 0
    assert talks.ask(system + talk(4, 80)) == 500
    assert talks.ask(system + talk(1, 80) + [7]) == 580
    assert talks.ask(system + talk(2, 80) + [7]) == 580
    assert talks.ask(system + talk(4, 80) + [7]) == 580


def test_the_oldest_gives_way() -> None:
    talks = Talks(1300 * TOKEN)  # a copy needs its store's room, which grows by blocks
    for seed in range(4):
        assert talks.ask(talk(seed, 500)) == 0
        assert talks.shelf.nbytes() <= 1300 * TOKEN
    assert talks.ask([*talk(2, 500), 1]) == 500
    assert talks.ask([*talk(3, 500), 1]) == 500
    assert talks.ask([*talk(0, 500), 1]) == 0


def test_what_is_not_worth_it_is_not_parked() -> None:
    talks = Talks(400 * TOKEN)  # too large
    talks.ask(talk(1, 500))
    talks.ask(talk(2, 500))
    assert talks.shelf.nbytes() == 0
    talks = Talks(1 << 30)  # a few tokens, such as another answer to the same question
    talks.ask(talk(1, 300), talk(5, LEAST - 1))
    talks.ask(talk(1, 300) + talk(2, 50))
    assert talks.shelf.nbytes() == 0
    kv, shelf = KVCache(), KVShelf(1 << 30)
    kv.store = LibraryStore()
    kv.computed(talk(1, 200), SAME)
    shelf.turn_to(kv, talk(2, 200), SAME)
    assert shelf.nbytes() == 0


def test_what_a_coarser_preset_computed_stays_away() -> None:
    talks = Talks(1 << 30)
    talks.ask(talk(1, 300))
    talks.shelf.turn_to(talks.kv, talk(2, 300), SAME)
    talks.kv.keep(talk(2, 300), SAME)
    talks.shelf.turn_to(talks.kv, talk(1, 300), FINER)
    assert talks.kv.keep(talk(1, 300), FINER) == 0


@pytest.mark.parametrize("parked", [0, 1 << 30])
def test_answers_are_the_same_with_and_without(exact_pack: Path, parked: int) -> None:
    """Tokens are compared with those of an engine that has loaded the model for them."""
    talks, request = {seed: [at % 90 + 3 for at in talk(seed, 100)] for seed in (1, 2)}, 0
    with Engine() as engine, Engine() as other:
        for one in (engine, other):
            one.send(Load(str(exact_pack), "Exact", parked=parked if one is engine else 0))
            one.until(Loaded)
        for turn in range(2):
            for seed in talks:
                request += 1
                engine.send(asking(request, talks[seed]))
                finished = engine.end_of(request)
                assert isinstance(finished, Finished)
                # All but the answer's last token, and what the question adds.
                assert finished.stats.reused_tokens == (len(talks[seed]) - 4 if parked and turn else 0)
                other.send(Unload(), Load(str(exact_pack), "Exact"), asking(request, talks[seed]))
                other.end_of(request)
                assert engine.tokens_of(request) == other.tokens_of(request)
                talks[seed] += [*engine.tokens_of(request), 5, 6, 7]
