"""Checking a packed model: every byte against the manifest, every tensor for sense, and its values against the source.

Packs store neurons in their own order (pack_experts.py), so before an expert is compared, each of its neurons is
matched with the source's nearest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...kernels.activation import beside
from ...kernels.layouts import VectorLayout
from ..checkpoint import Checkpoint, read_config
from ..errors import CheckpointError, FloeError, NoTemplateError, PackError, UsageError
from ..families import family_of
from ..modules import assistant_modules, library_model
from ..pack import assistant, draft_head, quantized_linears
from ..pack.assistant import PackedAssistant
from ..pack.manifest import DRAFT, FILE_NAME, FRONTIER, FileEntry, Manifest, file_entry, layer_file
from ..pack.packed_model import PackedLayer, PackedModel
from ..pack.table import put
from ..tokenizer.chat_process import ChatProcess, largest_token

# Relative RMS error that quantization to a width may have: 1.5 to 3 times that of uniformly or normally distributed
# weights in groups of 64; another model's weights differ by 1.4.
LIMITS = {16: 0.005, 8: 0.02, 4: 0.2, 3: 0.35, 2: 0.7}
_COLUMNS = 64  # of gate, up and down each, by which a neuron is matched
_TABLE_ROWS = 1 << 16  # of a table, looked through at a time
_ROWS = 1024  # neurons matched at a time: E x F distances would take 800 MB
# Files read together with a file, which can be checked only if these are intact.
_READ_WITH = {
    "dense.safetensors": ("config.json",),
    "tokenizer.json": (
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ),
}
Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged file of a pack, and what is wrong with it."""

    file: str
    cause: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A matrix compared with the source's: the relative RMS of the difference, and the limit for its width."""

    name: str
    bits: int
    error: float
    limit: float

    @property
    def good(self) -> bool:
        return self.error <= self.limit


def damages(folder: Path, manifest: Manifest, report: Report) -> list[Damage]:
    """Every damaged file of a pack, read from end to end; empty if it is intact.

    Args:
        report: called with a step in words and the share done, 0..1.
    """
    whole = max(1, sum(entry.size for entry in manifest.files.values()))
    causes: dict[str, str] = {}
    done = 0
    for name, entry in manifest.files.items():
        report(f"Checking {name}", done / whole)
        if (cause := _changed(folder / name, entry)) is not None:
            causes[name] = cause
        done += entry.size
    for name in manifest.files:
        if not causes.keys() & {name, *_READ_WITH.get(name, ())}:
            report(f"Looking through {name}", 1.0)
            if (cause := _senseless(folder, manifest, name)) is not None:
                causes[name] = cause
    for name, entry in manifest.beside.items():
        if (cause := _changed(folder / name, entry)) is not None:
            again = "`floe-chat verify --repair`" if name == DRAFT else "`floe-chat tune`"
            causes[name] = f"{cause} The model runs without it; {again} writes it again."
        elif name == DRAFT and not causes.keys() & {"config.json"} and (cause := _bad_draft(folder, manifest)):
            causes[name] = f"{cause} The model runs without it."
    return [Damage(name, causes[name]) for name in (*manifest.files, *manifest.beside) if name in causes]


def senseless(folder: Path, manifest: Manifest, report: Report) -> Damage | None:
    """The first file of a pack with impossible values. The files have the manifest's hashes; it need not be written."""
    whole = max(1, sum(entry.size for entry in manifest.files.values()))
    done = 0
    if DRAFT in manifest.beside and (cause := _bad_draft(folder, manifest)) is not None:
        return Damage(DRAFT, cause)
    for name, entry in manifest.files.items():
        report(f"Looking through {name}", done / whole)
        if (cause := _senseless(folder, manifest, name)) is not None:
            return Damage(name, cause)
        done += entry.size
    return None


def unrecorded(folder: Path, manifest: Manifest) -> list[str]:
    """The files of a pack without a recorded checksum (from earlier versions), in which damage cannot be detected."""
    kept = [] if manifest.sealed else [FILE_NAME]
    return kept + ([FRONTIER] if FRONTIER not in manifest.beside and (folder / FRONTIER).exists() else [])


def compare(packed: PackedModel, source: Checkpoint, layers: Sequence[int], report: Report) -> list[Compared]:
    """The matrices of some layers, and the head, compared with those of the source.

    Raises:
        CheckpointError: the source cannot be read, or has other sizes.
    """
    a = packed.manifest.architecture
    hidden = source.family.expert_hidden(source.config)
    sizes = (len(source.layers), source.experts, hidden, source.neurons)
    if sizes != (a.layers, a.experts, a.hidden, a.intermediate):
        raise CheckpointError(
            f"{source.folder} is not the source of this pack",
            "Its sizes differ.",
            "Give the checkpoint that this pack was made from.",
        )
    found: list[Compared] = []
    for index, layer in enumerate(layers):
        stored = packed.layer(layer)
        for expert in range(a.experts):
            share = (index + expert / a.experts) / len(layers)
            report(f"Comparing expert {expert + 1} of layer {layer + 1}", share)
            found += _compare_expert(stored, source, layer, expert)
    return found + list(_compare_dense(packed, source, layers))


def _changed(path: Path, entry: FileEntry) -> str | None:
    try:
        if not path.is_file():
            return "It is missing."
        if (size := path.stat().st_size) != entry.size:
            return f"It has {size:,} bytes instead of {entry.size:,}."
        return None if file_entry(path).sha256 == entry.sha256 else "Its content has changed: the sha256 differs."
    except OSError as error:
        return f"It cannot be read: {error.strerror or error}."


def _senseless(folder: Path, manifest: Manifest, name: str) -> str | None:
    """Impossible values in a file whose hash is right: it was packed wrongly, or changed and sealed again."""
    packed = PackedModel(folder, manifest)
    try:
        match name:
            case "dense.safetensors":
                return _bad_dense(packed)
            case "profile.safetensors":
                packed.profile()
                if packed.has_lookahead():
                    packed.lookahead()
            case "config.json":
                read_config(folder)
            case "tokenizer.json":
                return _bad_chat(folder)
            case _ if name in manifest.tables:
                return _bad_table(folder, manifest, name)
            case _ if name.startswith("layer_"):
                layers = {layer_file(layer): layer for layer in range(manifest.architecture.layers)}
                return _bad_layer(packed.layer(layers[name]))
            case _:
                pass
    except FloeError as error:
        return error.cause or error.title
    return None


def _bad_chat(folder: Path) -> str | None:
    """What is wrong with the tokenizer and the chat template, tried on a first message."""
    config = read_config(folder)
    number, text = largest_token(folder)
    if number >= config.vocab_size:
        return f"It has a token {number:,} ({text[:40]!r}); the model has {config.vocab_size:,} tokens."
    try:
        chat = ChatProcess(folder)
    except NoTemplateError:
        return None
    except PackError as error:
        return f"{error.title}. {error.cause}"
    try:
        chat.fit([{"role": "user", "content": "Hello"}], int(config.max_position_embeddings or 4096))
    except PackError as error:
        return f"{error.title}. {error.cause}"
    except UsageError:
        return None  # a template may ask for more than one message
    finally:
        chat.close()
    return None


def _bad_layer(layer: PackedLayer) -> str | None:
    signal, rows = layer.signal.layout, layer.rows.layout
    for expert, data in enumerate(layer.rows.data):
        halves = {
            beside(rows.signal): (data[:, : rows.other.nbytes], rows.other),
            "down": (data[:, rows.down_at : rows.down_at + rows.down.nbytes], rows.down),
        }
        numbers = {part: _numbers(raw, layout, rows.float16) for part, (raw, layout) in halves.items()}
        if signal.vector.bits == 16:
            numbers[rows.signal] = layer.signal.q[expert].view(signal.float16)
        else:
            numbers[rows.signal] = torch.cat([layer.signal.scale[expert], layer.signal.zero[expert]])
        for part, values in numbers.items():
            if not bool(values.isfinite().all()):
                return f"{part} of expert {expert} has infinite or NaN scales or values."
    return None


def _numbers(raw: Tensor, layout: VectorLayout, float16: torch.dtype) -> Tensor:
    """The floating-point part of stored vectors (N, nbytes): scales and zeros, or the values at 16 bit."""
    if layout.bits == 16:
        return raw.contiguous().view(float16)
    return torch.cat(layout.scales(raw), 1)


def _bad_dense(packed: PackedModel) -> str | None:
    manifest, dense = packed.manifest, packed.dense()
    config = read_config(packed.folder)
    model = library_model.empty(config, torch.bfloat16)
    family = family_of(manifest.architecture.model_type)
    for block in family.blocks(model):
        block.experts = nn.Identity()
    put(model, {table.name: nn.Identity() for table in library_model.tables_in(config, manifest)})
    weights = library_model.with_head(config, family, dense)
    bits = manifest.widths.dense
    library_model.furnish(
        model, "", family, weights, bits, lambda _weights, _bias: nn.Identity(), torch.bfloat16, "meta"
    )
    for name, tensor in dense.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return f"{name} has infinite or NaN values."
    return None


def _bad_draft(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the drafting head, whose hash is right."""
    family = manifest.family
    try:
        head = draft_head.load(folder, manifest)
        if isinstance(head, PackedAssistant):
            return _bad_assistant(head, manifest)
        model = library_model.empty(head.config, torch.bfloat16)
        for block in family.blocks(model):
            block.experts = nn.Identity()
        model.model.embed_tokens = model.lm_head = nn.Identity()
        bits = manifest.widths.dense
        library_model.furnish(
            model, "", family, head.dense, bits, lambda _weights, _bias: nn.Identity(), torch.bfloat16, "meta"
        )
    except FloeError as error:
        return error.cause or error.title
    numbers = {"joined": head.joined} if isinstance(head.joined, Tensor) else {}
    for name, tensor in {**head.dense, **numbers}.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return f"{name} has infinite or NaN values."
    return None if head.experts is None else _bad_layer(head.experts)


def _bad_assistant(found: PackedAssistant, manifest: Manifest) -> str | None:
    model = library_model.empty(found.config, torch.bfloat16, assistant_modules.tree)
    family, bits = assistant.of(manifest.family).layers, manifest.widths.dense
    library_model.furnish(
        model, "", family, found.dense, bits, lambda _weights, _bias: nn.Identity(), torch.bfloat16, "meta"
    )
    linears = {"joined": found.joined, "back": found.back}
    numbers = {name: part for name, part in linears.items() if isinstance(part, Tensor)}
    for name, tensor in {**found.dense, **numbers}.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return f"{name} has infinite or NaN values."
    return None


def _bad_table(folder: Path, manifest: Manifest, name: str) -> str | None:
    table = next(one for one in library_model.tables_in(read_config(folder), manifest) if one.file == name)
    rows, _ = table.opened(folder)
    for start in range(0, table.rows, _TABLE_ROWS):
        if not bool(table.read(rows[start : start + _TABLE_ROWS], torch.float32).isfinite().all()):
            return f"Its rows from {start:,} on have infinite or NaN values."
    return None


def _compare_expert(stored: PackedLayer, source: Checkpoint, layer: int, expert: int) -> Iterator[Compared]:
    gate, up, down = source.expert(layer, expert)
    theirs = {"gate": gate, "up": up, "down": down.T}
    signal, rows = stored.signal, stored.rows
    other_rows, down_rows = rows.layout.read(rows.data[expert], torch.float32)
    here, other = rows.layout.signal, beside(rows.layout.signal)
    ours = {here: signal.dense(expert, torch.float32), other: other_rows, "down": down_rows}
    order = _matched([ours[part] for part in theirs], [theirs[part] for part in theirs])
    widths = {other: rows.layout.other.bits, here: signal.layout.vector.bits, "down": rows.layout.down.bits}
    for part, bits in ((part, bits) for part, bits in widths.items() if bits):
        name = f"layer {layer + 1}, expert {expert + 1}, {part}"
        yield Compared(name, bits, _relative(ours[part], theirs[part][order]), LIMITS[bits])


def _matched(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """The source's nearest neuron (F,) for each stored one; each matrix (F, H)."""
    columns = torch.linspace(0, ours[0].shape[1] - 1, min(_COLUMNS, ours[0].shape[1])).long()
    # Each matrix counts the same, whatever the size of its values.
    sizes = [float(matrix[:, columns].float().square().mean().sqrt().clamp_min(1e-30)) for matrix in theirs]
    here, there = (
        torch.cat([matrix[:, columns].float() / size for matrix, size in zip(side, sizes, strict=True)], dim=1)
        for side in (ours, theirs)
    )
    length = there.square().sum(1)
    return torch.cat([(length - 2 * part @ there.T).argmin(1) for part in here.split(_ROWS)])


def _compare_dense(packed: PackedModel, source: Checkpoint, layers: Sequence[int]) -> Iterator[Compared]:
    manifest, dense = packed.manifest, packed.dense()
    bits = manifest.widths.dense
    decoders = (
        [source.layers[layer] for layer in layers]
        if len(layers) < len(source.layers)
        else range(source.config.num_hidden_layers)
    )
    family = source.family
    mine = (*(f"model.layers.{layer}." for layer in decoders), "lm_head", "model.embed_tokens", "model.norm")
    for layer, name in quantized_linears.stored_layers(source, bits).items():
        if family.module_name(layer).startswith(mine):
            width, matrix = quantized_linears.width_of(layer, bits), source.tensor(name)
            stored = quantized_linears.load(dense, layer, matrix.shape[0], matrix.shape[1], width)
            yield Compared(layer, width, _relative(stored.dense(torch.float32), matrix), LIMITS[width])
    for table in library_model.tables_in(source.config, manifest):
        rows, _ = table.opened(packed.folder)
        parts = source.tables.get(table.name, [])
        end = table.rows
        for part in (*parts[-1:], *parts[:-1][:1]):  # the last one and the first
            theirs = source.tensor(part)
            end = end if part == parts[-1] else len(theirs)
            ours = table.read(rows[end - len(theirs) : end], torch.float32)
            bits = table.vector.bits
            yield Compared(part.removesuffix(".weight"), bits, _relative(ours, theirs), LIMITS[bits])
    for name in source.dense_names():
        if name in dense and family.module_name(name).startswith(mine):
            yield Compared(name, 16, _relative(dense[name], source.tensor(name)), LIMITS[16])


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Root of the mean squared difference over that of the source's mean square."""
    if ours.shape != theirs.shape:
        raise PackError(
            "The pack does not fit the source", f"Shapes differ: {tuple(ours.shape)} and {tuple(theirs.shape)}."
        )
    error, size = (ours.float() - theirs.float()).square().mean().sqrt(), theirs.float().square().mean().sqrt()
    return float(error / size.clamp_min(1e-30))
