"""Packing: one forward pass over calibration text in which every layer packs itself when its turn comes.

The model is transformers' own, with a module in the place of each layer's experts that reads one expert at a time
out of the checkpoint, measures it, orders its neurons, quantizes, writes and lets it go (DESIGN section 4). So the
hidden states that a layer is calibrated on are those that the packed layers before it produce, and memory holds one
expert of the source at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.layouts import WIDTHS, LinearWeights, UpWeights, group_size
from . import calibration, foresight, linears, skeleton
from .checkpoint import Checkpoint
from .errors import CheckpointError, FloeError, PackError, UsageError
from .manifest import (
    COPIED,
    DENSE_WIDTHS,
    Architecture,
    Calibration,
    Manifest,
    Source,
    Widths,
    file_entry,
    layer_file,
)
from .quantize import store_matrix, store_vectors
from .tensorfile import Plan, TensorFile
from .workplace import claimed


@dataclass(frozen=True, slots=True)
class PackSpec:
    """Bits per weight; 16 is the source's own. `group` values of an expert share a scale, fewer where H needs it.

    `dense` is the width of attention projections, in groups of 64 or fewer; the head has at least 8 bit. The defaults
    are what lost least for the bytes that a token reads (BENCHMARKS.md, the frontier).
    """

    up: int = 3
    gate: int = 4
    down: int = 4
    dense: int = 4
    group: int = 64

    def __post_init__(self) -> None:
        for part, bits, valid in (
            ("up", self.up, WIDTHS),
            ("gate", self.gate, WIDTHS),
            ("down", self.down, WIDTHS),
            ("dense", self.dense, DENSE_WIDTHS),
        ):
            if bits not in valid:
                choices = ", ".join(map(str, valid))
                raise UsageError(f"{part} cannot be {bits} bit", "", f"Choose one of {choices}.")


EXACT = PackSpec(up=16, gate=16, down=16, dense=16)
_DENSE_SHARE = 0.03  # of the progress: the dense part has about that share of a Mixtral's weights
Progress = Callable[[str, float], None]


def pack(
    source: Checkpoint,
    folder: Path,
    spec: PackSpec,
    tokens: Tensor,
    name: str,
    progress: Progress | None = None,
) -> Manifest:
    """Write the packed layout of `source` into `folder`; the manifest comes last.

    Args:
        tokens: (N, T) int64 calibration text. name: what the model will be called.
        progress: called with a sentence and the share that is done, 0..1.

    Raises:
        UsageError: the folder holds something else, or a finished pack. CheckpointError: the source is unreadable.
        FloeError: the disk is too small or fails.
    """
    report = progress or _silent
    manifest = _plan(source, spec, tokens, name)
    dense = {name: source.tensor(name) for name in source.dense_names()}
    for tensor_name, tensor in dense.items():
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{tensor_name} of the checkpoint holds values that are not finite",
                "",
                "Download the checkpoint again.",
            )
    if tokens.numel() and int(tokens.max()) >= source.config.vocab_size:
        raise CheckpointError(
            "The checkpoint's tokenizer is not its own",
            f"It knows token {int(tokens.max())}; the weights have {source.config.vocab_size} tokens.",
            "Download the model's own tokenizer files.",
        )
    low = linears.matrices(source, dense, spec.dense)
    dense = {name: tensor for name, tensor in dense.items() if name.removesuffix(".weight") not in low}
    dense_bytes = sum(tensor.nbytes for tensor in dense.values())
    for layer, matrix in low.items():
        dense_bytes += len(matrix) * linears.layout_of(matrix.shape[1], linears.width_of(layer, spec.dense)).nbytes
    try:
        with claimed(folder, source.folder, expected_bytes(manifest, dense_bytes)):
            _fill(folder, source, manifest, dense, low, tokens, report)
    except OSError as error:
        raise FloeError(
            f"Packing into {folder} failed",
            f"{error.strerror or error}.",
            "Free some space or choose another disk, then run the same command again: it starts over.",
        ) from error
    report("Done", 1.0)
    return manifest


def _fill(
    folder: Path,
    source: Checkpoint,
    manifest: Manifest,
    dense: dict[str, Tensor],
    low: dict[str, Tensor],
    tokens: Tensor,
    report: Progress,
) -> None:
    """dense: tensors to keep at 16 bit, by published names. low: matrices of the layers that become codes."""
    bits = manifest.widths.dense
    dense = {name: t if source.exact else t.to(torch.bfloat16) for name, t in dense.items()}
    for index, (layer, matrix) in enumerate(low.items()):
        report("Packing the dense part", _DENSE_SHARE * index / len(low))
        dense |= linears.store(layer, matrix, linears.width_of(layer, bits))
    _write(folder / "dense.safetensors", dense)
    layers: list[_PackingExperts] = []

    def experts(layer: int) -> nn.Module:
        layers.append(_PackingExperts(source, manifest, folder, layer, report))
        return layers[-1]

    try:
        model = skeleton.build(source.config, source.family, dense, bits, experts, _dequantized, torch.float32, "cpu")
    except PackError as error:
        raise CheckpointError(error.title, error.cause, "Download the checkpoint again.") from error
    training = _taught(model, layers, report)
    with torch.inference_mode():
        model.model(input_ids=tokens, use_cache=False)  # pyright: ignore[reportCallIssue]
    report("Writing the profile", 0.99)
    _write(
        folder / "profile.safetensors",
        {
            "popularity": torch.stack([layer.popularity for layer in layers]),
            "importance": torch.stack([layer.importance for layer in layers]),
            "router_score": torch.stack([layer.router_score for layer in layers]),
            **training.tensors(),
        },
    )
    for file in COPIED:
        if (source.folder / file).is_file():
            shutil.copyfile(source.folder / file, folder / file)
    layer_files = [layer_file(layer) for layer in range(manifest.architecture.layers)]
    for file in ("dense.safetensors", "profile.safetensors", *layer_files, *COPIED):
        if (folder / file).is_file():
            manifest.files[file] = file_entry(folder / file)
    manifest.write(folder)


def _taught(model: Any, layers: Sequence[_PackingExperts], report: Progress) -> foresight.Training:
    """What learns to look ahead from each layer to the next while the model reads the calibration text."""

    def told(layer: int) -> None:
        report(f"Learning to look ahead from layer {layer + 1} of {len(layers)}", _share((layer + 1) / len(layers)))

    blocks = model.model.layers
    norms = [block.post_attention_layernorm.weight for block in blocks]
    training = foresight.Training([block.mlp.gate.weight for block in blocks], norms, told)

    def reached(experts: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(experts, _PackingExperts)
        training.reach(experts.layer, given[0], given[1])

    for experts in layers:
        experts.register_forward_pre_hook(reached)
    return training


def _share(layers: float) -> float:
    """The share of packing that is done when that share of the layers is."""
    return _DENSE_SHARE + (0.98 - _DENSE_SHARE) * layers


def _dequantized(weights: LinearWeights, bias: nn.Parameter | None) -> nn.Module:
    """The layer that calibration sees: the library's, with the values that the codes stand for."""
    layer = nn.Linear(weights.vector.n, weights.q.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weights.dense(torch.float32), requires_grad=False)
    layer.register_parameter("bias", bias)
    return layer


def _silent(step: str, share: float) -> None:
    pass


class _PackingExperts(nn.Module):
    """Stands where a layer's experts stand; when called, packs them, and answers as the packed experts will."""

    def __init__(self, source: Checkpoint, manifest: Manifest, folder: Path, layer: int, report: Progress) -> None:
        super().__init__()
        a = manifest.architecture
        self.source, self.manifest, self.folder, self.layer, self.report = (
            source,
            manifest,
            folder,
            layer,
            report,
        )
        self.popularity = torch.zeros(a.experts)
        self.importance = torch.zeros(a.experts, a.intermediate, len(calibration.MEASURES))
        self.router_score = torch.zeros(calibration.QUANTILES)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (B, H), top_k_index and top_k_weights (B, K) -> (B, H)."""
        a = self.manifest.architecture
        out = torch.zeros_like(hidden)
        self.router_score = calibration.quantile_table(top_k_weights)
        with TensorFile(self.folder / layer_file(self.layer), _layer_plan(self.manifest)) as file:
            for expert in range(a.experts):
                share = (self.layer + expert / a.experts) / a.layers
                self.report(f"Packing layer {self.layer + 1} of {a.layers}", _share(share))
                token, slot = (top_k_index == expert).nonzero(as_tuple=True)
                self.popularity[expert] = token.numel() / max(1, top_k_index.numel())
                # An expert that the text never reaches is measured on all of it: a rough table beats none.
                x = hidden[token] if token.numel() else hidden
                y = self._pack_expert(file, expert, x)
                if token.numel():
                    out.index_add_(0, token, y * top_k_weights[token, slot, None].to(y.dtype))
        return out

    def _pack_expert(self, file: TensorFile, expert: int, x: Tensor) -> Tensor:
        """Write one expert, neurons by falling importance; x (T, H) -> what the packed expert makes of it."""
        up_layout, row_layout = self.manifest.up_layout, self.manifest.row_layout
        gate, up, down = self.source.expert(self.layer, expert)
        measures = calibration.importance(x, gate.to(x.dtype), up.to(x.dtype))
        order = measures[:, calibration.ORDER_BY].argsort(descending=True)
        self.importance[expert] = measures[order]
        try:
            q, scale, zero = store_matrix(up[order], up_layout.vector, up_layout.float16)
            records = row_layout.join(
                store_vectors(gate[order], row_layout.gate, row_layout.float16),
                store_vectors(down.T[order], row_layout.down, row_layout.float16),
            )
        except ValueError as error:
            raise CheckpointError(
                f"Expert {expert} of layer {self.layer} cannot be packed",
                str(error),
                "Download the checkpoint again.",
            ) from error
        file["up.q"][expert], file["up.scale"][expert], file["up.zero"][expert] = q, scale, zero
        file["rows"][expert] = records
        packed_up = UpWeights(up_layout, q[None], scale[None], zero[None])
        v = F.linear(x, packed_up.dense(0, x.dtype))
        file["threshold"][expert] = calibration.quantile_table(v)
        packed_gate, packed_down = row_layout.read(records, x.dtype)
        h = F.silu(F.linear(x, packed_gate)) * v
        file["product"][expert] = calibration.quantile_table(h)
        return h @ packed_down


def _plan(source: Checkpoint, spec: PackSpec, tokens: Tensor, name: str) -> Manifest:
    config: Any = source.config
    group = group_size(config.hidden_size, spec.group)
    return Manifest(
        name=name,
        source=Source(name=source.folder.resolve().name, commit=None, exact=source.exact),
        architecture=Architecture(
            model_type=config.model_type,
            layers=config.num_hidden_layers,
            experts=source.experts,
            top_k=config.num_experts_per_tok,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
        ),
        widths=Widths(spec.up, spec.gate, spec.down, spec.dense, str(source.float16).removeprefix("torch."), group),
        calibration=Calibration(tokens=tokens.numel(), quantiles=calibration.QUANTILES),
        files={},
    )


def _layer_plan(manifest: Manifest) -> Plan:
    a, up, rows = manifest.architecture, manifest.up_layout, manifest.row_layout
    groups = up.vector.groups
    return {
        "rows": (torch.uint8, (a.experts, a.intermediate, rows.nbytes)),
        "up.q": (torch.uint8, (a.experts, a.intermediate, up.row_bytes)),
        "up.scale": (torch.float16, (a.experts, a.intermediate, groups)),
        "up.zero": (torch.float16, (a.experts, a.intermediate, groups)),
        "threshold": (torch.float32, (a.experts, calibration.QUANTILES)),
        "product": (torch.float32, (a.experts, calibration.QUANTILES)),
    }


def expected_bytes(manifest: Manifest, dense_bytes: int) -> int:
    """Disk that the pack will take, to within its small files."""
    a, up, rows = manifest.architecture, manifest.up_layout, manifest.row_layout
    neuron = rows.nbytes + up.row_bytes + 4 * up.vector.groups + 4 * len(calibration.MEASURES)
    return dense_bytes + a.layers * a.experts * a.intermediate * neuron


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    plan: Plan = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorFile(path, plan) as file:
        for name, tensor in tensors.items():
            file[name].copy_(tensor)
