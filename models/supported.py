"""Which models floe-chat can set up, and why not the others: their format, their family, or that they have no experts.
Decided by the typed name, and by the fields of a config.json.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from . import config_limits
from .catalog_entry import GROUP, Sizes
from .errors import CheckpointError, FloeError, UsageError
from .families import FAMILIES, family_of, language_fields
from .families.derived import Derived, UnfitError, configured, fit
from .families.sizes import NAMES, sizes_of, view
from .paths import is_file
from .typed_names import hub_repo

SUPPORTED = {kind: family.called for kind, family in FAMILIES.items()}  # by the model_type of config.json
*_FIRST, _LAST = SUPPORTED.values()
CALLED = f"{', '.join(_FIRST)} and {_LAST}"
"""All supported families, for a sentence."""
_NEEDED = (
    "floe-chat packs a model from its original weights (*.safetensors) or a copy in FP8, FP4, INT8, INT4, AWQ, GPTQ."
)
_HINT = (
    f"{CALLED} models work, and most others with experts that transformers knows; `floe-chat plan` shows which of them "
    "run on this machine."
)

# Formats of converted weights, by what their files and repositories are called.
_FORMATS = (
    (r"gguf|ggml", "GGUF"),
    (r"exl[23]", "EXL2"),
    (r"mlx", "MLX"),
    (r"bnb(-(4|8)bit)?|nf4", "bitsandbytes"),
)
# Methods whose weights are not read, by quant_method in config.json's quantization_config.
_METHODS = {
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
    "torchao": "torchao",
    "hqq": "HQQ",
    "exl3": "EXL3",
}
_PUBLISHED_SO = {"gpt_oss": "mxfp4"}  # families whose original weights are quantized
MODELOPT = "hf_quant_config.json"  # what older versions of it state, with a config.json as of the original
_MODELOPT_FP8 = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8"
_MODELOPT_FP4 = "NVFP4", "W4A16_NVFP4"
# Modules that have 16 bits, in config.json's ways to say it; whether all of attention is among them.
_LEFT_OUT = "modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules"
_ATTENTION = re.compile(r"self_attn(\W*$|\.[qo]_proj)")
_AUTOROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}  # by packing_format
_FORMATS_OF_NUMBERS = {16: "NVFP4", 32: "MXFP4"}  # compressed-tensors' with four bits, by how many share a scale
# Mixture-of-Experts families: model_type, name, and a pattern of their models' names (in lower case, with hyphens for
# all other signs). The first that matches counts.
_FAMILIES = (
    ("qwen3_next", "Qwen3-Next", r"qwen-?3-(coder-)?next"),
    ("qwen3_5_moe_text", "Qwen3.5 MoE", r"qwen-?3-[5-9]-.*a\d+b|qwen-?3-[5-9]-moe"),
    ("qwen3_vl_moe", "Qwen3-VL MoE", r"qwen-?3-vl-.*a\d+b"),
    ("qwen3_omni_moe", "Qwen3-Omni", r"qwen-?3-omni"),
    ("qwen3_moe", "Qwen3 MoE", r"qwen-?3(-.*(a\d+b|moe|30b|235b|480b).*|-coder.*|-max.*)?$"),
    ("qwen2_moe", "Qwen2 MoE", r"qwen-?(1-5|2|2-5)-.*(moe|a\d+)|qwen-?2-moe"),
    ("gpt_oss", "gpt-oss", r"gpt-?oss"),
    ("deepseek", "DeepSeekMoE", r"deepseek-?moe"),
    ("deepseek_v32", "DeepSeek-V3.2", r"deepseek-?v3-2"),
    ("deepseek_v3", "DeepSeek-V3", r"deepseek-?(v3|r1|prover-v2)(?!.*distill)"),
    ("deepseek_v2", "DeepSeek-V2", r"deepseek(-?v2|-coder-v2|$)"),
    ("phimoe", "Phi-3.5-MoE", r"phi-?(3-5-|mini-|tiny-)?moe"),
    ("glm4_moe_lite", "GLM-4.7-Flash", r"glm-?4-7-flash"),
    ("glm4v_moe", "GLM-4.5V", r"glm-?4-[5-9]v(?!-9b)"),
    ("glm4_moe", "GLM-4.5", r"glm-?4-[5-9]"),
    ("gemma4_text", "Gemma 4 MoE", r"gemma-?4-.*a\d+b"),
    ("lfm2_moe", "LFM2 MoE", r"lfm2-.*(a\d+b|moe)"),
    ("granitemoehybrid", "Granite 4", r"granite-?4"),
    ("granitemoe", "Granite MoE", r"granite(-.*(moe|a\d+[bm])|$)"),
    ("ernie4_5_vl_moe", "ERNIE 4.5 VL", r"ernie-.*vl-.*a\d+b"),
    ("ernie4_5_moe", "ERNIE 4.5", r"ernie(-.*a\d+b|$)"),
    ("hunyuan_v1_moe", "Hunyuan MoE", r"hunyuan-.*a\d+b"),
    ("llama4", "Llama 4", r"llama-?4"),
    ("minimax", "MiniMax", r"minimax"),
    ("kimi_k2", "Kimi K2", r"kimi-?k2"),
    ("nemotron_h", "Nemotron MoE", r"nemotron-.*a\d+b"),
    ("dots1", "dots.llm1", r"dots-llm1"),
    ("bailing_moe", "Ling", r"(ling|ring)-(mini|flash|lite|1t)"),
    ("dbrx", "DBRX", r"dbrx"),
    ("grok", "Grok", r"grok-?[12]"),
    ("jamba", "Jamba", r"jamba"),
)
# Of these, what is not run, as far as is known before a config.json is read; derived.py decides about the others.
_NOT_YET = ("qwen3_omni_moe", "ernie4_5_vl_moe", "llama4", "kimi_k2", "bailing_moe", "dbrx", "grok")
_DENSE = re.compile(
    r"(tiny-?)?llama-?[123]?(-|$)|mistral-(7b|nemo|small|large)|gemma(-?[1-3])?(-|$)|phi-?[1-4](-|$)"
    r"|qwen-?(1-5|2|2-5|3)-.*\d+b(-|$)|gpt-?2(-|$)|falcon|smollm|olmo-?[123]?(-|$)|vicuna|yi-\d+b|deepseek-.*distill"
)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


def refused(name: str) -> FloeError | None:
    """Why a model of this name cannot be used; None if the name does not say.

    `name` may be a hub id, a file, or what a person calls the model. A name with "mixtral", "olmoe" or something like
    "8x7b" in it is refused for its format alone: only config.json says what such a model is.
    """
    if (format_ := refused_format(name)) is not None:
        return format_
    key = _key(name)
    if re.search(r"mixtral|olmoe|\d+x\d+(-\d+)?b", key):
        return None
    kind, called = _family(key)
    if kind in _NOT_YET:
        return UsageError(*_not_yet(called))
    if kind:
        return None
    return UsageError(*_no_experts(name)) if _DENSE.match(key) else None


def refused_format(name: str) -> FloeError | None:
    """Why a file or repository of this name cannot be read: its name ends in that of a format, such as EXL2.

    A repository of GGUF files can be read, and a file by its path; a name that is neither cannot.
    """
    key = _key(name)
    if re.search(r"(^|-)floe(-|$)", key):  # a pack of ours, which may name its bits
        return None
    for pattern, called in _FORMATS:
        if not re.search(rf"(^|-)({pattern})(-|$)", key):
            continue
        if called == "GGUF":
            return None if _is_repository(name) else _refused_gguf(name)
        return UsageError(f"{called} cannot be read yet", f"{name}: {_NEEDED}", _original(key))
    return None


def _is_repository(name: str) -> bool:
    """Whether a name is owner/name on a hub, or an address of it."""
    try:
        return hub_repo(name) is not None and not is_file(name) and not re.fullmatch(r"(?i)[^/]*/[^/]*\.gguf", name)
    except UsageError:
        return False


def _refused_gguf(name: str) -> FloeError:
    """A name of GGUF files where a pack is needed, or where there is no such file."""
    hint = "Give a repository with GGUF files (OWNER/NAME-GGUF:Q6_K), or the path of a downloaded file."
    if is_file(name):
        title = f"{config_limits.shown(name)} is not set up on this machine"
        return UsageError(title, "A file is packed first.", f"Set it up: floe-chat setup {shlex.quote(name)}")
    return UsageError(f"There is no GGUF file {config_limits.shown(name)}", "", hint)


def called_so(name: str) -> str:
    """The supported family that a model belongs to by its name, as people call it; "" if the name does not say."""
    kind, called = _family(_key(name))
    return called if kind in FAMILIES else ""


def refused_type(fields: Mapping[str, Any], what: str) -> FloeError | None:
    """Why a model with this config.json cannot be used, or None if it can. `what` names the model.

    The reason is the family, code that comes with the model, or quantized weights.
    """
    language = language_fields(fields)
    kind = language.get("model_type")
    if isinstance(kind, str) and kind in SUPPORTED:
        if cause := family_of(kind).refused(language):
            return CheckpointError(f"{what} is not a model that floe-chat supports", cause, _HINT)
        return _refused_weights(fields, what)
    called = next((called for known, called, _ in _FAMILIES if known == kind), None)
    experts = any(type(count := _field(fields, name)) is int and count > 1 for name in _COUNTS)
    cause = f"{what}: its model_type is {kind!r}."
    if not isinstance(kind, str) or not kind:
        title, hint = f"{what} does not describe a model", "Download config.json again."
    elif called is None and not experts:
        title, _, hint = _no_experts(what)
    elif not _in_transformers(kind):
        title, _, hint = _not_yet(called or f"A model of type {kind!r}")
        if fields.get("auto_map"):
            title = f"{what} needs code of its own, which floe-chat never runs"
            cause = f"Its model_type {config_limits.shown(kind)} is not part of transformers."
    else:
        try:
            fit(configured(language))
            return _refused_weights(fields, what)
        except UnfitError as error:
            title, _, hint = _not_yet(called or f"A model of type {kind!r}")
            cause = f"{what}: its model_type is {kind!r}; {error}."
    return CheckpointError(title, cause, hint)


class Quantization(NamedTuple):
    """What config.json says of rounded weights that can be read.

    Attributes:
        stated: its `quantization_config`. called: such as "FP8" or "AWQ, 4 bits". bits: of a weight, with its scales.
        dense: bits of those outside experts, but for embedding, head and routers.
    """

    stated: Mapping[str, Any]
    called: str
    bits: float

    @property
    def code_bits(self) -> int:
        """Of its codes, where they may be kept: neighbours share a scale, in groups that a pack's divide; else 0."""
        weights = [
            _mapping(_mapping(group).get("weights")) for group in _mapping(self.stated.get("config_groups")).values()
        ]
        found = [[each.get(key) for key in ("num_bits", "group_size", "actorder", "type")] for each in weights]
        if self.stated["quant_method"] in ("awq", "gptq"):
            bits, size = _bits_and_group(self.stated)
            found = [[bits, size, self.stated.get("desc_act"), "int"]]
        if len(found) != 1:
            return 0
        (bits, size, order, kind), *_ = found
        fits = size is None or (type(size) is int and (size == -1 or (size > 0 and size % GROUP == 0)))
        return bits if fits and kind == "int" and not order and type(bits) is int and bits in (2, 4) else 0

    @property
    def dense(self) -> float:
        groups = [_mapping(group) for group in _mapping(self.stated.get("config_groups")).values()]
        targets, left_out = _names(groups, "targets"), _names([self.stated], *_LEFT_OUT)
        experts_alone = bool(targets) and all("experts" in name for name in targets)
        return 16.0 if experts_alone or any(map(_ATTENTION.search, left_out)) else self.bits


def quantization(fields: Mapping[str, Any]) -> Quantization | None:
    """How weights were rounded that `quantized.py` reads; None where they were not.

    Raises:
        ValueError: they were, in a way that is not read; the message says which.
    """
    stated = _field(fields, "quantization_config") or _field(fields, "compression_config")
    if not stated and not _field(fields, "quantization"):
        return None
    if not stated:
        raise ValueError("MLX")
    if not isinstance(stated, Mapping):
        raise ValueError("quantized")
    method = stated.get("quant_method")
    if method in ("auto-round", "intel/auto-round"):
        method = _AUTOROUND.get(str(stated.get("packing_format", "auto_round:auto_gptq")))
        if method is None or stated.get("data_type", "int") != "int":
            raise ValueError("AutoRound")
        stated = {**stated, "quant_method": method}
    if method == _PUBLISHED_SO.get(str(language_fields(fields).get("model_type"))):
        return None
    if method in ("fp8", "fbgemm_fp8"):
        return Quantization(stated, "FP8", 8.0)
    if method in ("awq", "gptq"):
        bits, group = _bits_and_group(stated)
        called = f"{str(method).upper()}, {bits} bits" if type(bits) is int else str(method).upper()
        if bits not in ((4,) if method == "awq" else (2, 4, 8)) or str(stated.get("version", "gemm")).lower() != "gemm":
            raise ValueError(called)
        return Quantization(stated, called, bits + (16 + bits) / (group if type(group) is int and group > 0 else 4096))
    if method == "compressed-tensors":
        return _compressed(stated)
    if method == "modelopt":
        return _modelopt(stated)
    if method == "quark":
        return _quark(stated)
    raise ValueError(_METHODS.get(method, config_limits.shown(method)) if isinstance(method, str) else "quantized")


def _bits_and_group(stated: Mapping[str, Any]) -> tuple[Any, Any]:
    """Of AWQ and GPTQ, by either name."""
    return stated.get("bits") or stated.get("w_bit"), stated.get("group_size") or stated.get("q_group_size")


def _compressed(stated: Mapping[str, Any]) -> Quantization:
    """What compressed-tensors states for each group of layers."""
    called, most = list[str](), 0.0
    groups: Any = stated.get("config_groups")
    sparsity: Any = stated.get("sparsity_config") or {}
    if sparsity and sparsity.get("format") != "dense":
        raise ValueError("sparse compressed-tensors")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights: Any = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        bits: Any = weights.get("num_bits")
        kind, size = weights.get("type"), weights.get("group_size")
        name = f"{'FP' if kind == 'float' else 'INT'}{config_limits.shown(bits)}"
        if kind == "float" and bits == 4:
            name = _FORMATS_OF_NUMBERS.get(size, name) if type(size) is int else name
        if name not in ("FP8", "INT8", "INT4", "INT2", *_FORMATS_OF_NUMBERS.values()):
            raise ValueError(f"compressed-tensors' {name}")
        most = max(most, bits + ((8 if kind == "float" else 16) / size if type(size) is int and size > 0 else 0))
        called += [name] if name not in called else []
    if not called:
        raise ValueError("compressed-tensors")
    return Quantization(stated, " and ".join(called), most)


def _modelopt(stated: Mapping[str, Any]) -> Quantization:
    """What NVIDIA's ModelOpt states, of all weights or layer by layer."""
    layers: Any = stated.get("quantized_layers")
    listed = {name: layer.get("quant_algo") for name, layer in _mapping(layers).items() if isinstance(layer, Mapping)}
    algorithms = {
        name: str(algorithm).upper() for name, algorithm in (listed or {"": stated.get("quant_algo")}).items()
    }
    if other := sorted({*algorithms.values()} - {*_MODELOPT_FP8, *_MODELOPT_FP4}):
        raise ValueError(f"ModelOpt's {config_limits.shown(other[0])}")
    kinds = {name: "FP8" if algorithm in _MODELOPT_FP8 else "NVFP4" for name, algorithm in algorithms.items()}
    of_experts = {kind for name, kind in kinds.items() if "experts" in name} or {*kinds.values()}
    return Quantization(stated, " and ".join(sorted({*kinds.values()})), 8.0 if "FP8" in of_experts else 4.5)


def _quark(stated: Mapping[str, Any]) -> Quantization:
    """What AMD's Quark states, of all weights and of some layers."""
    called, most = list[str](), 0.0
    for each in (stated.get("global_quant_config"), *_mapping(stated.get("layer_quant_config")).values()):
        weight = _mapping(_mapping(each).get("weight"))
        if not weight:
            continue
        kind, scales, size = weight.get("dtype"), weight.get("scale_format"), weight.get("group_size")
        known = {"fp8_e4m3": ("FP8", 8.0)} | ({"fp4": ("MXFP4", 4.25)} if (scales, size) == ("e8m0", 32) else {})
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(f"Quark's {config_limits.shown(kind)}")
        name, bits = known[kind]
        called, most = [*called, *({name} - {*called})], max(most, bits)
    if not called:
        raise ValueError("Quark")
    return Quantization(stated, " and ".join(sorted(called)), most)


def _names(where: Iterable[Mapping[str, Any]], *keys: str) -> list[str]:
    lists = [each.get(key) for each in where for key in keys]
    return [name for found in lists if isinstance(found, list) for name in found if isinstance(name, str)]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def with_modelopts(fields: Mapping[str, Any], beside: Any) -> Mapping[str, Any]:
    """A config.json that says nothing of rounding, with what the file `MODELOPT` next to it says."""
    said = _mapping(_mapping(beside).get("quantization"))
    if not said or _field(fields, "quantization_config"):
        return fields
    return {**fields, "quantization_config": {**said, "quant_method": "modelopt"}}


def _refused_weights(fields: Mapping[str, Any], what: str) -> FloeError | None:
    """Why weights that config.json calls quantized cannot be packed."""
    try:
        quantization(fields)
    except ValueError as error:
        return CheckpointError(f"{what} has {error} weights, which cannot be read yet", _NEEDED, _original(_key(what)))
    return None


def _in_transformers(kind: str) -> bool:
    from .transformers_import import import_library

    import_library()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return kind in CONFIG_MAPPING_NAMES


def _key(name: str) -> str:
    """The last part of a name in lower case, with a hyphen for each run of other signs."""
    return re.sub(r"[^a-z0-9]+", "-", name.rstrip("/").rpartition("/")[2].lower()).strip("-")


def _family(key: str) -> tuple[str, str]:
    """model_type and name of the family that a name belongs to; both "" if it does not say."""
    return next(((kind, called) for kind, called, pattern in _FAMILIES if re.match(pattern, key)), ("", ""))


def _original(key: str) -> str:
    """The hint of an error about converted weights: the repository that they probably come from."""
    repos = (entry.repo for family in FAMILIES.values() for entry in family.published if entry.repo)
    whole = max((repo for repo in repos if key.startswith(_key(repo))), key=len, default="")
    if whole:
        return f"Use the original, {whole}."
    return "Name the repository that it was converted from, such as mistralai/Mixtral-8x7B-Instruct-v0.1."


def _field(fields: Mapping[str, Any], name: str) -> Any:
    """A field of the configuration, or of the text part of one that also sees or hears."""
    inner = fields.get("text_config")
    return fields.get(name, inner.get(name) if isinstance(inner, Mapping) else None)


def _not_yet(called: str) -> tuple[str, str, str]:
    return f"{called} is not supported yet", "", _HINT


def _no_experts(name: str) -> tuple[str, str, str]:
    return f"{name} is not a Mixture-of-Experts model", "floe-chat runs only models with experts.", _HINT


def sizes(fields: Mapping[str, Any], what: str) -> Sizes:
    """The architecture of a config.json; `what` names it in errors.

    Raises:
        CheckpointError: its family is not supported, it has no experts, or its values make no sense.
    """
    if (error := refused_type(fields, what)) is not None:
        raise error
    fields = language_fields(fields)
    kind = str(fields["model_type"])

    def number(*names: str) -> None:
        value = next((fields[name] for name in names if fields.get(name) is not None), None)
        if cause := config_limits.out_of_range(names[0], value):
            raise _no_model(what, cause)

    family = family_of(kind)
    if isinstance(family, Derived):
        try:
            return sizes_of(family, configured(fields))
        # A module may lack whatever others have.
        except (TypeError, ValueError, AttributeError, StopIteration) as error:
            raise _no_model(what, f"{error}.") from error
    needed = ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers", family.width)
    for called in (*((name,) for name in needed), *NAMES.values()):
        number(*called)
    config = view(family, fields)
    values = {name: getattr(config, name) for name in config_limits.SIZES if getattr(config, name) is not None}
    values["use_sliding_window"] = config.use_sliding_window
    if cause := config_limits.problem(config_limits.in_force(values, family.defaults)):
        raise _no_model(what, cause)
    try:
        found = sizes_of(family, config)
    except (TypeError, ValueError, AttributeError) as error:  # fields of other types than numbers
        raise _no_model(what, f"{error}.") from error
    if not found.layers:
        raise _no_model(what, "None of its layers has experts.")
    return found


def _no_model(what: str, cause: str) -> CheckpointError:
    return CheckpointError(f"{what} does not describe a model", cause, "Download config.json again.")
