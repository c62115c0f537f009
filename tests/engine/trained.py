"""Trained models for tests: the built-in demo's pack written as checkpoints of 16 bits.

They predict as sharply as the demo: on assets/demo/manual.md, which it was trained on, the likeliest token has a
probability of 0.985 on average (perplexity 1.10); on heldout.md, which it was not, 0.53. Rounded again to the demo's
own widths they lose next to nothing (KL 0.002 on heldout.md), so a test of rounding takes fewer bits.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from floe_chat.kernels.codes import dequantize
from floe_chat.models.catalog import asset
from floe_chat.models.finer.transform import transform
from floe_chat.models.pack.packed_model import PackedModel
from safetensors.torch import save_file
from torch import Tensor


def demo_source(folder: Path) -> Path:
    """What the demo's codes stand for, under Mixtral's published names; neurons stay in the pack's order."""
    packed, dtype = PackedModel.open(asset("demo", "packed")), torch.bfloat16
    folder.mkdir(parents=True)
    for name in packed.manifest.files:
        if not name.endswith(".safetensors"):
            shutil.copyfile(packed.folder / name, folder / name)
    dense = packed.dense()
    tensors: dict[str, Tensor] = {}
    for name, tensor in dense.items():
        layer, _, part = name.rpartition(".")
        if part == "q":  # a code is a byte
            scale, zero = (dense[f"{layer}.{other}"] for other in ("scale", "zero"))
            tensors[f"{layer}.weight"] = dequantize(tensor, scale, zero, tensor.shape[1], 8, dtype)
        elif part not in ("scale", "zero"):
            tensors[name] = tensor
    for index in range(packed.manifest.architecture.layers):
        layer = packed.layer(index)
        for expert, records in enumerate(layer.rows.data):
            signal, (other, down) = layer.signal.dense(expert, dtype), layer.rows.layout.read(records, dtype)
            gate, up = (signal, other) if layer.signal.layout.projection == "gate" else (other, signal)
            at = f"model.layers.{index}.block_sparse_moe.experts.{expert}"
            tensors |= {f"{at}.w1.weight": gate, f"{at}.w2.weight": down.T.contiguous(), f"{at}.w3.weight": up}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def finer_source(folder: Path) -> Path:
    """The same model with each expert cut into four: 32 of 96 neurons in a layer, of which a token uses 8."""
    whole = demo_source(folder.with_name("whole"))
    transform(whole, folder, 4, None, lambda _step, _share: None)
    shutil.rmtree(whole)
    return folder
