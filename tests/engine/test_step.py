"""The lean pass is transformers' own, in pieces, with keys and values of 16 bits or 8; which pass is taken, and why."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import kv_stores
from floe_chat.engine.decoder.decoders import FusedDecoder, LibraryDecoder, choose
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import BLOCK, BorrowingStore, GrowingStore, KvForm
from floe_chat.engine.decoder.layers import read_rope
from floe_chat.engine.decoder.ways import Compiled
from floe_chat.engine.events import Advanced
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.models.families import FAMILIES
from torch import Tensor, nn

from ..helpers import relative_rms
from .driver import open_model, silent
from .fake_card import FakeCard
from .offloading import needs_of
from .step_models import (
    EACH_HEAD,
    LIMIT,
    MODELS,
    PRESET,
    WINDOW,
    Guessing,
    Noting,
    blocks_of,
    feed,
    ids_of,
    lean_pass,
    make_model,
)

PIECES = [1, 1, 90, 60, 1, 1, 5, 1]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same tokens whatever test ran before: of random ones, about 1 in 6,000 rounds by more than LIMIT."""
    torch.manual_seed(0)


both_ways = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])


@pytest.mark.some(8)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_librarys(name: str) -> None:
    """Token by token and in chunks, compiled and by torch's operations."""
    model = make_model(name)
    # States are summed up token by token: single tokens' noise is larger than the mean's, ours and the library's alike.
    limit = 5 * LIMIT if FAMILIES[model.config.model_type].states else LIMIT
    ids, ends = torch.tensor([ids_of(sum(PIECES))]), torch.tensor(PIECES).cumsum(0) - 1
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits[0, ends]
    plain, logits = deepcopy(model).double(), list[Tensor]()

    def near(ours: Tensor, at: int) -> bool:
        """Or as near the sum without rounding as the library's own is: ten random layers make noise grow."""
        if relative_rms(ours, expected[at]) <= limit:
            return True
        if not logits:
            with torch.inference_mode():
                logits.append(plain(input_ids=ids, use_cache=False).logits[0, ends])
        return relative_rms(ours, logits[0][at]) <= 2 * relative_rms(expected[at], logits[0][at])

    for compiled in (True, False):
        found = feed(lean_pass(model, compiled=compiled), KVCache(), ids[0].tolist(), PIECES)
        assert all(near(ours, at) for at, ours in enumerate(found))
    again = feed(LibraryDecoder(model), KVCache(), ids[0].tolist(), PIECES)
    assert relative_rms(again, expected) <= limit, "joined weights changed the library's pass"


@pytest.mark.parametrize("name", ["phimoe-longrope", "mixtral-longrope"])
@pytest.mark.parametrize("long", [False, True])
def test_longer_texts_are_turned_by_frequencies_of_their_own(name: str, long: bool) -> None:
    model = make_model(name)
    rope: Any = model.config.rope_parameters
    factors = torch.tensor(rope["long_factor" if long else "short_factor"], dtype=torch.float64)
    turns = torch.arange(1100)[:, None] / (factors * rope["rope_theta"] ** (torch.arange(6) / 6))
    scale = rope.get("long_mscale" if long else "short_mscale") or (1 + math.log(2.0) / math.log(1024)) ** 0.5
    end = 1100 if long else 1024
    cos, sin = read_rope(model, FAMILIES[model.config.model_type]).tables(0, end, long=long).double().unbind(1)
    assert relative_rms(cos, scale * turns[:end].cos().repeat(1, 2)) <= 1e-4
    assert relative_rms(sin, scale * torch.cat([-turns[:end].sin(), turns[:end].sin()], 1)) <= 1e-4


def test_every_family_that_can_be_packed_is_compared() -> None:
    """Those with biases in their experts need a pack's experts: test_families.py."""
    ours = {name for name, family in FAMILIES.items() if not family.biased}
    assert {name.partition("-")[0] for name in MODELS} >= ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    ["mixtral", "olmoe", "olmoe-shares", "qwen2_moe", "qwen3_moe", "glm4_moe", "ernie4_5_moe", "phimoe-longrope"],
)
def test_the_router_is_the_librarys(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    family = FAMILIES[model.config.model_type]
    blocks = family.blocks(model)
    noting = [Noting() for _ in blocks]
    for block, experts in zip(blocks, noting, strict=True):
        block.experts = experts
    feed(choose(model, WINDOW), KVCache(), ids_of(40), [30, *[1] * 10])
    with torch.inference_mode():
        for block, experts in zip(blocks, noting, strict=True):
            assert len(experts.calls) == 11
            for hidden, index, weights in experts.calls:
                _, theirs, chosen = family.router(block)(hidden)
                if "glm4" in name:  # theirs are in no order
                    chosen, order = chosen.sort()
                    theirs = theirs.gather(-1, order)
                    index, order = index.sort()
                    weights = weights.gather(-1, order)
                assert torch.equal(index, chosen)
                if "ernie" in name and dtype == torch.bfloat16:  # ours are not rounded
                    assert torch.equal(weights.bfloat16(), theirs)
                elif (len(hidden) == 1 and dtype == torch.float32) or "glm4" in name:  # added up in another order
                    assert relative_rms(weights, theirs) <= LIMIT and weights.dtype == theirs.dtype
                else:
                    assert torch.equal(weights, theirs)


@both_ways
@pytest.mark.parametrize("name", ["mixtral-sliding", "olmoe", "qwen3_moe"])
def test_the_next_layers_input_is_foreseen(name: str, compiled: bool) -> None:
    model = make_model(name)
    guesses: list[Tensor] = []
    first, second, last = Guessing(0, guesses), Guessing(1, guesses), Noting()
    for layer, experts in zip(model.model.layers, (first, second, last), strict=True):
        layer.mlp.experts = experts
    lean = first.decoder = second.decoder = lean_pass(model, compiled=compiled)
    ids, pieces = ids_of(24), [20, 1, 1, 2]
    end = feed(lean, KVCache(), ids, pieces)[-1]
    for turn in range(len(pieces)):
        assert relative_rms(guesses[2 * turn], second.calls[turn][0]) <= LIMIT
        assert relative_rms(guesses[2 * turn + 1], last.calls[turn][0]) <= LIMIT
    assert relative_rms(end, feed(lean, KVCache(), ids, [24])[-1]) <= LIMIT, "guesses left a trace"


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3_moe"])
def test_16_bit_is_no_worse_than_the_librarys(name: str) -> None:
    # The same rounded weights in float32 say what both should compute. Experts are left out: a router's near tie
    # decides otherwise after any rounding.
    wide, narrow = make_model(name).to(torch.bfloat16).float(), make_model(name, torch.bfloat16)
    for model in (wide, narrow):
        for layer in model.model.layers:
            layer.mlp.experts = Noting()
    ids, pieces = ids_of(60), [40, *[1] * 20]
    exact = feed(LibraryDecoder(wide), KVCache(), ids, pieces)
    library = feed(LibraryDecoder(narrow), KVCache(), ids, pieces).float()
    lean = feed(choose(narrow, WINDOW), KVCache(), ids, pieces).float()
    assert 0 < relative_rms(lean, exact) <= 1.2 * relative_rms(library, exact) <= 0.1


def test_joined_weights_are_there_once(tiny_pack: Path) -> None:
    model = open_model(tiny_pack).model
    lean = choose(model, 512)
    attention = model.model.layers[1].self_attn
    parts = [getattr(attention, name).weights.q for name in ("q_proj", "k_proj", "v_proj")]
    assert isinstance(lean, FusedDecoder)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert parts[0].untyped_storage().nbytes() == sum(part.nbytes for part in parts)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (
            "mixtral",
            {"head_dim": 12, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic changes with the length",
        ),
        ("gpt_oss", {"head_dim": 12, "sliding_window": 9}, "biases that are not a pack's"),
    ],
)
def test_what_it_does_not_compute_the_library_does_and_the_reason_is_told(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    model = make_model(name, **changes)
    decoder = choose(model, WINDOW)
    assert isinstance(decoder, LibraryDecoder) and reason in decoder.reason
    ids = ids_of(20)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    assert relative_rms(feed(decoder, KVCache(), ids, [19, 1])[-1], expected) <= LIMIT


@pytest.mark.parametrize(
    ("dtype", "library", "reason"),
    [
        (torch.float32, True, "one compiled call per layer and token"),
        (torch.bfloat16, True, "by torch's operations, because the compiled step computes float32, not torch.bfloat16"),
        (torch.float32, False, "by torch's operations, because it was not compiled"),
    ],
)
def test_it_is_told_whether_the_compiled_step_runs(
    dtype: torch.dtype, library: bool, reason: str, request: pytest.FixtureRequest
) -> None:
    if not library:
        request.getfixturevalue("no_library")
    lean = choose(make_model("mixtral", dtype), WINDOW)
    assert isinstance(lean, FusedDecoder) and lean.reason.endswith(reason)
    assert isinstance(lean.way, Compiled) == ("compiled call per" in reason)


def without_bias(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = None


class Wrapped(nn.Linear):
    """A linear layer that may compute something else."""


def wraps(model: Any) -> None:
    old = model.model.layers[2].self_attn.v_proj
    model.model.layers[2].self_attn.v_proj = Wrapped(old.in_features, old.out_features)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(without_bias, "have a bias"), (wraps, "stored in different ways")],
)
def test_parts_it_does_not_know_are_declined(change: Any, reason: str) -> None:
    model = make_model("olmoe-biased-clipped")
    change(model)
    decoder = choose(model, WINDOW)
    assert isinstance(decoder, LibraryDecoder) and reason in decoder.reason


def test_more_tokens_than_the_window_are_refused() -> None:
    lean = choose(make_model("mixtral"), 10)
    with pytest.raises(ValueError, match="window"):
        lean.forward(ids_of(11), KVCache())


@pytest.mark.parametrize("token", [-1, 101])
def test_tokens_outside_the_vocabulary_are_refused_and_the_next_ones_are_not(token: int) -> None:
    lean, kv = choose(make_model("mixtral"), WINDOW), KVCache()
    with pytest.raises(IndexError, match="vocabulary"):
        lean.forward([5, token], kv)
    assert kv.length == 0 and bool(lean.forward([5, 100], kv).isfinite().all())


# Of logits, with 8 bits against 16; and between two paths that round some number to the neighbouring code.
LOSS, NEAR = 4e-2, 5e-3
KINDS_OF_HEADS = [
    *("mixtral-odd", "mixtral-one-key-head", "mixtral-all-key-heads", "mixtral-sliding", "olmoe-biased-clipped"),
    *("qwen2_moe-mixed", "qwen3_moe", "phimoe-longrope", "gemma4_text", "qwen3_next"),
]
OTHERS = [pytest.param(name, marks=pytest.mark.thorough) for name in EACH_HEAD if name not in KINDS_OF_HEADS]


@pytest.mark.some(5)
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        *(name if name in KINDS_OF_HEADS else pytest.param(name, marks=pytest.mark.thorough) for name in EACH_HEAD),
    ],
)
def test_logits_are_near_those_of_16_bits_on_every_path(name: str) -> None:
    model = make_model(name)
    for block in blocks_of(model):  # a router's near tie decides otherwise after any rounding
        block.experts = Noting()
    pieces = [1, 1, 7, 1, 1, 60, 1, 5, 1]
    ids = ids_of(sum(pieces))
    exact = feed(LibraryDecoder(model), KVCache(), ids, pieces)
    caches = KVCache(), KVCache()
    ways = [lean_pass(model, KvForm(8), compiled=compiled) for compiled in (True, False)]
    assert all("keys and values of 8 bits" in way.reason for way in ways)
    found = [feed(way, kv, ids, pieces) for way, kv in zip(ways, caches, strict=True)]
    assert 1e-5 < relative_rms(found[0], exact) <= LOSS
    assert relative_rms(found[0], found[1]) <= NEAR
    more = ways[0].way.most - ways[1].way.most  # states, of tokens that may be guessed
    assert caches[0].nbytes() == caches[1].nbytes() + more * getattr(caches[0].store, "_each", 0)


@pytest.mark.some(1)
@pytest.mark.parametrize(("bits", "near"), [(8, 1), (16, 0), (16, 2)])
def test_entries_in_ram_change_nothing(bits: int, near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer chats move layers out, an edit brings them back, and another branch goes on from there."""
    monkeypatch.setattr(kv_stores, "BLOCK", 8)
    model, ids = make_model("mixtral"), ids_of(60)
    pieces = [20, *[1] * 20, 15, *[1] * 5]
    whole = feed(lean_pass(model, KvForm(bits)), KVCache(), ids, pieces)
    one = lean_pass(model, KvForm(bits))
    kv = KVCache()
    feed(one, kv, ids, [1])
    assert isinstance(kv.store, GrowingStore)
    for compiled in (True, False):
        most = near * kv.store.layout.nbytes(1, 40)
        lean, own = lean_pass(model, KvForm(bits, most), compiled=compiled), KVCache()
        assert relative_rms(feed(lean, own, ids, pieces), whole) <= (NEAR if bits == 8 else 1e-5)
        assert own.spilled() > 0 and own.nbytes() <= most
        long = own.spilled()
        branch = [*ids[:11], *ids_of(49)]
        assert own.keep(branch[:12], PRESET) == 11
        assert own.spilled() < long or not near
        again = feed(lean, own, branch, [1] * 49)
        other = feed(lean_pass(model, KvForm(bits)), KVCache(), branch, [11, *[1] * 49])[1:]
        assert relative_rms(again, other) <= (NEAR if bits == 8 else 1e-5)


def opened(pack: Path, device: str, **given: Any) -> LoadedModel:
    return load(pack, None, device, silent, **given)[0]


def test_a_graph_reads_codes_wherever_they_are(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stores, "BLOCK", 4)
    plain = opened(tiny_pack, "cpu", advanced=Advanced(kv_bits="8"))
    ids = [1 + 7 * i % 200 for i in range(40)]
    plain.control.preset = PRESET  # no neuron lies at a threshold
    wanted = feed(plain.decoder, KVCache(), ids, [1] * 40)
    card = FakeCard(monkeypatch)
    loaded, kv = load(tiny_pack, None, "cpu", silent, library=True, advanced=Advanced(kv_bits="8"))[0], KVCache()
    assert "one graph per token" in loaded.decoder.reason and len(card.captures) == 1
    loaded.control.preset = PRESET
    first, graphs = feed(loaded.decoder, kv, ids, [1] * 10), len(card.captures)
    assert isinstance(kv.store, GrowingStore)
    kv.store.layout = replace(kv.store.layout, most=kv.store.layout.nbytes(1, 24))  # as of a small card
    found = torch.cat([first, feed(loaded.decoder, kv, ids, [1] * 30)])
    assert relative_rms(found, wanted) <= NEAR and kv.spilled() > 0 and len(card.captures) == graphs


def test_a_pool_gives_way_and_then_ram_does(tiny_pack: Path) -> None:
    """A chat continues that is longer than what the device has room for at all."""
    needs = needs_of(tiny_pack, 2, 8, BLOCK)
    asked, whole = Advanced(kv_bits="8", context=BLOCK), opened(tiny_pack, "cpu", advanced=Advanced(kv_bits="8"))
    given = {"vram": needs.least() + 40 * needs.row, "advanced": asked, "parts": Parts(mix=Mix(pool=2))}
    loaded, kv = opened(tiny_pack, "throttled:1gb", **given), KVCache()
    assert loaded.offload is not None and loaded.window == 512
    for each in (loaded, whole):
        each.control.preset = PRESET
    ids, pieces = [1, *[40 + n % 200 for n in range(402)]], [200, *[1] * 100, 100, 1]
    found = feed(loaded.decoder, kv, ids, pieces)
    assert isinstance(kv.store, BorrowingStore) and 0 < kv.nbytes() <= (kv.store.layout.most or 0)
    assert kv.spilled() > 0 and kv.nbytes() + kv.spilled() == 2 * BLOCK * needs.kv.whole
    assert loaded.offload.pool.capacity >= needs.top_k * needs.neurons
    assert relative_rms(found, feed(whole.decoder, KVCache(), ids, pieces)) <= NEAR
    assert kv.keep(ids[:60], PRESET) == 59 and kv.spilled() == 0
    loaded.close()
