"""What llama.cpp's own tool would write for a model: each tensor's shape and type, and what a step reads of it.

Types are those that `llama_tensor_get_type` and `tensor_type_fallback` (llama-quant.cpp) choose.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....models.catalog_entry import Convolutions, Latent, Recurrent, Sizes
from ....models.errors import UsageError
from ....models.families import family_of
from ....models.families.sizes import sizes_of

BLOCKS = {  # values and bytes of a block (ggml-common.h)
    "F32": (1, 4),
    "Q4_0": (32, 18),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "MXFP4": (32, 17),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
_BASES = {"Q4_0": "Q4_0", "Q4_K_M": "Q4_K", "MXFP4_MOE": "Q8_0"}
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # where 256 does not divide a row
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of gating functions
_MULTIPLE = 32
_PLAIN = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")  # never rounded
_FULL = "full_attention"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PeerSizes:
    """The sizes of a model, and what llama.cpp calls it.

    Attributes:
        architecture: llama.cpp's name. kinds: of one period of layers, by the names of transformers' `layer_types`,
            full attention first; empty where all are alike.
    """

    architecture: str
    sizes: Sizes
    kinds: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The kinds of files that are made, the better last: gpt-oss is published in 4-bit blocks and stays in them. Of
        models with several kinds of layers, which need more layers, there is one: memory is short.
        """
        if self.kinds:
            return ("Q4_K_M",)
        return ("Q4_0", "MXFP4_MOE") if self.architecture == "gpt-oss" else ("Q4_0", "Q4_K_M")

    @property
    def layers(self) -> tuple[int, int]:
        """The two sizes of files. One has two layers more, for both kinds of Q4_K_M, or a whole period. llama.cpp loads
        no file without full attention, or without another kind of layer where it expects one.
        """
        return (2, 2 + len(self.kinds)) if self.kinds else (1, 3)

    @staticmethod
    def possible(config: Any) -> bool:
        """Whether llama.cpp's recipes can be made for a model."""
        sizes = (config.hidden_size, _neurons(config))
        return config.model_type in _ARCHITECTURES and not any(size % _MULTIPLE for size in sizes)

    @classmethod
    def of(cls, config: Any) -> PeerSizes:
        """Raises UsageError: they cannot."""
        if not cls.possible(config):
            raise UsageError(
                "There is no llama.cpp model to compare this one with",
                f"Its recipes are for {', '.join(_ARCHITECTURES)} whose sizes are multiples of {_MULTIPLE}; this is "
                f"{config.model_type} of hidden size {config.hidden_size} and {_neurons(config)} neurons per expert.",
                "Leave out --peer, or measure --synthetic mixtral-8x7b.",
            )
        sizes = sizes_of(family_of(config.model_type), config)
        kinds: tuple[str, ...] = ()
        if sizes.recurrent or sizes.wide:
            special = sizes.wide.layers if sizes.wide else sizes.attending
            others = [kind for kind in config.layer_types if kind != _FULL]
            kinds = (_FULL, *others[: sizes.decoder_layers // special - 1])
        return cls(_ARCHITECTURES[config.model_type], sizes, kinds)

    def kind(self, layer: int) -> str:
        """A layer's kind; "" where all are alike."""
        return self.kinds[layer % len(self.kinds)] if self.kinds else ""

    def header(self, layers: int) -> dict[str, Any]:
        """The file's header: methods of gguf's writer, and their arguments."""
        s = self.sizes
        found: dict[str, Any] = {
            "block_count": layers,
            "context_length": 32768,
            "embedding_length": s.hidden,
            "feed_forward_length": s.intermediate,
            "expert_feed_forward_length": s.intermediate,
            "head_count": s.heads,
            "head_count_kv": s.kv_heads,
            "key_length": s.head_dim,
            "value_length": s.head_dim,
            "layer_norm_rms_eps": 1e-5,
            "rope_freq_base": 1e6,
            "rope_dimension_count": s.head_dim,
            "expert_count": s.experts,
            "expert_used_count": s.top_k,
            "vocab_size": s.vocab,
        }
        if (latent := s.latent) is not None:
            found |= {
                "head_count_kv": 1,
                "key_length": latent.keys + latent.rope,
                "value_length": latent.keys,
                "key_length_mla": s.head_dim,
                "value_length_mla": latent.value,
                "kv_lora_rank": latent.keys,
                "q_lora_rank": latent.queries,
                "rope_dimension_count": latent.rope,
                "leading_dense_block_count": 0,
                "expert_shared_count": s.shared // s.intermediate,
                "expert_gating_func": _SIGMOID if s.router_bias else _SOFTMAX,
                "expert_weights_norm": s.router_bias,
            }
        if isinstance(state := s.recurrent, Recurrent):
            width = state.values // state.heads
            found |= {
                "expert_shared_feed_forward_length": s.shared,
                "rope_dimension_count": s.head_dim // 4,
                "rope_dimension_sections": [11, 11, 10, 0],
                "attention.recurrent_layers": [self.kind(layer) != _FULL for layer in range(layers)],
                "ssm_conv_kernel": state.taps,
                "ssm_state_size": width,
                "ssm_group_count": state.keys // width,
                "ssm_time_step_rank": state.heads,
                "ssm_inner_size": state.values,
            }
        elif isinstance(state, Convolutions):
            found |= {
                "head_count_kv": [s.kv_heads * (self.kind(layer) == _FULL) for layer in range(layers)],
                "shortconv_l_cache": state.taps,
                "leading_dense_block_count": 0,
                "expert_gating_func": _SIGMOID,
            }
        if (wide := s.wide) is not None:
            full = [self.kind(layer) == _FULL for layer in range(layers)]
            found |= {
                "feed_forward_length": s.shared,
                "head_count_kv": [wide.kv_heads if one else s.kv_heads for one in full],
                "key_length": wide.head_dim,
                "value_length": wide.head_dim,
                "key_length_swa": s.head_dim,
                "value_length_swa": s.head_dim,
                "rope_dimension_count": wide.head_dim,
                "rope_dimension_count_swa": s.head_dim,
                "sliding_window_pattern": [not one for one in full],
                "sliding_window": 1024,
                "embedding_length_per_layer_input": 0,
                "final_logit_softcapping": 30.0,
            }
        if self.architecture == "gpt-oss":
            found["sliding_window"] = 128
        return found

    def ends(self, layers: int) -> Shapes:
        """The tensors outside of layers."""
        s = self.sizes
        found = {"token_embd": (s.vocab, s.hidden), _NORMS.get(self.architecture, "output_norm"): (s.hidden,)}
        if not s.tied:
            found["output"] = (s.vocab, s.hidden)
        if self.architecture == "phimoe":
            found |= {"output.bias": (s.vocab,), "output_norm.bias": (s.hidden,)}
        if s.wide is not None and _FULL in map(self.kind, range(layers)):
            found["rope_freqs"] = (s.wide.head_dim // 2,)
        return found

    def layer(self, number: int) -> Shapes:
        """A layer's tensors: shapes, outputs first. Numbers without a suffix are weights."""
        s, kind = self.sizes, self.kind(number)
        if s.latent is not None:
            attention = _latent(s, s.latent)
        elif kind == "linear_attention" and isinstance(s.recurrent, Recurrent):
            attention = _delta(s, s.recurrent, joined=self.architecture == "qwen3next")
        elif kind == "conv" and isinstance(s.recurrent, Convolutions):
            attention = _convolution(s, s.recurrent)
        elif kind == _FULL and s.wide is not None:
            attention = _grouped(s, s.wide.kv_heads, s.wide.head_dim, keys_alone=s.wide.keys_alone)
        else:
            attention = _grouped(s, s.kv_heads, s.head_dim)
        wide = (s.experts, s.intermediate, s.hidden)
        first: Shapes = {"ffn_gate_exps": wide, "ffn_up_exps": wide}
        if self.architecture == "gemma4":
            first = {"ffn_gate_up_exps": (s.experts, 2 * s.intermediate, s.hidden)}
        return {
            **attention,
            **first,
            "attn_norm": (s.hidden,),
            "ffn_gate_inp": (s.experts, s.hidden),
            "ffn_down_exps": (s.experts, s.hidden, s.intermediate),
            **_MORE.get(self.architecture, _norm)(s),
        }


_ARCHITECTURES = {
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma4_text": "gemma4",
    "lfm2_moe": "lfm2moe",
    "phimoe": "phimoe",
}
_NORMS = {"lfm2moe": "token_embd_norm"}


def _grouped(s: Sizes, kv_heads: int, head_dim: int, *, keys_alone: bool = False) -> Shapes:
    queries, keys = s.heads * head_dim, (kv_heads * head_dim, s.hidden)
    found: Shapes = {"attn_q": (queries * (2 if s.gated_heads else 1), s.hidden), "attn_k": keys}
    if not keys_alone:
        found["attn_v"] = keys
    if s.head_norms:
        found |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    return {**found, "attn_output": (s.hidden, queries)}


def _latent(s: Sizes, latent: Latent) -> Shapes:
    queries = s.heads * s.head_dim
    asked: Shapes = {"attn_q": (queries, s.hidden)}
    if latent.queries:
        asked = {
            "attn_q_a": (latent.queries, s.hidden),
            "attn_q_a_norm": (latent.queries,),
            "attn_q_b": (queries, latent.queries),
        }
    return {
        **asked,
        "attn_kv_a_norm": (latent.keys,),
        "attn_kv_a_mqa": (latent.keys + latent.rope, s.hidden),
        "attn_k_b": (s.heads, latent.keys, s.head_dim - latent.rope),
        "attn_v_b": (s.heads, latent.value, latent.keys),
        "attn_output": (s.hidden, s.heads * latent.value),
    }


def _delta(s: Sizes, state: Recurrent, *, joined: bool) -> Shapes:
    """A layer of gated delta rules; `joined`: its two small projections are one tensor."""
    mixed, one = 2 * state.keys + state.values, (state.heads, s.hidden)
    small: Shapes = {"ssm_ba": (2 * state.heads, s.hidden)} if joined else {"ssm_beta": one, "ssm_alpha": one}
    return {
        **small,
        "attn_qkv": (mixed, s.hidden),
        "attn_gate": (state.values, s.hidden),
        "ssm_conv1d": (mixed, state.taps),
        "ssm_dt.bias": (state.heads,),
        "ssm_a.": (state.heads,),
        "ssm_norm": (state.values // state.heads,),
        "ssm_out": (s.hidden, state.values),
    }


def _convolution(s: Sizes, state: Convolutions) -> Shapes:
    return {
        "shortconv.conv": (s.hidden, state.taps),
        "shortconv.in_proj": (3 * s.hidden, s.hidden),
        "shortconv.out_proj": (s.hidden, s.hidden),
    }


def _norm(s: Sizes) -> Shapes:
    return {"ffn_norm": (s.hidden,)}


def _corrected(s: Sizes) -> Shapes:
    return {**_norm(s), "exp_probs_b.bias": (s.experts,)}


def _biases(s: Sizes) -> Shapes:
    keys = (s.kv_heads * s.head_dim,)
    return {
        "attn_q.bias": (s.heads * s.head_dim,),
        "attn_k.bias": keys,
        "attn_v.bias": keys,
        "attn_output.bias": (s.hidden,),
    }


def _gpt_oss(s: Sizes) -> Shapes:
    wide = (s.experts, s.intermediate)
    return {
        **_biases(s),
        "post_attention_norm": (s.hidden,),
        "attn_sinks": (s.heads,),
        "ffn_gate_inp.bias": (s.experts,),
        "ffn_gate_exps.bias": wide,
        "ffn_up_exps.bias": wide,
        "ffn_down_exps.bias": (s.experts, s.hidden),
    }


def _phi(s: Sizes) -> Shapes:
    return {**_norm(s), **_biases(s), "attn_norm.bias": (s.hidden,), "ffn_norm.bias": (s.hidden,)}


def _shared(s: Sizes) -> Shapes:
    wide = (s.shared, s.hidden)
    return {"ffn_gate_shexp": wide, "ffn_up_shexp": wide, "ffn_down_shexp": (s.hidden, s.shared)}


def _deepseek(s: Sizes) -> Shapes:
    return {**(_corrected(s) if s.router_bias else _norm(s)), **_shared(s)}


def _qwen(s: Sizes) -> Shapes:
    return {"post_attention_norm": (s.hidden,), "ffn_gate_inp_shexp": (s.hidden,), **_shared(s)}


def _gemma(s: Sizes) -> Shapes:
    """Experts next to a dense part, and norms around both; a factor of each layer and expert, and of the router."""
    norms = ("ffn_norm", "post_attention_norm", "pre_ffw_norm_2", "post_ffw_norm", "post_ffw_norm_1", "post_ffw_norm_2")
    return {
        **dict.fromkeys(norms, (s.hidden,)),
        "layer_output_scale": (1,),
        "ffn_gate_inp.scale": (s.hidden,),
        "ffn_down_exps.scale": (s.experts,),
        "ffn_gate": (s.shared, s.hidden),
        "ffn_up": (s.shared, s.hidden),
        "ffn_down": (s.hidden, s.shared),
    }


_MORE: dict[str, Callable[[Sizes], Shapes]] = {
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek,
    "qwen3next": _qwen,
    "qwen35moe": _qwen,
    "gemma4": _gemma,
    "lfm2moe": _corrected,
    "phimoe": _phi,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One file: which tensor has which type."""

    kind: str
    widths: PeerSizes
    layers: int

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> shape (outputs first) and type."""
        ends = self.widths.ends(self.layers).items()
        found = {_full_name(part): (shape, self._type(part, shape, 0)) for part, shape in ends}
        for layer in range(self.layers):
            for part, shape in self.widths.layer(layer).items():
                found[f"blk.{layer}.{_full_name(part)}"] = shape, self._type(part, shape, layer)
        return found

    def _type(self, part: str, shape: tuple[int, ...], layer: int) -> str:
        if len(shape) == 1 or part in _PLAIN or part.endswith(".bias"):
            return "F32"
        if self.kind == "MXFP4_MOE":
            return "MXFP4" if part.endswith("_exps") else "Q8_0"
        wide = self._wide(part, layer)
        return _NARROW.get(wide, wide) if shape[-1] % BLOCKS[wide][0] else wide

    def _wide(self, part: str, layer: int) -> str:
        """A tensor's type where 256 divides its rows."""
        base = _BASES[self.kind]
        # use_more_bits picks 16 of Mixtral's 32 layers and 24 of Qwen's 48; here it is every second one.
        more = self.kind == "Q4_K_M" and layer % 2 == 1
        sizes = self.widths.sizes
        head = "token_embd" if sizes.tied else "output"
        if part == head or (more and part.startswith("ffn_down")):
            return "Q6_K"
        if sizes.experts == 8 and part in ("attn_k", "attn_v"):
            return "Q8_0"
        if sizes.experts == 8 and part == "attn_output" and self.kind == "Q4_K_M":
            return "Q5_K"
        return "Q6_K" if more and part in ("attn_v", "attn_qkv") else base

    def nbytes(self) -> int:
        """The file's size, but for a header of kilobytes."""
        return sum(_nbytes(*tensor) for tensor in self.tensors().values())

    def read_bytes(self, *, all_experts: bool) -> int:
        """What a token reads: everything but an embedding that is not the head, and of the experts the chosen,
        unless all.
        """
        sizes = self.widths.sizes
        share = 1.0 if all_experts else sizes.top_k / sizes.experts
        read = {name: _nbytes(*tensor) for name, tensor in self.tensors().items()}
        if not sizes.tied:
            del read["token_embd.weight"]
        return int(sum(size * share if "_exps." in name else size for name, size in read.items()))

    def header(self) -> dict[str, Any]:
        """See `PeerSizes.header`."""
        return self.widths.header(self.layers)

    def file(self, folder: Path) -> Path:
        """The file's path: its name contains a digest of everything that it depends on."""
        w = self.widths
        digest = hashlib.sha256(repr((self.header(), self.tensors())).encode()).hexdigest()[:12]
        return folder / f"{self.kind}-{w.architecture}-{w.sizes.hidden}-{self.layers}-{digest}.gguf"


def _full_name(part: str) -> str:
    return part.rstrip(".") if part.endswith((".bias", ".scale", ".")) else f"{part}.weight"


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    values, size = BLOCKS[kind]
    return math.prod(shape) // values * size


def _neurons(config: Any) -> int:
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
