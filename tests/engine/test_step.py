"""The lean pass is transformers' own: the same logits, the same experts, in one piece or many."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import layers
from floe_chat.engine.decoder.decoders import FusedDecoder, LibraryDecoder, choose
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import BLOCK
from floe_chat.engine.experts.moe_layer import PREFILL_CHUNK
from floe_chat.engine.planning.footprint import kv_element
from floe_chat.models.families import FAMILIES
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor

from ..helpers import make_checkpoint, make_pack, relative_rms
from .driver import open_model
from .step_models import LIMIT, MODELS, PRESET, WINDOW, Noting, feed, ids_of, lean_pass, make_model

PIECES = {
    "token by token": [1] * 24,
    "prompt, then tokens": [PREFILL_CHUNK, 1, 1, 1, 1],
    "chunks": [PREFILL_CHUNK, PREFILL_CHUNK, 60, 1, 1, 5, 1],
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same tokens whatever test ran before: of random ones, about 1 in 6,000 rounds by more than LIMIT."""
    torch.manual_seed(0)


both_ways = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_logits_are_the_librarys(model: Any, pieces: list[int]) -> None:
    ids = ids_of(sum(pieces))
    ends = torch.tensor(pieces).cumsum(0) - 1
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, ends]
        exact = deepcopy(model).double()(input_ids=torch.tensor([ids]), use_cache=False).logits[0, ends]
        passes = [lean_pass(model), lean_pass(model, compiled=False)]
        again = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, ends]
    for lean in passes:
        for ours, theirs, true in zip(feed(lean, KVCache(), ids, pieces), expected, exact, strict=True):
            # Or as near the sum without rounding as the library's own is: ten random layers make noise grow.
            assert relative_rms(ours, theirs) <= LIMIT or relative_rms(ours, true) <= 2 * relative_rms(theirs, true)
    assert relative_rms(again, expected) <= LIMIT, "joined weights changed the library's pass"
    assert relative_rms(feed(LibraryDecoder(model), KVCache(), ids, pieces), expected) <= LIMIT


def test_every_family_that_can_be_packed_is_compared() -> None:
    """Those with biases in their experts need a pack's experts: test_families.py."""
    ours = {name for name, family in FAMILIES.items() if family.attention and not family.biased}
    assert {name.partition("-")[0] for name in MODELS} >= ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["mixtral", "olmoe", "olmoe-shares", "qwen2_moe", "qwen3_moe", "glm4_moe", "ernie4_5_moe"]
)
def test_the_router_is_the_librarys(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    blocks = FAMILIES[model.config.model_type].blocks(model)
    noting = [Noting() for _ in blocks]
    for block, experts in zip(blocks, noting, strict=True):
        block.experts = experts
    feed(choose(model, WINDOW), KVCache(), ids_of(40), [30, *[1] * 10])
    with torch.inference_mode():
        for block, experts in zip(blocks, noting, strict=True):
            assert len(experts.calls) == 11
            for hidden, index, weights in experts.calls:
                _, theirs, chosen = block.gate(hidden)
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


class Guessing(Noting):
    """Experts that guess what the next layer's will be called with."""

    def __init__(self, layer: int, guesses: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.guesses = layer, guesses
        self.decoder: FusedDecoder | None = None

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = super().forward(hidden, index, weights) + hidden
        assert self.decoder is not None
        self.decoder.ahead(self.layer, None)  # a worse guess, which must leave no trace
        self.guesses.append(self.decoder.ahead(self.layer, out))
        return out


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


def test_threads_change_no_token() -> None:
    model = make_model("mixtral", hidden_size=256, num_attention_heads=8)
    ids, threads = ids_of(6), torch.get_num_threads()
    out: list[Tensor] = []
    for count in (1, 2):
        torch.set_num_threads(count)
        out.append(feed(lean_pass(model), KVCache(), ids, [1] * 6))
    torch.set_num_threads(threads)
    assert relative_rms(out[1], out[0]) <= LIMIT


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


# With some seeds the rounding of a key to 16 bits changes what a router chooses.
@pytest.mark.parametrize(("family", "bits", "seed"), [("mixtral", 4, 6), ("olmoe", 8, 4), ("mixtral", 16, 4)])
def test_packed_layers_are_joined_and_compute_the_same(
    family: str, bits: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "source", family=family, seed=seed)
    make_pack(source, tmp_path / "packed", PackSpec(dense=bits))
    loaded = open_model(tmp_path / "packed")
    loaded.control.preset = PRESET
    ids, pieces = ids_of(60), [40, *[1] * 20]
    expected = feed(LibraryDecoder(loaded.model), KVCache(), ids, pieces)
    kv = KVCache()
    ours = feed(choose(loaded.model, loaded.window), kv, ids, pieces)
    assert kv.nbytes() == kv_element(family, bits) * 2 * 2 * 64 * BLOCK  # two layers, keys and values of 4 heads of 16
    if bits == 16:
        assert relative_rms(ours, expected) <= LIMIT
    else:  # float16 keys and values, and nothing else
        assert LIMIT < relative_rms(ours, expected) <= 2e-3

        def computed(_model: Any, _bits: int) -> torch.dtype:
            return torch.float32

        monkeypatch.setattr(layers, "kept_dtype", computed)
        ours = feed(choose(loaded.model, loaded.window), KVCache(), ids, pieces)
        assert relative_rms(ours, expected) <= LIMIT
