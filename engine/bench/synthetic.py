"""A model with a published model's full width and random weights, made in memory, without a download.

It is built by the engine's own parts: transformers' skeleton, `MoELayer`, `PackedLinear`. Thresholds come from the
hidden states that its layers see, as packing takes them (models/packing/pack.py), so that a preset skips the share it
names; routers are made as confident as a published one, so that dropping by score drops as much as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import operations as kernels
from ...kernels.activation import applied
from ...kernels.codes import group_size
from ...kernels.weights import ExpertRows, LinearWeights, SignalWeights
from ...models.catalog import described
from ...models.catalog_entry import AssistantSizes, Convolutions, Sizes
from ...models.errors import FloeError, UsageError
from ...models.families import Family, family_of
from ...models.modules import assistant_modules, library_model
from ...models.pack import assistant, quantized_linears
from ...models.pack.assistant import PackedAssistant
from ...models.pack.draft_head import PackedHead
from ...models.pack.manifest import Architecture, Calibration, Manifest, PackSource, Widths
from ...models.pack.packed_model import PackedLayer
from ...models.pack.quantized_linears import layout_of, width_of
from ...models.packing.calibration import QUANTILES, quantile_table, worths
from ...models.packing.pack import PackSpec
from ...models.transformers_import import import_model_code
from .. import context
from ..decoder.quantized_linear import PackedLinear
from ..experts.moe_layer import Control, MoELayer, chunk_for
from ..machine.random_weights import Shapes, files_in_hugepages, filled
from ..quality.references import NO_SPARSITY
from ..telemetry import Telemetry
from .subject import Subject

_NAMES = {
    "mixtral-8x7b": "mixtral-8x7b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "gpt-oss-20b": "gpt-oss-20b",
    "deepseek-v2-lite": "deepseek-v2-lite-chat",
    "qwen3.6-35b-a3b": "qwen3.6-35b-a3b",
    "gemma-4-26b-a4b": "gemma-4-26b-a4b-it",
    "lfm2-8b-a1b": "lfm2-8b-a1b",
    "phi-3.5-moe": "phi-3.5-moe-instruct",
    "glm-4.7-flash": "glm-4.7-flash",
    "glm-4.5-air": "glm-4.5-air",
    "ernie-4.5-21b-a3b": "ernie-4.5-21b-a3b",
    "deepseek-moe-16b": "deepseek-moe-16b-chat",
    "qwen1.5-moe-a2.7b": "qwen1.5-moe-a2.7b-chat",
    "olmoe-1b-7b": "olmoe-1b-7b-0125-instruct",
    "granite-3.1-3b-a800m": "granite-3.1-3b-a800m-instruct",
}
MODELS: dict[str, Sizes] = {name: described(listed).sizes for name, listed in _NAMES.items()}
"""Published models whose widths can be measured."""
_QWEN3_6 = MODELS["qwen3.6-35b-a3b"]
assert _QWEN3_6.recurrent is not None
MODELS["qwen3-next-80b-a3b"] = replace(  # not listed; its layers are those of Qwen3.6, but for experts
    _QWEN3_6,
    model_type="qwen3_next",
    layers=48,
    experts=512,
    top_k=10,
    vocab=151936,
    recurrent=replace(_QWEN3_6.recurrent, layers=36),
)


def sizes_of(name: str) -> Sizes:
    """The sizes of one of them.

    Raises:
        UsageError: there is no such model.
    """
    if name not in MODELS:
        raise UsageError(f"There is no synthetic model {name!r}", "", f"Choose {', '.join(MODELS)}.")
    return MODELS[name]


def shapes_of(name: str) -> Shapes:
    """The sizes of a model's experts, for its kernels.

    Raises:
        UsageError: there is no such model.
    """
    sizes = sizes_of(name)
    return Shapes(sizes.hidden, sizes.intermediate, group_size(sizes.hidden), among=sizes.top_k)


def period_of(name: str) -> int:
    """After how many layers a model's kinds of layers repeat.

    Raises:
        UsageError: there is no such model.
    """
    sizes = sizes_of(name)
    return sizes.decoder_layers // (sizes.wide.layers if sizes.wide else sizes.attending)


def usual_layers(name: str) -> int:
    """How many layers are measured where nobody says it: two periods, or three layers of one kind.

    Raises:
        UsageError: there is no such model.
    """
    return max(3, 2 * period_of(name))


# An expert of Mixtral sees about 24 of them, which is 344,000 values for a table; one of 128 small ones sees 6.
CALIBRATION_TOKENS = 96
_OWN_USE = 1 << 30  # activations, dequantized blocks, torch
_SAMPLED = 16  # step between sampled neurons' gates: dequantizing all would take half a minute
# DualSparse-MoE table 1: of the experts that Mixtral-8x7B (fine-tuned) chooses, two for each token, 20.3 % have a share
# of the weight below 0.30. The surer a router, the more there are.
_LOW_SHARE, _LOW = 0.203, 0.30
_LOGITS = 2.7  # the standard deviation of a token's logits, in both of our trained models on text they have not seen
_WEIGHT = 0.02  # the standard deviation of all weights, as transformers initializes them


_PACKED = PackSpec()


@dataclass(frozen=True, slots=True)
class Spec:
    """Which model, how many layers, and its bits per weight: by default a pack's.

    Raises:
        UsageError: there is no such model, or a width that no pack can have.
    """

    name: str
    layers: int
    up: int = _PACKED.up
    rows: int = _PACKED.gate
    dense: int = _PACKED.dense

    def __post_init__(self) -> None:
        period, published = period_of(self.name), self.published_layers
        if not 2 * period <= self.layers <= published or self.layers % period:
            kinds = f"Its kinds of layers repeat after {period}. " if period > 1 else ""
            raise UsageError(
                f"A synthetic model cannot have {self.layers} layers",
                f"{kinds}Its time per layer is the difference between runs with all layers and with the first ones.",
                f"Give --layers {2 * period} to {published}{f', a multiple of {period}' if period > 1 else ''}.",
            )
        PackSpec(up=self.up, gate=self.rows, down=self.rows, dense=self.dense)

    @property
    def published_layers(self) -> int:
        """Layers without experts count too: they are about as wide as what a token uses of another."""
        return MODELS[self.name].decoder_layers

    def config(self) -> Any:
        """transformers' configuration."""
        import_model_code()
        from transformers import AutoConfig

        sizes = MODELS[self.name]
        family = family_of(sizes.model_type)
        family.register()
        fields: dict[str, Any] = {
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.hidden,
            family.width: sizes.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "num_local_experts": sizes.experts,
            "num_experts": sizes.experts,
            "n_routed_experts": sizes.experts,
            "num_experts_per_tok": sizes.top_k,
            "norm_topk_prob": sizes.model_type != "deepseek",
            "max_position_embeddings": sizes.window,
            "tie_word_embeddings": sizes.tied,
        }
        if (shared := family.shared) is not None:
            fields[shared.width or shared.count] = sizes.shared // (1 if shared.width else sizes.intermediate)
        if sizes.dense_layers:  # none here
            fields |= {"first_k_dense_replace": 0, "moe_layer_start_index": 0}
        if isinstance(sizes.recurrent, Convolutions):
            fields |= {
                "layer_types": ["conv", "conv", "full_attention", "conv"] * (self.layers // 4),
                "num_dense_layers": 0,
            }
        if (wide := sizes.wide) is not None:
            fields |= {
                "global_head_dim": wide.head_dim,
                "num_global_key_value_heads": wide.kv_heads,
                "attention_k_eq_v": wide.keys_alone,
                "enable_moe_block": True,
                "hidden_size_per_layer_input": 0,
                "sliding_window": 1024,
                "final_logit_softcapping": 30.0,
            }
        if family.model_type in ("phimoe", "glm4_moe"):
            fields |= {"attention_bias": True, "lm_head_bias": True}
        if (latent := sizes.latent) is not None:
            del fields["head_dim"]
            fields |= {
                "q_lora_rank": latent.queries or None,
                "kv_lora_rank": latent.keys,
                "qk_rope_head_dim": latent.rope,
                "qk_nope_head_dim": sizes.head_dim - latent.rope,
                "v_head_dim": latent.value,
                "first_k_dense_replace": 0,
                "mlp_layer_types": ["sparse"] * self.layers,
            }
        return AutoConfig.for_model(sizes.model_type, **fields)

    def manifest(self) -> Manifest:
        """The manifest of such a pack."""
        config = self.config()
        family = family_of(config.model_type)
        experts, neurons = family.experts(config), family.neurons(config)
        sizes = (self.layers, experts, config.num_experts_per_tok, config.hidden_size, neurons)
        widths = Widths(
            self.up, self.rows, self.rows, self.dense, "bfloat16", group_size(config.hidden_size), short=True
        )
        return Manifest(
            name=self.name,
            source=PackSource("random weights", None, exact=True),
            architecture=Architecture(config.model_type, *sizes),
            widths=widths,
            calibration=Calibration(CALIBRATION_TOKENS, QUANTILES, weighed=True),
            files={},
            # As packing finds it: the other factor of "clamped" is near one where up is small.
            signals=("gate",) * self.layers if family.experts_by == "clamped" else (),
        )


def make(spec: Spec, device: str, report: Callable[[str], None], *, beside: int = 0) -> Subject:
    """A model with weights and thresholds; `beside` is memory in bytes that others need in this run.

    Raises:
        FloeError: too little memory.
    """
    need_memory(nbytes(spec) + beside, f"{spec.layers} layers of {spec.name}", "Give --layers a smaller number.")
    report("Making weights")
    subject = build(spec, expert_layers(spec), device)
    report("Measuring thresholds")
    calibrate(subject)
    return subject


def need_memory(wanted: int, what: str, hint: str) -> None:
    """Raises FloeError: `wanted` bytes and what measuring takes itself are not free."""
    available = psutil.virtual_memory().available
    if wanted + _OWN_USE > available:
        raise FloeError(
            f"{what} need {(wanted + _OWN_USE) / 1e9:.1f} GB of free memory",
            f"{available / 1e9:.1f} GB are available.",
            f"{hint} Or close other programs.",
        )


def nbytes(spec: Spec) -> int:
    """The model's memory, in bytes."""
    manifest = spec.manifest()
    a, up, rows = manifest.architecture, manifest.signal_layout(), manifest.row_layout()
    neuron = up.vector.nbytes_apart + rows.nbytes
    return dense_bytes(spec) + a.layers * a.experts * a.intermediate * neuron


def dense_bytes(spec: Spec) -> int:
    """Memory of everything but the experts, in bytes."""
    family, total = family_of(spec.manifest().architecture.model_type), 0
    for name, shape in _dense_shapes(spec.config()).items():
        bits = _dense_width(name.removesuffix(".weight"), spec, family)
        total += shape[0] * layout_of(shape[1], bits).nbytes if bits < 16 else 4 * shape.numel()
    return total


def expert_layers(spec: Spec) -> list[PackedLayer]:
    """The experts of every layer, their thresholds all 0: nothing is skipped yet."""
    manifest = spec.manifest()
    return [_expert_layer(manifest) for _ in range(spec.layers)]


def build(spec: Spec, layers: Sequence[PackedLayer], device: str) -> Subject:
    """The model around these experts; the dense part is made."""
    manifest, config = spec.manifest(), spec.config()
    a = manifest.architecture
    control, telemetry = Control(NO_SPARSITY, chunk_for(a.experts, a.top_k)), Telemetry(a.layers, a.experts)
    family = family_of(a.model_type)

    def linear(weights: LinearWeights, bias: nn.Parameter | None) -> PackedLinear:
        parts = (part.to(device) for part in (weights.q, weights.scale, weights.zero))
        return PackedLinear(LinearWeights(weights.vector, *parts), bias, control)

    model = library_model.build(
        config,
        family,
        dense_tensors(spec, family),
        spec.dense,
        lambda index: MoELayer(index, _to(layers[index], device), control, telemetry),
        linear,
        torch.float32 if device == "cpu" else manifest.float16,
        device,
    )
    return Subject(spec.name, model, manifest, control, telemetry, context.window(config), device)


def calibrate(subject: Subject) -> None:
    """Make every router as confident as a published one and the head as a trained one, and set the quantile tables of
    every expert from the tokens that reach it, layer after layer.

    Raises:
        FloeError: the kernels compute NaN or infinity.
    """
    layers = [module for module in subject.model.modules() if isinstance(module, MoELayer)]
    handles = [layer.register_forward_pre_hook(_measure) for layer in layers]
    family = family_of(subject.manifest.architecture.model_type)
    top_k = subject.manifest.architecture.top_k
    for router in map(family.router, family.blocks(subject.model)):
        scoring = getattr(router, "proj", router)  # a router may do something to its input first
        handles.append(scoring.register_forward_pre_hook(partial(_make_sure, top_k)))
    subject.control.preset = NO_SPARSITY
    ids = torch.tensor([subject.prompt(CALIBRATION_TOKENS)], device=subject.device)
    with torch.inference_mode():
        logits = subject.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        centre = float(family.centred)  # of weights as they are stored
        subject.model.model.norm.weight.add_(centre).mul_(_LOGITS / logits.std()).sub_(centre)
    for handle in handles:
        handle.remove()
    if not all(
        bool(table.isfinite().all()) for one in layers for table in (one.packed.thresholds, one.packed.products)
    ):
        raise FloeError(
            "The kernels give wrong results, so nothing was timed",
            "All weights and inputs are finite, but the results are not.",
            "Please report it with the output of: floe-chat doctor",
        )


def _make_sure(chosen: int, router: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    """Scale the weights of a router that is about to score: hidden (B, H).

    Of K chosen experts the weight, times K, is below 2 · _LOW for _LOW_SHARE of them: with two as in the paper's table.
    The surer a router, the more there are, so that the scale is found by halving.
    """
    weight = cast("Tensor", router.weight)
    hidden = arguments[0].reshape(-1, weight.shape[1])
    best = F.linear(hidden, weight).topk(chosen, dim=-1).values
    low, scale, high = 1e-3, 1.0, 1e5
    for _ in range(60):
        scale = math.sqrt(low * high)
        share = ((best * scale).softmax(-1) * chosen < 2 * _LOW).float().mean()
        low, high = (scale, high) if share < _LOW_SHARE else (low, scale)
    weight.data.mul_(scale)


def _measure(layer: nn.Module, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
    """The tables of a layer that is about to compute: hidden (B, H), top_k_index and top_k_weights (B, K)."""
    assert isinstance(layer, MoELayer)
    hidden, chosen, weights = arguments
    worth = worths(weights).to(hidden.dtype)
    for expert in range(len(layer.packed.signal.q)):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        x, each = (hidden[token], worth[token, slot, None]) if token.numel() else (hidden, 1.0)
        signal, rows = layer.packed.signal, layer.packed.rows
        v = _signal(signal, expert, x)
        layer.packed.thresholds[expert] = quantile_table(v * each)
        records = rows.data[expert, ::_SAMPLED]
        other, _ = rows.layout.read(records, x.dtype)
        besides = F.linear(x, other, rows.layout.read_bias(records, x.dtype))
        products = applied(rows.layout.function, besides) * v[:, ::_SAMPLED]
        layer.packed.products[expert] = quantile_table(products * each)


def _signal(signal: SignalWeights, expert: int, x: Tensor) -> Tensor:
    if signal.layout.vector.bits == 16:
        v = F.linear(x, signal.dense(expert, x.dtype))
    else:
        weights = LinearWeights(signal.layout.vector, signal.q[expert], signal.scale[expert], signal.zero[expert])
        v = kernels.linear(x, weights)
    return applied(signal.layout.function, v if signal.bias is None else v + signal.bias[expert].to(v.dtype))


def _expert_layer(manifest: Manifest) -> PackedLayer:
    a, signal = manifest.architecture, manifest.signal_of(0)
    up, rows = manifest.signal_layout(signal), manifest.row_layout(signal)
    shape = (a.experts, a.intermediate)
    hugepages = files_in_hugepages()  # as the pages of a pack are, and of the peer's file
    data = filled(*shape, rows.nbytes, hugepages=hugepages)
    for start, vector in ((0, rows.other), (rows.down_at, rows.down)):
        part = data[:, :, start : start + vector.nbytes]
        if vector.bits == 16:
            part.view(rows.float16).copy_(_normal(vector.n).to(rows.float16))
        else:
            heads = vector.nearest(*(torch.full((vector.groups,), of(vector.bits)) for of in (_scale, _zero)))
            head = torch.cat([one.view(torch.uint8) for one in heads])
            part[:, :, : len(head)] = head
    if up.vector.bits == 16:
        q = _normal(*shape, up.vector.n).to(up.float16).view(torch.uint8)
    else:
        q = filled(*shape, up.row_bytes, hugepages=hugepages)
    # Codes repeat every MiB; different scales tell neurons with the same codes apart.
    scale = _scale(up.vector.bits) * (0.7 + 0.6 * torch.rand(*shape, up.vector.groups))
    heads = up.vector.nearest(scale, torch.full_like(scale, _zero(up.vector.bits)))
    bias, down_bias = None, None
    if rows.biased:
        data[:, :, rows.bias_at : rows.bias_at + 4].view(torch.float32).copy_(_normal(*shape, 1))
        bias, down_bias = _normal(*shape), _normal(a.experts, a.hidden)
    weights = SignalWeights(up, q, *heads, bias)
    thresholds, products = torch.zeros(2, a.experts, manifest.calibration.quantiles)
    return PackedLayer(weights, ExpertRows(rows, data), thresholds, products, down_bias)


def _to(layer: PackedLayer, device: str) -> PackedLayer:
    up, rows = layer.signal, layer.rows
    return PackedLayer(
        up.mapped(lambda part: part.to(device)),
        ExpertRows(rows.layout, rows.data.to(device)),
        layer.thresholds.to(device),
        layer.products.to(device),
        None if layer.down_bias is None else layer.down_bias.to(device),
    )


def _dense_shapes(config: Any) -> dict[str, torch.Size]:
    """Everything but the experts, by the names of transformers' modules."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    return {name: weight.shape for name, weight in model.state_dict().items() if ".experts." not in name}


def head(spec: Spec) -> PackedHead | None:
    """A drafting head of random weights, of a family that is published with one."""
    config, manifest = spec.config(), spec.manifest()
    family = family_of(config.model_type)
    if family.head is None:
        return None
    hidden, norms = config.hidden_size, torch.ones(2, config.hidden_size)
    vector, own = layout_of(2 * hidden, spec.dense), family.head.config(config)
    q = filled(hidden, vector.nbytes - vector.head)
    scales = (torch.full((hidden, vector.groups), of(spec.dense)).half() for of in (_scale, _zero))
    return PackedHead(
        own,
        dense_tensors(spec, family, own),
        _expert_layer(manifest),
        LinearWeights(vector, q, *scales),
        *norms,
    )


def assistant_of(spec: Spec) -> PackedAssistant | None:
    """An assistant of random weights, of a family that is published with one."""
    config, sizes = spec.config(), MODELS[spec.name].draft
    family = family_of(config.model_type)
    if family.assistant is None or not isinstance(sizes, AssistantSizes):
        return None
    kinds = ["sliding_attention"] * (sizes.layers - sizes.wide) + ["full_attention"] * sizes.wide
    own = {"hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate}
    text: dict[str, Any] = {**config.to_dict(), **own, "num_hidden_layers": sizes.layers, "layer_types": kinds}
    heads = next(iter(text["per_layer_config"].values()))  # of the layers that see all tokens
    text["per_layer_config"] = {str(sizes.layers - 1 - layer): heads for layer in range(sizes.wide)}
    fields = assistant.kept_fields({"text_config": text, "backbone_hidden_size": config.hidden_size})
    made = assistant.config_of(fields, config, family)
    shapes = assistant_modules.shapes_of(made, config.hidden_size)
    tensors = _tensors({name: torch.Size(shape) for name, shape in shapes.items()}, spec, family)
    hidden, width = config.hidden_size, sizes.hidden
    joined = quantized_linears.load(tensors, assistant.JOINED, width, 2 * hidden, spec.dense)
    back = quantized_linears.load(tensors, assistant.BACK, hidden, width, spec.dense)
    return PackedAssistant(made, tensors, joined, back)


def dense_tensors(spec: Spec, family: Family, head: Any = None) -> dict[str, Tensor]:
    """Everything but the experts, as a pack has it. head: configuration of a drafting head, whose layer it is then."""
    shapes = _dense_shapes(spec.config() if head is None else head)
    ends = () if head is None else ("model.embed_tokens.weight", "lm_head.weight")  # the model's
    return _tensors({name: shape for name, shape in shapes.items() if name not in ends}, spec, family)


def _tensors(shapes: Mapping[str, torch.Size], spec: Spec, family: Family) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if (bits := _dense_width(layer, spec, family)) < 16:
            vector = layout_of(shape[1], bits)
            tensors[f"{layer}.q"] = filled(shape[0], vector.nbytes - vector.head)
            tensors[f"{layer}.scale"] = torch.full((shape[0], vector.groups), _scale(bits)).half()
            tensors[f"{layer}.zero"] = torch.full((shape[0], vector.groups), _zero(bits)).half()
        else:
            zero = family.centred and layer.endswith(("layernorm", "q_norm", "k_norm", "model.norm"))
            tensors[name] = (
                torch.full(shape, float(not zero and not name.endswith("bias"))) if len(shape) == 1 else _normal(*shape)
            )
    return tensors


def _dense_width(layer: str, spec: Spec, family: Family) -> int:
    """Bits of a layer as packing stores it; 16 unless it is a low-bit layer."""
    coded = family.is_linear(layer) or layer in (assistant.JOINED, assistant.BACK)
    return width_of(layer, spec.dense) if spec.dense < 16 and coded else 16


def _normal(*shape: int) -> Tensor:
    return torch.empty(shape).normal_(0, _WEIGHT)


def _scale(bits: int) -> float:
    """The scale that gives random codes a spread of `_WEIGHT`: 0..2^bits - 1 are spread by sqrt((4^bits - 1) / 12)."""
    return _WEIGHT / ((4**bits - 1) / 12) ** 0.5


def _zero(bits: int) -> float:
    return ((1 << bits) - 1) / 2
