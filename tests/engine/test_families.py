"""What every family has to pass: a pack of it answers as transformers' own model does, wherever its experts are.

At 16 bits logits agree to a relative RMS of 1e-5 and a mean KL divergence of 1e-9, in prompt and decode, through the KV
cache and after a conversation went another way, on RAM and with pools of 1 to 100 %. At fewer bits they agree with
transformers' model of the weights that the codes stand for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from floe_chat.engine.decoder import layers
from floe_chat.engine.decoder.decoders import FusedDecoder, LibraryDecoder, choose
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.layers import read_rope
from floe_chat.engine.decoder.mixers import attention
from floe_chat.engine.decoder.ways import Way
from floe_chat.engine.experts.moe_layer import DECODE_TOKENS, PREFILL_CHUNK, Cancelled
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.offload import predictor
from floe_chat.engine.planning.footprint import kv_bytes, prompt_bytes, sizes_of
from floe_chat.engine.quality.half_resident import half_resident
from floe_chat.engine.quality.references import pack_logits
from floe_chat.engine.quality_presets import Preset
from floe_chat.kernels.rule import Rule
from floe_chat.models.checkpoint import Checkpoint, read_config
from floe_chat.models.errors import UsageError
from floe_chat.models.families import FAMILIES
from floe_chat.models.pack import quantized_linears
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import EXACT, PackSpec
from torch import Tensor, nn

from .. import families
from ..allocated import Allocated
from ..helpers import make_pack, reference_model, relative_rms
from .driver import answer, layer_by_layer, open_model
from .fake_card import FakeCard
from .offloading import EVERYTHING, offloaded

LIMIT, KL_LIMIT = 1e-5, 1e-9
STATES_LIMIT = 5e-5  # a state is summed up token by token, or over chunks, whose order is another
LOW = PackSpec(up=3, gate=4, down=4, dense=4)


@dataclass(frozen=True)
class Case:
    """A model of one family: packed at 16 bits, and transformers' own."""

    name: str
    source: Path
    exact: LoadedModel
    theirs: Any

    @property
    def states(self) -> bool:
        """Whether some of its layers keep a state, which goes back only to where there is a copy of it."""
        kinds: list[str] = getattr(self.theirs.config, "layer_types", None) or []
        return "linear_attention" in kinds or "conv" in kinds

    @property
    def stuck(self) -> bool:
        """Whether transformers keep these states, which then cannot go back at all."""
        return self.states and not isinstance(self.exact.decoder, FusedDecoder)

    def agree(self, got: Tensor, wanted: Tensor) -> None:
        assert relative_rms(got, wanted) <= (STATES_LIMIT if self.states else LIMIT)
        ours, theirs = (logits.double().log_softmax(-1) for logits in (got, wanted))
        assert float(F.kl_div(ours, theirs, log_target=True, reduction="batchmean")) <= KL_LIMIT

    def prompt(self, length: int) -> list[int]:
        generator = torch.Generator().manual_seed(length)
        return torch.randint(3, self.theirs.config.vocab_size, (length,), generator=generator).tolist()

    def expected(self, ids: list[int]) -> Tensor:
        """transformers' logits at every position, from one pass without a cache: (T, V)."""
        with torch.inference_mode():
            return self.theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


# Each of these differs from another model in what a pass from memory shows.
VARIANTS = (
    *("qwen3_moe layers without experts", "qwen3_5_moe_text", "deepseek_v2 groups", "glm4_moe normalized"),
    *("lfm2_moe biases", "gemma4_text"),
)


def signal_of(name: str, *, exact: bool) -> Any:
    """Every other model has the gate as its signal where it is exact, and the others where they are not."""
    return "up" if [*families.MODELS].index(name) % 2 == exact else "gate"


@pytest.fixture(scope="module", params=[name for name in families.MODELS if name not in VARIANTS])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp("family")
    source = families.make(request.param, folder / "source")
    make_pack(source, folder / "exact", replace(EXACT, signal=signal_of(request.param, exact=True)))
    return Case(request.param, source, open_model(folder / "exact", "Exact"), reference_model(source))


def read(loaded: LoadedModel, ids: Sequence[int], kv: KVCache, pieces: Sequence[int]) -> Tensor:
    """Logits after each piece of a text, (len(pieces), V), computed one after the other."""
    logits, start = list[Tensor](), kv.length
    for piece in pieces:
        some = list(ids[start : start + piece])
        logits.append(loaded.decoder.forward(some, kv))
        kv.computed(some, loaded.control.preset)
        start += piece
    return torch.cat(logits)


PIECES = {
    "a prompt, a question, tokens": [DECODE_TOKENS + 5, DECODE_TOKENS + 1, 1, 1, 1],
    "token by token": [1] * 6,
    "a short prompt, then tokens": [DECODE_TOKENS, 1, 1, 1],
    "a long prompt": [PREFILL_CHUNK, 7, 1, 1],
    "cut anywhere": [],
}


def cuts(name: str) -> list[int]:
    """Pieces of a text that no rope is too short for, of all lengths, others for each family."""
    drawn, pieces = random.Random(name), list[int]()
    while (left := 62 - sum(pieces)) > 0:
        pieces.append(min(left, drawn.choice((1, 1, 2, 3, 4, 5, DECODE_TOKENS, DECODE_TOKENS + 1, 31))))
    return pieces


def ends(pieces: Sequence[int]) -> list[int]:
    return (torch.tensor(pieces).cumsum(0) - 1).tolist()


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.thorough if name in VARIANTS[1:4] else ()) for name in families.MODELS],
    indirect=True,
)
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.usefixtures("isa")
def test_in_ram(case: Case, pieces: list[int]) -> None:
    pieces = pieces or cuts(case.name)
    ids = case.prompt(sum(pieces))
    case.agree(read(case.exact, ids, KVCache(), pieces), case.expected(ids)[ends(pieces)])


def together(loaded: LoadedModel, texts: list[list[int]], steps: int) -> Tensor:
    """Logits (steps, texts, V) after each of the last so many tokens of texts, which go through the model together."""
    kvs, logits = [KVCache(), *(loaded.decoder.beside() for _ in texts[1:])], list[Tensor]()
    for text, kv in zip(texts, kvs, strict=True):
        assert kv is not None
        read(loaded, text, kv, [len(text) - steps])
    for step in range(-steps, 0):
        tokens, some = [text[step] for text in texts], [kv for kv in kvs if kv is not None]
        found = loaded.decoder.together(tokens, some)
        assert found is not None
        logits.append(found.clone())
        for token, kv in zip(tokens, some, strict=True):
            kv.computed([token], loaded.control.preset)
    return torch.stack(logits)


@pytest.mark.some(5)
@pytest.mark.parametrize("count", [4, 3, 2])
@pytest.mark.parametrize("by", ["all layers at once", "each layer", "torch", "a pool", "a virtual card"])
def test_texts_together(case: Case, by: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of different lengths, one of which grows past what rope was made for, a token of each at a time."""
    exact, texts, steps = case.exact, [case.prompt(length) for length in (9, 66, 4, 17)[:count]], 3
    if isinstance(exact.decoder, LibraryDecoder):
        assert exact.decoder.beside() is None and exact.decoder.together([5], [KVCache()]) is None
        return
    wanted = torch.stack(
        [torch.stack([case.expected(text[: len(text) - left])[-1] for text in texts]) for left in (2, 1, 0)]
    )
    if by == "each layer":
        layer_by_layer(monkeypatch)
    if by in ("a pool", "a virtual card"):
        with offloaded(exact, EVERYTHING, 0.3, kind="virtual" if "card" in by else "throttled"):
            case.agree(together(exact, texts, steps).flatten(0, 1), wanted.flatten(0, 1))
    else:
        if by == "torch":
            assert isinstance(exact.decoder, FusedDecoder)
            monkeypatch.setattr(exact.decoder, "way", Way(exact.decoder))
        case.agree(together(exact, texts, steps).flatten(0, 1), wanted.flatten(0, 1))


# With long rope, with yarn, and others, for which that length is none.
LONGER = pytest.mark.parametrize(
    "case", ["phimoe", "deepseek_v2", "qwen3_next", pytest.param("gemma4", marks=pytest.mark.thorough)], indirect=True
)


@LONGER
def test_past_the_length_that_rope_was_made_for(case: Case) -> None:
    """Long rope turns all of a longer text otherwise, also what is cached; a shorter one then turns it back."""
    pieces = [40, 22, 1, 1, 1, 1]
    ids, kv = case.prompt(sum(pieces)), KVCache()
    got = read(case.exact, ids, kv, pieces)
    case.agree(got, torch.stack([case.expected(ids[: end + 1])[-1] for end in ends(pieces)]))
    parked = kv.parked(1 << 30)
    kept = kv.keep(ids[:50], case.exact.control.preset)
    case.agree(read(case.exact, ids, kv, [50 - kept]), case.expected(ids[:50])[-1:])
    if parked is not None:  # nor does a copy of the longer one serve it
        kept = parked.common(ids[:51], case.exact.control.preset)
        with torch.inference_mode():
            assert kv.resume(parked, kept)
        case.agree(read(case.exact, ids, kv, [51 - kept]), case.expected(ids[:51])[-1:])


@pytest.mark.some(4)
def test_a_prompt_takes_no_more_than_was_planned(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of its tokens, without what is not counted by the token; nor is it a small part of the plan."""
    loaded, limit = case.exact, 1 << 13
    if isinstance(loaded.decoder, LibraryDecoder):
        return
    monkeypatch.setattr(attention, "SCORES", limit)
    ids = case.prompt(256)
    with Allocated() as made:
        loaded.decoder.forward(ids, KVCache())
    sizes = sizes_of(loaded.packed.manifest, read_config(loaded.packed.folder))
    planned = 2 * len(ids) * prompt_bytes(sizes)  # of 32 bits here
    kept = len(ids) * kv_bytes(sizes, 16, 4).whole
    assert planned / 4 < made.peak - kept <= planned + 8 * limit, (made.peak - kept) / planned


@LONGER
def test_ropes_tables_are_made_in_parts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole table at once took 540 MB of a full card for 134 MB. Frequencies are those of the whole text."""
    model, asked = case.exact.model, list[int]()
    family = FAMILIES[model.config.model_type]

    def tables() -> list[Tensor]:
        rope = read_rope(model, family)
        long = rope.is_long(1000)  # if that is another table
        return [rope.tables(0, end, long=long) for end in (7, 100, 300, 1000)]

    want = tables()
    forward = type(model.model.rotary_emb).forward

    def noted(module: nn.Module, x: Tensor, places: Tensor, *more: Any) -> Any:
        asked.append(places.shape[-1])
        return forward(module, x, places, *more)

    monkeypatch.setattr(type(model.model.rotary_emb), "forward", noted)
    monkeypatch.setattr(layers, "ANGLES", 96)
    assert all(torch.equal(mine, whole) for mine, whole in zip(tables(), want, strict=True))
    assert max(asked) == 97  # and one that says how long the text is


@LONGER
def test_an_answer_grows_past_that_length(case: Case) -> None:
    """Its tokens are drawn several at a time, and each is the likeliest by transformers' logits."""
    ids = case.prompt(61)
    for token in answer(case.exact, ids, max_new_tokens=6).tokens:
        logits = case.expected(ids)[-1]
        assert float(logits[token]) >= float(logits.max()) - 1e-4, "or as likely, but for noise"
        ids.append(token)
    assert len(ids) == 67


@pytest.mark.some(4)
def test_other_questions_and_answers_after_the_same_beginning(case: Case) -> None:
    """The cache keeps the common part, whatever layers wrote it; where a prompt ends there is a copy of states."""
    preset = case.exact.control.preset
    for read_first, common, length, kept in (
        (24, 19, 34, 0 if case.states else 19),
        (21, 21, 30, 0 if case.stuck else 21),
    ):
        first, kv = case.prompt(30), KVCache()
        read(case.exact, first, kv, [read_first, *[1] * 6])
        second = first[:common] + case.prompt(40)[: length - common]
        assert kv.keep(second, preset) == kept
        case.agree(read(case.exact, second, kv, [length - 2 - kept, 1, 1]), case.expected(second)[-3:])
    kept = kv.keep(first, preset)  # and back again
    case.agree(read(case.exact, first, kv, [len(first) - kept]), case.expected(first)[-1:])


@pytest.mark.some(6)
def test_what_broke_off_leaves_nothing_wrong(case: Case) -> None:
    """A pass that is cancelled in its last layer has changed what the others keep."""
    ids, kv, control = case.prompt(25), KVCache(), case.exact.control
    read(case.exact, ids, kv, [14])
    last = FAMILIES[case.theirs.config.model_type].blocks(case.exact.model)[-1].experts

    def stop(*_given: object) -> None:
        raise Cancelled

    handle = last.register_forward_pre_hook(stop)
    try:
        with pytest.raises(Cancelled):
            case.exact.decoder.forward(ids[14:20], kv)
    finally:
        handle.remove()
    kept = kv.keep(ids, control.preset)
    assert kept == (0 if case.stuck else 14)
    case.agree(read(case.exact, ids, kv, [len(ids) - 1 - kept, 1]), case.expected(ids)[-2:])


@pytest.mark.some(5)
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["virtual", "throttled"])
def test_offloaded(case: Case, kind: str, share: float) -> None:
    pieces = [DECODE_TOKENS + 3, 1, 1, 1, 1]
    ids = case.prompt(sum(pieces))
    expected = case.expected(ids)[ends(pieces)]
    with offloaded(case.exact, EVERYTHING, share, kind=kind):
        case.agree(read(case.exact, ids, KVCache(), pieces), expected)


# In step_models.py are others, in which experts are not in a pool.
MORE_ON_A_CARD = ("qwen3_next", "gpt_oss", "lfm2_moe", "granitemoe", "glm4_moe_lite")


@pytest.mark.parametrize(
    "case",
    [
        *("gemma4", "deepseek_v2"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE_ON_A_CARD),
    ],
    indirect=True,
)
def test_by_graphs_on_a_card(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a whole token, and one of each layer with its rows in a pool, also where it looks ahead."""
    exact, pieces = case.exact, [DECODE_TOKENS + 3, 1, 1, DECODE_TOKENS + 1, 1, 1]
    ids = case.prompt(sum(pieces))
    expected = case.expected(ids)[ends(pieces)]

    def pooled(predict: bool) -> None:
        with offloaded(exact, EVERYTHING, 0.3, predict=False) as shared:
            if predict:
                assert isinstance(exact.decoder, FusedDecoder)
                given = exact.model, exact.packed, exact.decoder.ahead
                shared.predict_by([predictor.make("partial", *given)])
            exact.control.counting = True
            case.agree(read(exact, ids, KVCache(), pieces), expected)
            exact.control.counting = False
            exact.telemetry.settle()
            assert all((layer.guessed > 0) == predict for layer in exact.telemetry.layers[1:])

    pooled(predict=True)
    card = FakeCard(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(exact, "decoder", choose(exact.model, exact.window))
        case.agree(read(exact, ids, KVCache(), pieces), expected)
        assert card.replays == 4
    pooled(predict=False)
    assert card.replays > 4 + 4 * len(exact.telemetry.layers)
    pooled(predict=True)


@pytest.mark.some(2)
def test_few_bits_are_what_their_codes_stand_for(case: Case) -> None:
    """The reference computes with the weights that the pack's codes stand for, neuron by neuron in the pack's order."""
    pieces = [DECODE_TOKENS + 3, 1, 1, 1, 1]
    ids = case.prompt(sum(pieces))
    folder = case.source.parent / "low"
    make_pack(case.source, folder, replace(LOW, signal=signal_of(case.name, exact=False)))
    low = open_model(folder)
    low.control.preset = EVERYTHING
    kept = {name: tensor.clone() for name, tensor in case.theirs.state_dict().items()}
    try:
        _load_codes(case, low.packed)
        expected = case.expected(ids)[ends(pieces)]
    finally:
        case.theirs.load_state_dict(kept)
    # Our own pass keeps keys and values in float16 where weights are codes, the library in float32.
    limit = 2.5e-3 if isinstance(low.decoder, FusedDecoder) else 1e-4  # 2.0e-3 by portable kernels
    got = read(low, ids, KVCache(), pieces)
    # One token may lie where two experts' scores are alike, and then get the other one.
    *most, _ = sorted(relative_rms(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    assert max(most) <= limit


def _load_codes(case: Case, packed: PackedModel) -> None:
    """Give transformers' model the values of the pack's codes."""
    family = FAMILIES[case.theirs.config.model_type]
    dense, source = packed.dense(), Checkpoint(case.source)
    for index, block in enumerate(family.blocks(case.theirs)):
        layer = packed.layer(index)
        for expert in range(packed.manifest.architecture.experts):
            other, down = layer.rows.layout.read(layer.rows.data[expert], torch.float32)
            both = [other, layer.signal.dense(expert, torch.float32)]
            both = both if layer.rows.layout.signal == "up" else both[::-1]
            if family.biased:  # gate and up take turns, neurons first
                block.experts.gate_up_proj.data[expert] = torch.stack(both, 1).flatten(0, 1).T
                block.experts.down_proj.data[expert] = down
                bias, own = layer.rows.layout.read_bias(layer.rows.data[expert], torch.float32), layer.signal.bias
                assert bias is not None and own is not None
                biases = [bias, own[expert]] if layer.rows.layout.signal == "up" else [own[expert], bias]
                block.experts.gate_up_proj_bias.data[expert] = torch.stack(biases, 1).flatten()
                continue
            block.experts.gate_up_proj.data[expert] = torch.cat(both)
            block.experts.down_proj.data[expert] = down.T
    for layer, name in quantized_linears.stored_layers(source, LOW.dense).items():
        rows, columns = source.places[name][1].shape
        width = quantized_linears.width_of(layer, LOW.dense)
        module = case.theirs.get_submodule(family.module_name(f"{layer}.weight").removesuffix(".weight"))
        weights = quantized_linears.load(dense, layer, rows, columns, width).dense(torch.float32)
        module.weight = torch.nn.Parameter(weights, requires_grad=False)


@pytest.mark.some(8)
def test_its_routers_can_be_made_to_substitute_or_it_says_why_not(case: Case) -> None:
    ids = torch.tensor([case.prompt(40)])
    preset = Preset("", Rule(alpha=0.9), 22)
    plain = pack_logits(case.exact, replace(preset, rule=Rule()), ids, 40)
    if case.exact.packed.manifest.family.routing.kind != "softmax":
        with pytest.raises(UsageError, match="substituted"), half_resident(case.exact, preset):
            pass
        return
    with half_resident(case.exact, preset) as (loaded, own):
        assert own.rule == Rule() and isinstance(loaded.decoder, LibraryDecoder)
        swapped = pack_logits(loaded, own, ids, 40)
    assert relative_rms(swapped, plain) > 1e-3
    assert torch.equal(pack_logits(case.exact, replace(preset, rule=Rule()), ids, 40), plain), "only meanwhile"
