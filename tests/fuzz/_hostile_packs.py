"""Changes that an enemy would make to a pack's weights, headers, manifest, configuration, tokenizer and template."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from . import _hostile, _hostile_chat

_FLOATS = {"F16": ("<e", 2), "F32": ("<f", 4), "BF16": ("", 2)}
_VALUES = (float("nan"), float("inf"), float("-inf"), 65504.0, -65504.0, 3e38, 1e-8, 0.0, -0.0, 1.0)


@dataclass
class Made:
    """A good pack: its files' contents and its manifest's fields."""

    folder: Path
    files: dict[str, bytes]
    manifest: dict[str, Any]

    @property
    def tables(self) -> Made:
        """The same with the files of tables alone (models/pack/table.py)."""
        return replace(self, files={name: content for name, content in self.files.items() if name.startswith("table")})


Changed = dict[str, bytes | Path | None]
"""Files by name: another content, a link that leads elsewhere, or none."""
Change = Callable[[Random, Made, Changed, Any], None]


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _tensor_file(rng: Random, made: Made, changed: Changed) -> tuple[str, dict[str, Any], bytearray]:
    name = rng.choice([name for name in made.files if name.endswith(".safetensors")])
    content = changed.get(name)
    try:
        header, data = _split(content if isinstance(content, bytes) else made.files[name])
    except ValueError:
        header, data = _split(made.files[name])
    return name, header, bytearray(data)


def _join(header: dict[str, Any], data: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def _weights(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
    """Values of one tensor, some or all, become special ones or noise."""
    name, header, data = _tensor_file(rng, made, changed)
    tensors = [key for key, entry in header.items() if isinstance(entry, dict) and "data_offsets" in entry]
    if not tensors:  # another change has taken them
        return
    entry = header[rng.choice(tensors)]
    try:
        begin, end = (max(0, min(at, len(data))) for at in entry["data_offsets"])  # which may be anything by now
        form, size = _FLOATS.get(str(entry["dtype"]), ("", 1))
        kind = rng.randrange(3)
        if kind == 0:
            data[begin:end] = rng.randbytes(end - begin)
            raw = b""
        elif form and kind == 1:
            value = rng.choice(_VALUES)
            raw = struct.pack(form, max(-65504.0, min(65504.0, value)) if form == "<e" and abs(value) < 1e39 else value)
        else:
            raw = rng.choice((b"\x00", b"\xff", b"\x7f\x80", b"\x80\x7f", rng.randbytes(4)))[:size] or b"\0"
            raw = raw * (size // len(raw))
        if raw and rng.random() < 0.5:
            data[begin:end] = raw * ((end - begin) // len(raw)) + bytes((end - begin) % len(raw))
        elif raw and end - begin >= len(raw):
            at = begin + len(raw) * rng.randrange((end - begin) // len(raw))
            data[at : at + len(raw)] = raw
    except (TypeError, ValueError, KeyError):
        return  # an earlier change left nothing to change here
    changed[name] = _join(header, bytes(data))


def _header(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
    name, header, data = _tensor_file(rng, made, changed)
    if not header:  # another change has taken all of it
        return
    key = rng.choice(list(header))
    entry = header[key]
    match rng.randrange(9):
        case 0:
            del header[key]
        case 1:
            header[rng.choice(_hostile.NAMES)] = entry
        case 2 if isinstance(entry, dict):
            entry["dtype"] = rng.choice(("F64", "I8", "BOOL", "F8_E4M3", "U8", "F32", "F16", "BF16", "I64", "X", 7))
        case 3 if isinstance(entry, dict) and entry.get("shape"):
            entry["shape"] = rng.choice(
                ([], [0], entry["shape"][::-1], [1, *entry["shape"]], [2**62, 4], [-1], entry["shape"][:-1])
            )
        case 4 if isinstance(entry, dict):
            entry["data_offsets"] = rng.choice(([0, 0], [0, len(data)], [2**63, 2**64 - 1], [len(data), 0], [5, 9], []))
        case 5:
            header = _hostile.altered(rng, header, rng.choice((1, 3)))
        case 6:
            changed[name] = rng.choice((2, 100, 2**32, 2**63, 2**64 - 1)).to_bytes(8, "little") + made.files[name][8:]
            return
        case 7:
            changed[name] = _hostile.damaged(rng, made.files[name])
            return
        case _:
            data = data[: rng.randrange(len(data) + 1)] + bytes(rng.choice((0, 1, 64)))
    changed[name] = _join(header, bytes(data))


def _resized(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
    """A tensor that is shorter, longer or of another type, with a header that agrees."""
    name, header, data = _tensor_file(rng, made, changed)
    tensors = {key: entry for key, entry in header.items() if key != "__metadata__"}
    sound = all(isinstance(entry, dict) and len(entry.get("data_offsets", ())) == 2 for entry in tensors.values())
    if not sound or not tensors:
        return
    parts = {key: bytes(data[entry["data_offsets"][0] : entry["data_offsets"][1]]) for key, entry in tensors.items()}
    key = rng.choice(list(tensors))
    entry = tensors[key]
    shape, raw = list(entry["shape"]), parts[key]
    match rng.randrange(4):
        case 0 if shape and shape[0] > 1 and len(raw) % shape[0] == 0:
            parts[key] = raw[: len(raw) // shape[0] * (shape[0] - 1)]
            entry["shape"] = [shape[0] - 1, *shape[1:]]
        case 1 if shape and shape[0] and len(raw) % shape[0] == 0:
            parts[key] = raw + raw[: len(raw) // shape[0]]
            entry["shape"] = [shape[0] + 1, *shape[1:]]
        case 2:
            parts[key], entry["shape"] = b"", [0, *shape[1:]]
        case _:
            entry["shape"] = [len(raw)]
            entry["dtype"] = "U8"
    end = 0
    for name_of, part in parts.items():
        tensors[name_of]["data_offsets"] = [end, end + len(part)]
        end += len(part)
    changed[name] = _join(header, b"".join(parts.values()))


def _manifest(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
    again = _hostile.altered(
        rng, {key: value for key, value in fields.items() if key != "sha256"}, rng.choice((1, 1, 2))
    )
    if isinstance(again, dict):
        fields.clear()
        fields.update(again)


def _named(name: str, kinds: tuple[Any, ...]) -> Change:
    """A change of the fields of a JSON file, by values that such a field may have or by any."""

    def change(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
        try:
            good = json.loads(made.files.get(name, b"{}") if type(had := changed.get(name)) is not bytes else had)
        except (ValueError, RecursionError):
            return
        if rng.random() < 0.15:
            changed[name] = _hostile.text(rng, good)
            return
        if isinstance(good, dict) and kinds and rng.random() < 0.7:
            for _ in range(rng.choice((1, 1, 2))):
                key, values = rng.choice(kinds)
                good[key] = rng.choice((*values, *_hostile.NUMBERS)) if rng.random() < 0.9 else _hostile.value(rng)
        else:
            good = _hostile.altered(rng, good, rng.choice((1, 2)))
        changed[name] = json.dumps(good).encode()

    return change


_CONFIG = (
    ("hidden_size", (16, 33, 64, "32")),
    ("intermediate_size", (16, 31)),
    ("num_hidden_layers", (1, 3)),
    ("num_attention_heads", (1, 2, 3, 8, 32)),
    ("num_key_value_heads", (1, 2, None)),
    ("num_local_experts", (2, 8)),
    ("num_experts", (2, 8)),
    ("num_experts_per_tok", (1, 4)),
    ("vocab_size", (1, 2, 258, 300)),
    ("head_dim", (2, 4, 7, 1 << 20, None)),
    ("max_position_embeddings", (2, 3, 20, 60, 1 << 24)),
    ("sliding_window", (1, 2, 1 << 29)),
    ("rms_norm_eps", (0.0, 1e-30, 1e-5, 1.0)),
    ("clip_qkv", ("x", 1e-6, 8, 1e6)),
    ("hidden_act", ("gelu", "silu", [])),
    ("tie_word_embeddings", (True, None)),
    ("attention_bias", (True,)),
    ("norm_topk_prob", (True, False)),
    ("rope_theta", (1.0, 1e15, "x")),
    (
        "rope_parameters",
        (
            {"rope_type": "linear", "factor": 0},
            {"rope_type": "yarn", "factor": 2.0},
            {"rope_type": "llama3"},
            {"rope_theta": 1e400, "rope_type": "default"},
            {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            [],
            "x",
        ),
    ),
    (
        "rope_scaling",
        ({"type": "linear", "factor": 2.0}, {"type": "yarn", "factor": -1.0}, {"rope_type": "longrope"}, 7),
    ),
    ("partial_rotary_factor", (0.5, 0.0)),
    ("layer_types", (["full_attention"] * 2, [], ["x"])),
    ("model_type", ("mixtral", "olmoe", "llama", "qwen3_moe", [])),
    ("auto_map", ({"AutoConfig": "x.Y"},)),
    ("eos_token_id", (2, [2, 7], [], -1, "x")),
    ("torch_dtype", ("float16", "x")),
)
_GENERATION = (
    ("do_sample", (True,)),
    ("temperature", (0, 0.5, 1e9, -1)),
    ("top_k", (0, 1, 10**30, 1.5)),
    ("top_p", (0, 0.5, 1, 7)),
    ("min_p", (0, 0.5, 1, 7)),
    ("repetition_penalty", (0, 1.1, 1e9)),
    ("eos_token_id", (2, [2, 7], -1, [2**70])),
)
_WORDS = ("eos_token", "bos_token", "unk_token", "pad_token", "cls_token", "extra_token", "extra_special_tokens")
_TOKENIZER_CONFIG = (
    *((name, ("<s>", "", "x" * 3000, None, {"content": "<s>"}, {"content": 7}, ["<s>"])) for name in _WORDS),
    ("added_tokens_decoder", ({}, {"2": {"content": "</s>"}}, [])),
    ("chat_template", ([{"name": "default", "template": "{{ 1 }}"}], {"default": 7}, {"x": "y"}, [], [1], 7, "")),
    ("tokenizer_class", ("PreTrainedTokenizerFast", "LlamaTokenizer", "Nobody", 7)),
)


def _tokenizer(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
    good = json.loads(made.files["tokenizer.json"])
    if rng.random() < 0.7:
        changed["tokenizer.json"] = json.dumps(_hostile_chat.tokenizer(rng, good)).encode()
    else:
        changed["tokenizer.json"] = _hostile.text(rng, good)


def _template(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
    good = json.loads(made.files["tokenizer_config.json"])
    source = _hostile_chat.template(rng, str(good["chat_template"]))
    if rng.random() < 0.5:
        changed["chat_template.jinja"] = source.encode("utf-8", "surrogatepass")
    else:
        changed["tokenizer_config.json"] = json.dumps(good | {"chat_template": source}).encode()


def _any_file(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
    name = rng.choice(list(made.files))
    kind = rng.randrange(6)
    changed[name] = None if kind == 0 else b"" if kind == 1 else _hostile.damaged(rng, made.files[name])


CHANGES: tuple[Change, ...] = (
    _weights,
    _weights,
    _weights,
    _header,
    _header,
    _resized,
    _manifest,
    _manifest,
    _named("config.json", _CONFIG),
    _named("config.json", _CONFIG),
    _named("generation_config.json", _GENERATION),
    _named("tokenizer_config.json", _TOKENIZER_CONFIG),
    _named("special_tokens_map.json", _TOKENIZER_CONFIG),
    _tokenizer,
    _tokenizer,
    _template,
    _template,
    _any_file,
)


def _of_tables(change: Change) -> Change:
    return lambda rng, made, changed, fields: change(rng, made.tables, changed, fields)


def _exchanged(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
    """Another file, or a link that leads out of the pack, in the place of a table or as one more."""
    names = list(made.tables.files)
    name = rng.choice((*names, "table_02.safetensors", "table_.safetensors", "table_0000000001.safetensors"))
    other = rng.choice((*names, *names, *made.files))
    links = made.folder / other, made.folder, Path("/dev/zero"), Path("/proc/self/mem"), Path("nowhere")
    changed[name] = rng.choice(links) if rng.random() < 0.4 else made.files[other]


def _stated(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
    """What the manifest states of a table that is as it was."""
    name, files = rng.choice(list(made.tables.files)), fields.get("files")
    if isinstance(files, dict):
        files[name] = _hostile.altered(rng, made.manifest["files"][name], rng.choice((1, 2)))


def _hashes(rng: Random, made: Made, changed: Changed, fields: Any) -> None:
    """Numbers by which n-grams become rows."""
    name, header, data = _tensor_file(rng, replace(made, files={_DENSE: made.files[_DENSE]}), changed)
    entry = header.get(rng.choice([key for key in header if ".ple_embedding." in key] or [""]))
    if isinstance(entry, dict) and isinstance(places := entry.get("data_offsets"), list) and len(places) == 2:
        at = places[0] + 8 * rng.randrange(max(1, (places[1] - places[0]) // 8))
        data[at : at + 8] = struct.pack("<q", rng.choice((0, 1, -1, -3, 7, 399, 400, 1 << 31, 1 << 62, -(1 << 63))))
        changed[name] = _join(header, bytes(data))


_DENSE = "dense.safetensors"
_NGRAMS = (
    ("ngram_size", (2, 4, 8, 1 << 20)),
    ("heads_per_ngram", (1, 3, 64, 1 << 20)),
    ("ngram_vocab_size_base", (1, 2, 49, 51, 1 << 26, 1 << 40)),
    ("make_ngram_vocab_size_divisible_by", (0, 1, 401, -7, 1 << 24, -(1 << 24))),
    ("ple_layer_ids", ([], [1], [2], [2, 1], [1, 2, 3], [1] * 9, [0], [1 << 40], list(range(1, 1000)))),
    ("ple_embed_dim", (4, 16, 64, 1 << 24, 1 << 40)),
    ("ple_conv_kernel_size", (0, 1, 5, 1 << 24)),
    ("layer_types", (["linear_attention"] * 3, ["linear_attention"] * 1000, ["full_attention"] * 3)),
    ("num_hidden_layers", (1, 2, 1000)),
    ("split_ngram_parts", (0, 2, 1 << 40)),
    ("eos_token_id", (None, [], [2, 7], -1, 1 << 62, 2.5)),
    ("seed", (0, -1, 1 << 62, 1 << 70)),
    ("vocab_size", (1, 2, 299, 1 << 21)),
    ("hc_count", (1, 2, 1 << 20)),
)
TABLES: tuple[Change, ...] = (
    *map(_of_tables, (_weights, _header, _header, _resized, _any_file)),
    _exchanged,
    _exchanged,
    _stated,
    _hashes,
    _hashes,
    _named("config.json", _NGRAMS),
    _named("config.json", _NGRAMS),
)
"""Changes of a pack with tables."""
