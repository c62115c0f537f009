"""Dense layers as codes: the engine is transformers' own model with the values that the codes stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.quantized_linear import PackedLinear, PlanedLinear
from floe_chat.engine.experts.moe_layer import DECODE_TOKENS, PREFILL_CHUNK, Control
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.kernels.codes import pack_codes
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.weights import LinearWeights
from floe_chat.models.packing.pack import PackSpec
from torch import nn

from ..helpers import make_checkpoint, make_pack, reference_model, relative_rms
from .driver import a_preset, answer, open_model, silent
from .rounded import use_stored_linears

# make_checkpoint's arguments, then what transformers' configuration gets besides.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({"window": 1024}, {}),
    "mixtral-grouped-queries": ({"hidden": 40, "intermediate": 37, "experts": 5}, {"num_key_value_heads": 1}),
    "mixtral-groups-of-one": ({}, {"hidden_size": 67, "num_attention_heads": 2, "head_dim": 48}),
    "mixtral-tied": ({"dtype": torch.float16}, {"tie_word_embeddings": True}),
    "olmoe": ({"family": "olmoe", "experts": 6, "top_k": 3}, {}),
    "olmoe-tied-biases": ({"family": "olmoe", "hidden": 96}, {"tie_word_embeddings": True, "attention_bias": True}),
}
LIMIT = 1e-5
EVERYTHING = a_preset("", 0.0, lossless=True)


def make_model(folder: Path, sizes: dict[str, Any], changes: dict[str, Any]) -> Path:
    """A random checkpoint, made anew with another configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make_checkpoint(folder, **sizes)
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    for path in folder.glob("model*"):
        path.unlink()
    for name, value in {"num_key_value_heads": changes.get("num_attention_heads", 1), **changes}.items():
        setattr(config, name, value)
    torch.manual_seed(11)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "bias")):
            nn.init.normal_(parameter, std=0.3)
    model.to(sizes.get("dtype", torch.bfloat16)).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Pair:
    """A pack with 16-bit experts and rounded dense layers, transformers' model with the same values, and where."""

    layers: set[str]
    ours: LoadedModel
    theirs: Any


@pytest.fixture(scope="module", params=[(name, bits) for name in MODELS for bits in (8, 4)], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, bits = request.param
    folder = tmp_path_factory.mktemp("dense")
    sizes, changes = MODELS[name]
    source = make_model(folder / "source", sizes, changes) if changes else make_checkpoint(folder / "source", **sizes)
    make_pack(source, folder / "packed", PackSpec(up=16, gate=16, down=16, dense=bits))
    theirs = reference_model(source)
    layers = use_stored_linears(theirs, folder / "packed")
    return Pair(layers, open_model(folder / "packed", "High"), theirs)


@pytest.mark.parametrize("length", [1, 2, DECODE_TOKENS, DECODE_TOKENS + 1, PREFILL_CHUNK])
def test_logits_are_those_of_the_rounded_layers(pair: Pair, length: int) -> None:
    pair.ours.control.preset = EVERYTHING
    ids = torch.randint(3, 250, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.inference_mode():
        ours = pair.ours.model(input_ids=ids).logits
        theirs = pair.theirs(input_ids=ids, use_cache=False).logits
    assert relative_rms(ours, theirs) <= LIMIT


def test_logits_of_decode_steps_are_too(pair: Pair) -> None:
    pair.ours.control.preset = EVERYTHING
    prompt = [7, 90, 33]
    ours = answer(pair.ours, prompt, max_new_tokens=12).tokens
    with torch.inference_mode():
        theirs = pair.theirs(input_ids=torch.tensor([prompt + ours[:-1]]), use_cache=False).logits[0]
    assert ours == theirs[len(prompt) - 1 :].argmax(-1).tolist()


def test_no_dense_layer_is_kept_wide(pair: Pair) -> None:
    modules = dict(pair.ours.model.named_modules())
    layers = {name for name, module in modules.items() if isinstance(module, PackedLinear)}
    assert isinstance(modules["lm_head"], PlanedLinear)
    assert layers - {"lm_head.low"} == pair.layers - {"lm_head"} | {"lm_head.high"} and len(layers) == 4 * 2 + 2
    assert not any(isinstance(module, nn.Linear) for module in pair.ours.model.modules())
    assert pair.ours.model.model.embed_tokens.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (7,), (0, 3)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_keeps_leading_dimensions_and_dtype(dtype: torch.dtype, shape: tuple[int, ...], biased: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (33, 40), dtype=torch.uint8, generator=generator)
    scale, zero = torch.rand(33, 1, generator=generator).half(), torch.full((33, 1), 7.5).half()
    weights = LinearWeights(VectorLayout(40, 4, 40), pack_codes(codes, 4), scale, zero)
    bias = nn.Parameter(torch.randn(33, generator=generator).to(dtype), requires_grad=False) if biased else None
    # Not contiguous, as the library hands over the last token's state.
    x = torch.randn(*shape, 80, generator=generator).to(dtype)[..., ::2]
    y = PackedLinear(weights, bias, Control(EVERYTHING))(x)
    expected = x.double() @ ((codes.double() - 7.5) * scale.double()).T + (0 if bias is None else bias.double())
    assert y.shape == (*shape, 33) and y.dtype == dtype
    assert y.numel() == 0 or relative_rms(y, expected) <= (1e-5 if dtype == torch.float32 else 1e-2)


def test_sizes_that_do_not_fit_are_refused_before_memory_is_read() -> None:
    codes, scale = torch.zeros(8, 20, dtype=torch.uint8), torch.ones(8, 1).half()
    good = LinearWeights(VectorLayout(40, 4, 40), codes, scale, scale)
    layer = PackedLinear(good, None, Control(EVERYTHING))
    for shape in ((1, 39), (1, 41), (2, 3, 20)):
        with pytest.raises(ValueError, match="width"):
            layer(torch.randn(shape))
    for bad in ({"q": codes[:, 1:]}, {"scale": scale[1:]}, {"zero": scale[:, :0]}):
        with pytest.raises(ValueError, match="weights"):
            replace(good, **bad)
    strided = codes.repeat_interleave(2, 0)[::2]
    with pytest.raises(ValueError, match=r"weights\.q must be contiguous"):
        PackedLinear(replace(good, q=strided), None, Control(EVERYTHING))


def test_memory_counts_the_codes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    told: dict[int, int] = {}
    for bits in (16, 8, 4):
        make_pack(tiny_checkpoint, tmp_path / str(bits), PackSpec(dense=bits))
        told[bits] = load(tmp_path / str(bits), None, "cpu", silent)[1].memory_bytes
    attention, head = 2 * 4 * 64 * 64, 259 * 64
    weights = attention + head
    # On the CPU 16 bit become 32; a group of 64 has four bytes of scale and zero.
    assert told[16] - told[8] == weights * 4 - (weights + weights // 16)
    assert told[8] - told[4] == attention // 2, "the head stays at 8 bit"
