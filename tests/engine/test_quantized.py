"""Quantized and sparse: what transformers computes from the same rounded weights with the same neurons skipped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.quantized_linear import PackedLinear, PlanedLinear
from floe_chat.engine.experts.moe_layer import DECODE_TOKENS, Control
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.quality_presets import Preset
from floe_chat.kernels.codes import pack_codes, unpack_codes
from floe_chat.kernels.cpu import native
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.weights import LinearWeights
from floe_chat.models.packing.calibration import threshold_at
from floe_chat.models.packing.pack import PackSpec
from safetensors.torch import load_file
from torch import Tensor, nn

from ..helpers import make_pack, reference_model, relative_rms
from .driver import a_preset, answer, open_model, silent
from .margins import clear_prompt

SPECS = {
    "up2-rows4-dense8": PackSpec(up=2, dense=8),
    "up3-gate2-down8-dense4": PackSpec(up=3, gate=2, down=8, dense=4),
    "up8-gate16-down3-dense16": PackSpec(up=8, gate=16, down=3, dense=16),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.thorough if "up2" in name else ()) for name in SPECS],
)
def packed(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "p"
    make_pack(tiny_checkpoint, folder, SPECS[request.param])
    return folder


class SkippingExperts(torch.nn.Module):
    """Mixtral's experts written down plainly: all neurons of every chosen expert, those that are skipped zeroed."""

    def __init__(self, loaded: LoadedModel, layer: int, preset: Preset) -> None:
        super().__init__()
        self.rule = preset.rule.at(layer)
        stored = loaded.packed.layer(layer)
        self.up = [stored.signal.dense(expert, torch.float32) for expert in range(4)]
        self.rows = [stored.rows.layout.read(stored.rows.data[expert], torch.float32) for expert in range(4)]
        assert stored.plain is not None
        self.thresholds = threshold_at(stored.thresholds if self.rule.weighed else stored.plain, self.rule.sparsity)
        self.products = threshold_at(stored.products, self.rule.product)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for token, chosen in enumerate(top_k_index.tolist()):
            for slot, expert in enumerate(chosen):
                gate, down = self.rows[expert]
                score = top_k_weights[token, slot] / top_k_weights[token].mean()
                worth = score if self.rule.weighed else 1.0
                v = self.up[expert] @ hidden[token]
                v = torch.where(v.abs() >= self.thresholds[expert] / worth, v, 0.0)
                h = torch.nn.functional.silu(gate @ hidden[token]) * v
                h = torch.where(h.abs() >= self.products[expert] / worth, h, 0.0)
                if score < self.rule.drop:
                    continue
                if score < self.rule.major:
                    h[len(h) // 2 :] = 0.0
                out[token] += top_k_weights[token, slot] * (h @ down)
        return out


def plain_model(checkpoint: Path, loaded: LoadedModel, preset: Preset) -> Any:
    model = reference_model(checkpoint)
    use_stored_linears(model, loaded.packed.folder)
    for layer in range(2):
        model.model.layers[layer].mlp.experts = SkippingExperts(loaded, layer, preset)
    return model


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def prompts_of(length: int) -> list[list[int]]:
    """Some to choose from."""
    return [prompt_of(count)[-length:] for count in range(length, length + 30)]


def logits_of(model: Any, prompt: list[int]) -> Tensor:
    """(T, V), without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]


SKIPPING = {
    "nothing": a_preset("", 0.0, lossless=True),
    "sparsity": a_preset("", 0.6, lossless=True),
    "much": a_preset("", 0.9, lossless=True),
    "product": a_preset("", 0.0, 0.7, lossless=True),
    "experts": a_preset("", 0.0, drop=0.9, major=0.9, lossless=True),
    "halves": a_preset("", 0.0, major=0.96, lossless=True),
    "all": a_preset("", 0.4, 0.7, drop=0.8, major=0.96, lossless=True),
    "by layer": a_preset("", 0.5, 0.6, drop=0.6, major=0.9, lossless=True, layers=(0.7, 1.1)),
    "weighed": a_preset("", 0.6, 0.8, lossless=True, weighed=True),
    "all weighed": a_preset("", 0.5, 0.7, drop=0.8, major=0.96, lossless=True, weighed=True),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("preset", SKIPPING.values(), ids=SKIPPING)
@pytest.mark.parametrize("length", [1, DECODE_TOKENS, DECODE_TOKENS + 1, 40])
def test_logits_are_those_of_the_rounded_weights(
    packed: Path, tiny_checkpoint: Path, preset: Preset, length: int
) -> None:
    loaded = open_model(packed)
    loaded.control.preset = preset
    prompt, ours = clear_prompt(loaded, lambda prompt: logits_of(loaded.model, prompt), prompts_of(length))
    assert relative_rms(ours, logits_of(plain_model(tiny_checkpoint, loaded, preset), prompt)) <= 1e-5


@pytest.mark.some(1)
def test_a_prompt_is_the_same_in_one_piece_and_token_by_token(packed: Path) -> None:
    loaded = open_model(packed)
    loaded.control.preset = a_preset("", 0.6, 0.8, drop=0.6, major=0.9, lossless=True)
    prompt, whole = clear_prompt(loaded, lambda prompt: logits_of(loaded.model, prompt), prompts_of(24))
    pieces = [logits_of(loaded.model, prompt[: end + 1])[-1] for end in range(24)]
    assert relative_rms(torch.stack(pieces), whole) <= 1e-5


def test_an_answer_goes_on_when_no_neuron_of_an_expert_is_active(packed: Path) -> None:
    loaded = open_model(packed)
    for layer in loaded.model.model.layers:
        layer.mlp.experts.packed.plain[:, 1:] = 1e9
    loaded.control.preset = a_preset("", 0.8, lossless=True)
    assert len(answer(loaded, prompt_of(5), max_new_tokens=4).tokens) == 4


@pytest.mark.parametrize("length", [1, 40])
def test_fewer_bits_of_x_change_little(packed: Path, length: int) -> None:
    loaded = open_model(packed)

    def error(prompt: list[int]) -> float:
        ids = torch.tensor([prompt])
        found: list[torch.Tensor] = []
        for lossless in (False, True):
            # Nothing is left out, so that no neuron can fall to the other side of a threshold.
            loaded.control.preset = a_preset("", 0.0, lossless=lossless)
            with torch.inference_mode():
                found.append(loaded.model(input_ids=ids).logits)
        return relative_rms(*found)

    errors = sorted(map(error, prompts_of(length)[:7]))
    assert errors[0] > 0 or native.isa().name == "portable"  # which rounds no x
    assert errors[3] <= 1e-3, errors  # in a few, the router chooses between two experts that are about equally good


def test_no_dense_layer_is_kept_wide(packed: Path) -> None:
    modules = dict(open_model(packed).model.named_modules())
    layers = {name for name, module in modules.items() if isinstance(module, PackedLinear)}
    wide = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    stored = {name.removesuffix(".q") for name in load_file(packed / "dense.safetensors") if name.endswith(".q")}
    if not stored:  # at 16 bits
        assert not layers and len(wide) == 4 * 2 + 1
        return
    assert isinstance(modules["lm_head"], PlanedLinear) and not wide
    assert layers - {"lm_head.low"} == stored - {"lm_head"} | {"lm_head.high"} and len(layers) == 4 * 2 + 2
    assert modules["model.embed_tokens"].weight.dtype == torch.float32


WHOLE = a_preset("", 0.0, lossless=True)


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
    y = PackedLinear(weights, bias, Control(WHOLE))(x)
    expected = x.double() @ ((codes.double() - 7.5) * scale.double()).T + (0 if bias is None else bias.double())
    assert y.shape == (*shape, 33) and y.dtype == dtype
    assert y.numel() == 0 or relative_rms(y, expected) <= (1e-5 if dtype == torch.float32 else 1e-2)


def test_sizes_that_do_not_fit_are_refused_before_memory_is_read() -> None:
    codes, scale = torch.zeros(8, 20, dtype=torch.uint8), torch.ones(8, 1).half()
    good = LinearWeights(VectorLayout(40, 4, 40), codes, scale, scale)
    layer = PackedLinear(good, None, Control(WHOLE))
    for shape in ((1, 39), (1, 41), (2, 3, 20)):
        with pytest.raises(ValueError, match="width"):
            layer(torch.randn(shape))
    for bad in ({"q": codes[:, 1:]}, {"scale": scale[1:]}, {"zero": scale[:, :0]}):
        with pytest.raises(ValueError, match="weights"):
            replace(good, **bad)
    strided = codes.repeat_interleave(2, 0)[::2]
    with pytest.raises(ValueError, match=r"weights\.q must be contiguous"):
        PackedLinear(replace(good, q=strided), None, Control(WHOLE))


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


def use_stored_linears(model: Any, pack: Path) -> None:
    """Give a model of the source the values of `pack` in the place of its own."""
    bits = json.loads((pack / "manifest.json").read_text())["widths"]["dense"]
    tensors = load_file(pack / "dense.safetensors")
    for name in {name.removesuffix(".q") for name in tensors if name.endswith(".q")}:
        layer = model.get_submodule(name)
        scale, zero = (tensors[f"{name}.{part}"].float()[..., None] for part in ("scale", "zero"))
        rows, columns = layer.weight.shape
        width = max(bits, 8) if name == "lm_head" else bits
        codes = unpack_codes(tensors[f"{name}.q"], columns, width).float().view(rows, scale.shape[1], -1)
        # A new parameter, since a tied embedding keeps the old one.
        layer.weight = torch.nn.Parameter(((codes - zero) * scale).view(rows, columns))
