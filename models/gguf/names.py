"""Published names of the tensors in a GGUF file: by the gguf library's map, and by what the families' records know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..errors import PackError
from ..families import Family
from ..families.derived import Derived
from ..families.storage import Apart, Interleaved, Mxfp4, Stacked, Storage
from ..modules import library_model
from . import mxfp4, recurrent
from .header import GgufTensor
from .made import (
    Made,
    Undo,
    UndoOne,
    above,
    columns_in_turn,
    in_turn,
    itself,
    latent_keys_and_values,
    less_one,
    log_of_negative,
    made,
    one_by_one,
    shaped,
    survives,
    unpermuted,
)
from .parts import Gguf

_PERMUTED = ("llama", "deepseek", "granitemoe", "granitehybrid")  # architectures whose converter permutes q and k
_WITH_ONE = ("qwen3next", "qwen35moe")  # whose norms have one added
_SPELLED = (  # endings of published names -> as the library's map has them
    (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    ("e_score_correction_bias", "e_score_correction.bias"),
    (".expert_bias", ".expert_bias.bias"),
    (".sinks", ".sinks.weight"),
    (".dt_bias", ".dt_proj.bias"),
    (".layer_scalar", ".layer_scalar.weight"),
    (".mlp.gate.moe_statics.", ".mlp.moe_statics."),
    (".forget_gate.", "."),
    (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
)
_DIRECT = (  # endings of published names -> of GGUF's, in the same layer
    (".router.per_expert_scale", "ffn_down_exps.scale"),
    (".router.scale", "ffn_gate_inp.scale"),
    (".linear_attn.A_log", "ssm_a"),
    (".self_attn.g_proj.weight", "attn_gate.weight"),
    (".eh_proj.weight", "nextn.eh_proj.weight"),
    (".enorm.weight", "nextn.enorm.weight"),
    (".hnorm.weight", "nextn.hnorm.weight"),
    (".shared_head.norm.weight", "nextn.shared_head_norm.weight"),
)
_LIKE = {"laguna": "exaone-moe", "mellum": "qwen3moe"}  # architectures that the library's map lacks
_ALSO = (("token_embd_norm.", "output_norm."), ("ssm_ba.", "ssm_beta_alpha."))  # of other versions of the converter
_UNUSED = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")  # the configuration has what they say
_UNUSED_ENDS = (".attn_rot_embd.weight", ".rope_freqs.weight")
_EXPERTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
_SIXTEEN = ("F16", "BF16")


@dataclass
class Naming:
    """Finds what each published tensor is made of.

    Attributes:
        used: names in GGUF of what was found so far.
    """

    gguf: Gguf
    family: Family
    config: Any
    used: set[str] = field(default_factory=set[str])

    def made(self, model: Any) -> dict[str, Made]:
        """Published name -> how it is made, by name; of a family without a record, by transformers' names instead.

        Args:
            model: transformers' own, without memory.

        Raises:
            ValueError: tensors do not have the shapes that they need, or nothing uses them.
        """
        found: dict[str, Made] = {}
        for module, tensor in model.state_dict(keep_vars=True).items():
            published = self._published(module)
            if ".experts." not in module and (one := self._dense(published, tuple(tensor.shape))) is not None:
                found[published] = one
        found |= dict(self._by_module(model) if isinstance(self.family, Derived) else self._experts())
        found |= dict(self._of_head())
        last = self.config.num_hidden_layers
        further = {name for name in self.gguf.tensors if (found_in := layer_of(name)) is not None and found_in >= last}
        unused = {name for name in self.gguf.tensors if name.startswith(_UNUSED) or name.endswith(_UNUSED_ENDS)}
        if strange := sorted(self.gguf.tensors.keys() - self.used - unused - (further if self._guesses else set())):
            raise ValueError(f"nothing is known about its tensor {strange[0]}")
        return dict(sorted(found.items()))

    @property
    def _guesses(self) -> bool:
        """Whether layers behind the last guess further tokens."""
        return bool(self.gguf.number("nextn_predict_layers"))

    def _of_head(self) -> Iterator[tuple[str, Made]]:
        """Of the first layer behind the last, which guesses a further token. What of it has an unexpected form is left
        out, which packing reports.
        """
        head, last = self.family.head, int(self.config.num_hidden_layers)
        if head is None or not head.count(self.config):
            return
        begin, hidden = f"model.layers.{last}.", int(self.config.hidden_size)
        parts: dict[str, tuple[str, tuple[int, ...]]] = {  # published names -> names as of other layers, and shapes
            head.joined: (f"{begin}eh_proj.weight", (hidden, 2 * hidden)),
            head.embedding_norm: (f"{begin}enorm.weight", (hidden,)),
            head.hidden_norm: (f"{begin}hnorm.weight", (hidden,)),
            head.norm: (f"{begin}shared_head.norm.weight", (hidden,)),
        }
        try:
            modules = library_model.empty(head.config(self.config), torch.float32).state_dict(keep_vars=True)
        except PackError:
            return
        for module, tensor in modules.items():
            if module.startswith("model.layers.0.") and ".experts." not in module:
                name = self._published(module.replace("model.layers.0.", begin, 1))
                parts[head.layer + name.removeprefix(begin)] = name, tuple(tensor.shape)
        for published, (name, shape) in parts.items():
            with suppress(ValueError):
                if (one := self._dense(name, shape)) is not None:
                    yield published.format(layer=last), one
        if head.stored:
            with suppress(ValueError):
                yield from [*self._in_layer(last, head.stored[0])]

    def _published(self, module: str) -> str:
        """The name in checkpoints of a tensor of transformers' module."""
        for old, new in self.family.renames:
            if new in module and not old.startswith("model.language_model."):
                module = module.replace(new, old)
        return module

    def _dense(self, published: str, shape: tuple[int, ...]) -> Made | None:
        """None if the file lacks it, which the checkpoint's own check reports."""
        if published == "lm_head.weight" and self.config.tie_word_embeddings:
            return None
        for names, undo in self._ways(published, shape):
            sources = tuple(self.gguf.tensors[name] for name in names if name in self.gguf.tensors)
            if len(sources) == len(names):
                self.used |= {*names}
                if names[0].endswith(".attn_kv_b.weight"):  # some files hold its two parts as well
                    self.used |= {names[0].replace("kv_b", part) for part in ("k_b", "v_b")}
                return self._typed(published, sources, undo)
        return None

    def _ways(self, published: str, shape: tuple[int, ...]) -> Iterator[tuple[tuple[str, ...], Undo]]:
        """Names in GGUF that a published tensor may be made of, and how."""
        name = self._name(published)
        block = ".".join(published.split(".")[:3]).replace("model.layers.", "blk.")
        if name is not None:
            undo = self._undo(published, shape)
            yield (name,), undo
            for ours, other in _ALSO:
                yield (name.replace(ours, other),), undo
        if published.endswith(".kv_b_proj.weight"):
            yield (f"{block}.attn_k_b.weight", f"{block}.attn_v_b.weight"), latent_keys_and_values
        elif published.endswith(".self_attn.conv1d.weight"):
            yield tuple(f"{block}.ssm_conv1d_{part}.weight" for part in "qkv"), partial(one_by_one, shape=shape)
        elif published.endswith(".shared_mlp.input_linear.weight"):
            yield (f"{block}.ffn_gate_shexp.weight", f"{block}.ffn_up_shexp.weight"), above
        elif published.endswith(".in_proj_qkvz.weight"):
            undo = partial(recurrent.grouped, heads=recurrent.Heads.of(self.config))
            yield (f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight"), undo

    def _name(self, published: str) -> str | None:
        """By the library's map."""
        for ending, name in _DIRECT:
            if published.endswith(ending):
                return f"blk.{published.split('.')[2]}.{name}"
        spelled = published
        for ending, other in _SPELLED:
            spelled = spelled.replace(ending, other) if ending in spelled else spelled
        if ".mixer." in spelled:
            spelled = spelled.replace("model.", "backbone.", 1)
        base, _, suffix = spelled.rpartition(".")
        found = "output" if base == "lm_head" else self._map.get(base)
        return self._map.get(spelled) if found is None else f"{found}.{suffix}"

    @cached_property
    def _map(self) -> dict[str, str]:
        architecture = self.gguf.architecture
        layers = int(self.config.num_hidden_layers) + 1  # with one that guesses
        return _library_map(_LIKE.get(architecture, architecture), layers)

    def _undo(self, published: str, shape: tuple[int, ...]) -> UndoOne:
        """What the converter did to one tensor by itself, undone."""
        architecture, config = self.gguf.architecture, self.config
        if architecture in _PERMUTED and ".self_attn.q_proj." in published:
            return unpermuted(config.num_attention_heads)
        if architecture in _PERMUTED and ".self_attn.k_proj." in published:
            return unpermuted(config.num_key_value_heads)
        if architecture == "qwen35moe" and ".linear_attn." in published:
            return recurrent.undo(published, shape, recurrent.Heads.of(config))
        if published.endswith(".A_log"):
            return lambda tensor: log_of_negative(tensor).reshape(shape)
        if architecture in _WITH_ONE and published.endswith("norm.weight") and ".linear_attn." not in published:
            return less_one
        return shaped(*shape) if len(shape) != 2 or 1 in shape else itself

    def _typed(self, published: str, sources: tuple[GgufTensor, ...], undo: Undo) -> Made:
        """With the type that it was published in, as far as the file tells: norms and routers are wider there."""
        kinds = {source.kind for source in sources}
        if len(kinds) == 1 and kinds <= {*_SIXTEEN}:
            return made(sources, next(iter(kinds)), undo)
        if kinds != {"F32"}:
            return made(sources, "F32", undo)
        wide = made(sources, "F32", undo)
        narrow = self.width
        if narrow != "F32" and self.family.precise and published.endswith(self.family.precise):
            decay = log_of_negative if published.endswith(".A_log") else undo
            return replace(wide, dtype=narrow) if survives(wide.read(), narrow, decay) else wide
        return replace(wide, dtype=narrow)

    @cached_property
    def width(self) -> str:
        """What was published wider than 16 bits only by the converter: the type of experts, or of other matrices where
        these have blocks as published; "F32" where all is wider.
        """
        tensors = self.gguf.tensors.values()
        kinds = self._kinds_of_experts
        if kinds == {"MXFP4"}:
            kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1} - {"MXFP4", "F32"}
        return next(iter(kinds)) if len(kinds) == 1 and kinds <= {*_SIXTEEN} else "F32"

    @property
    def storage(self) -> Storage:
        """The way in which the view stores experts: one that its family's checkpoints have."""
        ways = [way for way in self.family.stored if ".language_model." not in getattr(way, "name", "")]
        if isinstance(ways[0], Mxfp4) and self._kinds_of_experts != {"MXFP4"}:
            return ways[1]
        return ways[0]

    @cached_property
    def _kinds_of_experts(self) -> set[str]:
        weights = [tensor for name, tensor in self.gguf.tensors.items() if name.endswith(".weight")]
        return {tensor.kind for tensor in weights if is_expert(tensor.name)}

    def _experts(self) -> Iterator[tuple[str, Made]]:
        for layer in self.family.expert_layers(self.config):
            yield from self._in_layer(layer, self.storage)

    def _in_layer(self, layer: int, storage: Storage) -> Iterator[tuple[str, Made]]:
        """A layer's experts, by the names that `storage` has for them."""
        count = self.family.experts(self.config)
        if isinstance(storage, Apart):
            for expert in range(count):
                names = storage.names(layer, expert)
                for name, part in zip(names, ("gate", "up", "down"), strict=True):
                    if (one := self._apart(layer, expert, part)) is not None:
                        yield name, one
        else:
            names = storage.names(layer, 0)
            for name, part in zip(names, self._together(layer, count, storage), strict=True):
                if part is not None:
                    yield name, part

    def _by_module(self, model: Any) -> Iterator[tuple[str, Made]]:
        """All experts of each layer, as transformers' module of them holds them."""
        names = {id(module): name for name, module in model.named_modules()}
        count = self.family.experts(self.config)
        for layer in self.family.expert_layers(self.config):
            experts = self.family.block_of(model.model.layers[layer]).experts
            of = partial(self._of_all, layer, count, _turned if getattr(experts, "is_transposed", False) else above)
            gate, up, down = _EXPERTS
            if getattr(experts, "has_gate", True):
                found = {"gate_up_proj": of("ffn_gate_up_exps.weight") or of(gate, up), "down_proj": of(down)}
            else:
                found = {"up_proj": of(up), "down_proj": of(down)}
            yield from ((f"{names[id(experts)]}.{part}", one) for part, one in found.items() if one is not None)

    def _apart(self, layer: int, expert: int, part: str) -> Made | None:
        """One matrix of one expert: a slice of a tensor with all of them, half of one, or one of its own."""
        tensors, block = self.gguf.tensors, f"blk.{layer}"
        for name in (f"{block}.ffn_{part}_exps.weight", f"{block}.ffn_gate_up_exps.weight"):
            if name in tensors and (part != "down" or "gate_up" not in name):
                self.used.add(name)
                if expert >= tensors[name].shape[0]:
                    return None
                undo: Undo = _half(part) if "gate_up" in name else itself
                return made((tensors[name],), self._kind(tensors[name]), undo, expert=expert)
        name = f"{block}.ffn_{part}.{expert}.weight"
        if name not in tensors:
            return None
        self.used.add(name)
        return made((tensors[name],), self._kind(tensors[name]), itself)

    def _together(self, layer: int, count: int, storage: Storage) -> list[Made | None]:
        """The tensors with all experts of a layer, in the order of the storage's names."""
        of = partial(self._of_all, layer, count)
        gate, up, down = _EXPERTS
        biases = of(in_turn, "ffn_gate_exps.bias", "ffn_up_exps.bias"), of(itself, "ffn_down_exps.bias")
        if isinstance(storage, Stacked):
            return [of(itself, "ffn_gate_up_exps.weight") or of(above, gate, up), of(itself, down)]
        if isinstance(storage, Interleaved):
            return [of(columns_in_turn, gate, up), of(_turned, down), *biases]
        both, one = of(above, gate, up), of(itself, down)
        return [*mxfp4.parts(both), biases[0], *mxfp4.parts(one), biases[1]]

    def _of_all(self, layer: int, count: int, undo: Undo, *names: str) -> Made | None:
        """A tensor with all experts of a layer, of these; None if the file lacks one."""
        sources = [self.gguf.tensors.get(f"blk.{layer}.{name}") for name in names]
        found = tuple(source for source in sources if source is not None)
        if len(found) < len(names):
            return None
        self.used |= {source.name for source in found}
        if any(source.shape[0] != count for source in found):
            raise ValueError(f"{found[0].name} holds {found[0].shape[0]} experts, not {count}")
        return made(found, self._kind(*found), undo, experts=count)

    def _kind(self, *sources: GgufTensor) -> str:
        kinds = {source.kind for source in sources}
        if len(kinds) == 1 and kinds <= {*_SIXTEEN}:
            return next(iter(kinds))
        return self.width if kinds == {"F32"} and all(source.name.endswith(".bias") for source in sources) else "F32"


def is_expert(name: str) -> bool:
    """Whether a tensor of a GGUF file holds experts, or one."""
    parts = name.split(".")
    return "exps" in name or (len(parts) == 5 and parts[2].startswith("ffn_") and parts[3].isdecimal())


def layer_of(name: str) -> int | None:
    """The number of a tensor's layer; None if it is in none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 2 and parts[1].isdecimal() else None


def _turned(*tensors: Tensor) -> Tensor:
    return above(*tensors).T


def _half(part: str) -> UndoOne:
    return lambda both: both.chunk(2)[part == "up"]


_maps: dict[tuple[str, int], dict[str, str]] = {}


def _library_map(architecture: str, layers: int) -> dict[str, str]:
    """Published names -> names in GGUF, both without their last part."""
    if (architecture, layers) not in _maps:
        from gguf.constants import MODEL_ARCH_NAMES
        from gguf.tensor_mapping import get_tensor_name_map

        kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
        mapping = get_tensor_name_map(kind, layers).mapping
        _maps[architecture, layers] = {name: found for name, (_, found) in mapping.items()}
    return _maps[architecture, layers]
