"""The lean pass is transformers' own: the same logits, the same experts, or a reason why it does not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import layers
from floe_chat.engine.decoder.decoders import Decoder, FusedDecoder, LibraryDecoder, choose
from floe_chat.engine.decoder.kv_cache import BLOCK, KVCache
from floe_chat.engine.experts.moe_layer import PREFILL_CHUNK, Cancelled
from floe_chat.engine.planning.footprint import kv_element
from floe_chat.models.families import FAMILIES, Family
from floe_chat.models.families.family import GroupedQuery, SharedExpert
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor, nn

from ..helpers import make_checkpoint, make_pack, relative_rms
from .driver import a_preset, open_model

LIMIT = 1e-5
WINDOW = 700
PRESET = a_preset("", 0.0, lossless=True)
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 37,
    "moe_intermediate_size": 29,
    "shared_expert_intermediate_size": 31,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": WINDOW,
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "mixtral-odd": {"hidden_size": 35, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 14},
    "mixtral-one-key-head": {"num_key_value_heads": 1, "num_hidden_layers": 10},
    "mixtral-all-key-heads": {"num_key_value_heads": 4},
    "mixtral-sliding": {"sliding_window": 9},
    "mixtral-sliding-far": {"sliding_window": 300},
    "mixtral-tied": {"tie_word_embeddings": True},
    "mixtral-top-1": {"num_experts_per_tok": 1},
    "mixtral-linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "mixtral-yarn": {
        "head_dim": 12,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mixtral-llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "olmoe": {},
    "olmoe-shares": {"norm_topk_prob": True, "num_key_value_heads": 4},
    "olmoe-biased-clipped": {"attention_bias": True, "clip_qkv": 0.4},
    "qwen2_moe": {"layer_types": ["full_attention"] * 3},
    "qwen2_moe-mixed": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 7,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {"head_dim": 10},
    "qwen3_moe-biased": {"head_dim": 12, "attention_bias": True, "norm_topk_prob": True},
}
PLANNED = {  # no pack can be made of them yet; their layers have parts that the two above lack
    "qwen2_moe": Family(
        model_type="qwen2_moe",
        called="Qwen2 MoE",
        expert="",
        defaults={},
        dense_layers=lambda config: config.mlp_only_layers,
        shared=SharedExpert("shared_expert", gate="shared_expert_gate"),
        attention=GroupedQuery(
            window=lambda config, layer: (
                config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
            )
        ),
    ),
    "qwen3_moe": Family(
        model_type="qwen3_moe",
        called="Qwen3 MoE",
        expert="",
        defaults={},
        attention=GroupedQuery(normalized=True, window=lambda config, _layer: config.sliding_window),
    ),
}
PIECES = {
    "token by token": [1] * 24,
    "prompt, then tokens": [PREFILL_CHUNK, 1, 1, 1, 1],
    "chunks": [PREFILL_CHUNK, PREFILL_CHUNK, 60, 1, 1, 5, 1],
}


@pytest.fixture(scope="module", autouse=True)
def planned() -> Iterator[None]:
    """Families that are not supported yet, as if they were."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, family in PLANNED.items():
            patch.setitem(FAMILIES, kind, family)
        yield


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of a family, weights, biases and norms alike."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family = name.partition("-")[0]
    config: Any = AutoConfig.for_model(family, **{**SIZES, **MODELS.get(name, {}), **changes})
    torch.manual_seed(len(name))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    for leaf, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.0 if leaf.endswith("bias") else 1.0, std=0.3)
        elif leaf.endswith("gate.weight"):
            nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def ids_of(length: int) -> list[int]:
    return torch.randint(0, 101, (length,)).tolist()


def feed(decoder: Decoder, kv: KVCache, ids: Sequence[int], pieces: Sequence[int]) -> Tensor:
    """Logits after each piece, (pieces, V)."""
    out: list[Tensor] = []
    for size in pieces:
        part = ids[kv.length : kv.length + size]
        out.append(decoder.forward(part, kv)[0])
        kv.computed(part, PRESET)
    return torch.stack(out)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


def lean_pass(model: Any, window: int = WINDOW, *, compiled: bool = True) -> FusedDecoder:
    """The lean pass with its compiled step, or by torch's operations alone."""
    lean = choose(model, window)
    assert isinstance(lean, FusedDecoder) and lean.steps, lean.reason
    if not compiled:
        lean.steps = []
    return lean


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
    assert {name.partition("-")[0] for name in MODELS} >= set(FAMILIES)


class Noting(nn.Module):
    """Experts that note what they were called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.calls.append((hidden.clone(), index.clone(), weights.clone()))
        return torch.zeros_like(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "olmoe-shares", "qwen2_moe", "qwen3_moe"])
def test_the_router_is_the_librarys(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    noting = [Noting() for _ in model.model.layers]
    for layer, experts in zip(model.model.layers, noting, strict=True):
        layer.mlp.experts = experts
    feed(choose(model, WINDOW), KVCache(), ids_of(40), [30, *[1] * 10])
    with torch.inference_mode():
        for layer, experts in zip(model.model.layers, noting, strict=True):
            assert len(experts.calls) == 11
            for hidden, index, weights in experts.calls:
                _, theirs, chosen = layer.mlp.gate(hidden)
                assert torch.equal(index, chosen) and weights.dtype == theirs.dtype
                if len(hidden) == 1 and dtype == torch.float32:  # the compiled step adds up in another order
                    assert relative_rms(weights, theirs) <= LIMIT
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


@both_ways
@pytest.mark.parametrize("name", ["mixtral", "mixtral-sliding", "olmoe"])
def test_what_is_kept_of_a_conversation_goes_on(name: str, compiled: bool) -> None:
    model = make_model(name)
    lean, kv, ids = lean_pass(model, compiled=compiled), KVCache(), ids_of(60)
    feed(lean, kv, ids, [20, *[1] * 20])
    branch = ids[:31] + ids_of(20)
    assert kv.keep(branch, PRESET) == 31
    logits = feed(lean, kv, branch, [1] * 20)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([branch]), use_cache=False).logits[0, 31:]
    assert relative_rms(logits, expected) <= LIMIT


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


@pytest.mark.parametrize(("family", "bits"), [("mixtral", 4), ("olmoe", 8), ("mixtral", 16)])
def test_packed_layers_are_joined_and_compute_the_same(
    family: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "source", family=family, seed=4)
    make_pack(source, tmp_path / "packed", PackSpec(dense=bits))
    loaded = open_model(tmp_path / "packed")
    loaded.control.preset = PRESET
    ids, pieces = ids_of(60), [40, *[1] * 20]
    expected = feed(LibraryDecoder(loaded.model), KVCache(), ids, pieces)
    kv = KVCache()
    ours = feed(choose(loaded.model, loaded.window), kv, ids, pieces)
    assert kv.nbytes() == kv_element(bits) * 2 * 2 * 64 * BLOCK  # two layers, keys and values of 4 heads of 16
    if bits == 16:
        assert relative_rms(ours, expected) <= LIMIT
    else:  # float16 keys and values, and nothing else
        assert LIMIT < relative_rms(ours, expected) <= 2e-3

        def computed(_model: Any) -> torch.dtype:
            return torch.float32

        monkeypatch.setattr(layers, "_kept", computed)
        ours = feed(choose(loaded.model, loaded.window), KVCache(), ids, pieces)
        assert relative_rms(ours, expected) <= LIMIT


def test_joined_weights_are_there_once(tiny_pack: Path) -> None:
    model = open_model(tiny_pack).model
    lean = choose(model, 512)
    attention = model.model.layers[1].self_attn
    parts = [getattr(attention, name).weights.q for name in ("q_proj", "k_proj", "v_proj")]
    assert isinstance(lean, FusedDecoder)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert parts[0].untyped_storage().nbytes() == sum(part.nbytes for part in parts)


def test_the_comparison_would_notice_one_key(model: Any) -> None:
    lean, kv, ids = choose(model, WINDOW), KVCache(), ids_of(30)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        feed(lean, kv, ids, [29])
        store: Any = kv.store
        entry = store.seen(25, 26)[-1][-1]  # of the last layer: keys, then values
        entry[:, : entry.shape[1] // 2].add_(0.5)
    assert relative_rms(lean.forward(ids[29:], kv)[0], expected) > LIMIT


def test_a_pass_that_breaks_off_leaves_what_was_there(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(40)
    for decoder in (choose(model, WINDOW), LibraryDecoder(model)):
        whole = feed(decoder, KVCache(), ids, [30, 1, 9])
        kv = KVCache()
        feed(decoder, kv, ids, [30])
        last = model.model.layers[-1].mlp.experts

        def cancelled(*_arguments: Any) -> Tensor:
            raise Cancelled

        with monkeypatch.context() as patch:
            patch.setattr(last, "forward", cancelled)
            with pytest.raises(Cancelled):
                decoder.forward(ids_of(5), kv)
        assert kv.keep(ids, PRESET) == 30
        assert relative_rms(feed(decoder, kv, ids, [1, 9]), whole[1:]) <= LIMIT


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (
            "mixtral",
            {"head_dim": 12, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic changes with the length",
        ),
        (
            "mixtral",
            {
                "head_dim": 12,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "short_factor": [1.0] * 6,
                    "long_factor": [2.0] * 6,
                    "original_max_position_embeddings": 64,
                },
            },
            "longrope changes with the length",
        ),
        ("phimoe", {}, "does not know the family phimoe"),
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
    assert bool(lean.steps) == ("compiled call per" in reason)


@pytest.mark.parametrize(
    ("name", "beside"),
    [("qwen2_moe", "shared experts"), ("qwen2_moe-mixed", "layers without experts and shared experts"), ("olmoe", "")],
)
def test_what_the_compiled_step_leaves_to_torch_is_told(name: str, beside: str) -> None:
    reason = lean_pass(make_model(name)).reason
    assert reason.endswith(f"{beside} by torch's operations" if beside else "per layer and token")


def without_bias(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = None


def turns_a_part(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4]


class Wrapped(nn.Linear):
    """A linear layer that may compute something else."""


def wraps(model: Any) -> None:
    old = model.model.layers[2].self_attn.v_proj
    model.model.layers[2].self_attn.v_proj = Wrapped(old.in_features, old.out_features)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(without_bias, "have a bias"), (turns_a_part, "turns 8 of the 12"), (wraps, "stored in different ways")],
)
def test_parts_it_does_not_know_are_declined(change: Any, reason: str) -> None:
    model = make_model("olmoe-biased-clipped")
    change(model)
    decoder = choose(model, WINDOW)
    assert isinstance(decoder, LibraryDecoder) and reason in decoder.reason


def test_a_loaded_model_tells_what_computes_its_dense_part(tiny_pack: Path) -> None:
    assert isinstance(open_model(tiny_pack).decoder, FusedDecoder)


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
