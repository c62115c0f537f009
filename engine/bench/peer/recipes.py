"""What llama.cpp's own tool would write for a model: each tensor's shape and type, and what a step reads of it.

Types are those that `llama_tensor_get_type` and `tensor_type_fallback` (llama-quant.cpp) choose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....models.errors import UsageError

LAYERS = (1, 3)  # the two extra layers stand for the two kinds of layers of Q4_K_M
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
_SOFTMAX = 1  # llama.cpp's number of this gating function
_MULTIPLE = 32

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PeerSizes:
    """The sizes of a model, from transformers' configuration.

    Attributes:
        architecture: llama.cpp's name. shared: neurons of a layer's shared expert. latent: numbers of the vector
            through which attention goes, 0 for none. rope: dimensions of a head that turn. value: numbers of its value.
    """

    architecture: str
    hidden: int
    neurons: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int
    top_k: int
    shared: int = 0
    latent: int = 0
    rope: int = 0
    value: int = 0

    @property
    def kinds(self) -> tuple[str, str]:
        """The kinds of files that are made, the better last: gpt-oss is published in 4-bit blocks and stays in them."""
        return ("Q4_0", "MXFP4_MOE") if self.architecture == "gpt-oss" else ("Q4_0", "Q4_K_M")

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
        latent = getattr(config, "kv_lora_rank", None) or 0
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope = config.qk_rope_head_dim if latent else dim
        return cls(
            architecture=_ARCHITECTURES[config.model_type],
            hidden=config.hidden_size,
            neurons=_neurons(config),
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=rope + config.qk_nope_head_dim if latent else dim,
            vocabulary=config.vocab_size,
            experts=_first(config, "num_local_experts", "num_experts", "n_routed_experts"),
            top_k=config.num_experts_per_tok,
            shared=(getattr(config, "n_shared_experts", None) or 0) * _neurons(config),
            latent=latent,
            rope=rope,
            value=config.v_head_dim if latent else dim,
        )

    def told(self) -> dict[str, Any]:
        """The file's header: methods of gguf's writer, and their arguments."""
        found: dict[str, Any] = {
            "context_length": 32768,
            "embedding_length": self.hidden,
            "feed_forward_length": self.neurons,
            "expert_feed_forward_length": self.neurons,
            "head_count": self.heads,
            "head_count_kv": 1 if self.latent else self.kv_heads,
            "key_length": self.latent + self.rope if self.latent else self.head_dim,
            "value_length": self.latent or self.value,
            "layer_norm_rms_eps": 1e-5,
            "rope_freq_base": 1e6,
            "rope_dimension_count": self.rope,
            "expert_count": self.experts,
            "expert_used_count": self.top_k,
            "vocab_size": self.vocabulary,
        }
        if self.architecture == "gpt-oss":
            found["sliding_window"] = 128
        if self.latent:
            found |= {"key_length_mla": self.head_dim, "value_length_mla": self.value, "kv_lora_rank": self.latent}
            found |= {"q_lora_rank": 0, "leading_dense_block_count": 0}
            found |= {"expert_shared_count": self.shared // self.neurons, "expert_gating_func": _SOFTMAX}
        return found

    def layer(self) -> Shapes:
        """A layer's tensors: shapes, outputs first. Numbers without a suffix are weights."""
        attention = _latent(self) if self.latent else _grouped(self)
        return {
            **attention,
            "attn_norm": (self.hidden,),
            "attn_output": (self.hidden, self.heads * self.value),
            "ffn_gate_inp": (self.experts, self.hidden),
            "ffn_gate_exps": (self.experts, self.neurons, self.hidden),
            "ffn_up_exps": (self.experts, self.neurons, self.hidden),
            "ffn_down_exps": (self.experts, self.hidden, self.neurons),
            **_MORE.get(self.architecture, _norm)(self),
        }


_ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2"}


def _grouped(s: PeerSizes) -> Shapes:
    keys = (s.kv_heads * s.head_dim, s.hidden)
    return {"attn_q": (s.heads * s.head_dim, s.hidden), "attn_k": keys, "attn_v": keys}


def _latent(s: PeerSizes) -> Shapes:
    return {
        "attn_q": (s.heads * s.head_dim, s.hidden),
        "attn_kv_a_norm": (s.latent,),
        "attn_kv_a_mqa": (s.latent + s.rope, s.hidden),
        "attn_k_b": (s.heads, s.latent, s.head_dim - s.rope),
        "attn_v_b": (s.heads, s.value, s.latent),
    }


def _norm(s: PeerSizes) -> Shapes:
    return {"ffn_norm": (s.hidden,)}


def _head_norms(s: PeerSizes) -> Shapes:
    return {**_norm(s), "attn_q_norm": (s.head_dim,), "attn_k_norm": (s.head_dim,)}


def _biases(s: PeerSizes) -> Shapes:
    keys, wide = (s.kv_heads * s.head_dim,), (s.experts, s.neurons)
    return {
        "post_attention_norm": (s.hidden,),
        "attn_sinks": (s.heads,),
        "attn_q.bias": (s.heads * s.head_dim,),
        "attn_k.bias": keys,
        "attn_v.bias": keys,
        "attn_output.bias": (s.hidden,),
        "ffn_gate_inp.bias": (s.experts,),
        "ffn_gate_exps.bias": wide,
        "ffn_up_exps.bias": wide,
        "ffn_down_exps.bias": (s.experts, s.hidden),
    }


def _shared(s: PeerSizes) -> Shapes:
    wide = (s.shared, s.hidden)
    return {**_norm(s), "ffn_gate_shexp": wide, "ffn_up_shexp": wide, "ffn_down_shexp": (s.hidden, s.shared)}


_MORE: dict[str, Callable[[PeerSizes], Shapes]] = {"qwen3moe": _head_norms, "gpt-oss": _biases, "deepseek2": _shared}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One file: which tensor has which type."""

    kind: str
    widths: PeerSizes
    layers: int

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> shape (outputs first) and type."""
        w = self.widths
        shapes: Shapes = {
            "token_embd.weight": (w.vocabulary, w.hidden),
            "output_norm.weight": (w.hidden,),
            "output.weight": (w.vocabulary, w.hidden),
        }
        found = {name: (shape, self._type(name.removesuffix(".weight"), shape, 0)) for name, shape in shapes.items()}
        for layer in range(self.layers):
            for part, shape in w.layer().items():
                name = part if part.endswith(".bias") else f"{part}.weight"
                found[f"blk.{layer}.{name}"] = shape, self._type(part, shape, layer)
        return found

    def _type(self, part: str, shape: tuple[int, ...], layer: int) -> str:
        if len(shape) == 1 or part == "ffn_gate_inp" or part.endswith(".bias"):
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
        if part == "output" or (more and part.startswith("ffn_down")):
            return "Q6_K"
        if self.widths.experts == 8 and part in ("attn_k", "attn_v"):
            return "Q8_0"
        if self.widths.experts == 8 and part == "attn_output" and self.kind == "Q4_K_M":
            return "Q5_K"
        return "Q6_K" if more and part == "attn_v" else base

    def nbytes(self) -> int:
        """The file's size, but for a header of kilobytes."""
        return sum(_nbytes(*tensor) for tensor in self.tensors().values())

    def read_bytes(self, *, all_experts: bool) -> int:
        """What a token reads: everything but the embedding, and of the experts those that it chose, unless all."""
        share = 1.0 if all_experts else self.widths.top_k / self.widths.experts
        sizes = {name: _nbytes(*tensor) for name, tensor in self.tensors().items() if name != "token_embd.weight"}
        return int(sum(size * share if "_exps." in name else size for name, size in sizes.items()))

    def file(self, folder: Path) -> Path:
        """The file's path: its name contains everything that it depends on."""
        w = self.widths
        sizes = (w.hidden, w.neurons, w.heads, w.kv_heads, w.head_dim, w.vocabulary, w.experts, w.top_k, w.shared)
        return folder / f"{self.kind}-{w.architecture}-{'-'.join(map(str, sizes))}-{self.layers}.gguf"


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    values, size = BLOCKS[kind]
    count = 1
    for length in shape:
        count *= length
    return count // values * size


def _neurons(config: Any) -> int:
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


def _first(config: Any, *names: str) -> int:
    return next(int(found) for name in names if (found := getattr(config, name, None)))
