"""A pack of Mixtral-8x7B's width with random weights, made without quantizing: seconds for each layer.

Its layers are there again and again, as many as the real model has; their files are the same (hard links). Thresholds
are measured as packing does (`synthetic.calibrate`). Tokenizer and template are the demo's.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from floe_chat.engine.bench import synthetic
from floe_chat.engine.bench.synthetic import MODELS, Spec
from floe_chat.models.catalog import asset
from floe_chat.models.config_limits import SIZES
from floe_chat.models.families import FAMILIES
from floe_chat.models.pack.manifest import Manifest, file_entry, layer_file
from floe_chat.models.pack.tensor_file import write_tensors

from ..bench.wide import deepen
from .stages import Context

LAYERS, DEPTH = 4, 32
_TINY: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 480,
    "heads": 4,
    "kv_heads": 1,
    "head_dim": 16,
    "vocab": 512,
    "window": 256,
}


def made(context: Context, depth: int) -> Path:
    """The pack's folder; it is made when it is first asked for, and takes 3.2 GB at full width."""
    name = "mixtral-8x7b" if context.real else "tiny"
    MODELS["tiny"] = replace(MODELS["mixtral-8x7b"], **_TINY)
    whole, deep = context.folder / "packs" / name, context.folder / "packs" / f"{name}-{depth}"
    made_in(whole, name, LAYERS)
    if depth != LAYERS and not (deep / "manifest.json").exists():
        shutil.rmtree(deep, ignore_errors=True)
        deepen(whole, deep, depth)
    return whole if depth == LAYERS else deep


def made_in(folder: Path, name: str, layers: int) -> Path:
    """A pack of so many layers in a folder, which is returned; one that is whole is left as it is."""
    if not (folder / "manifest.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write(folder, Spec(name, layers))
    return folder


def _write(folder: Path, spec: Spec) -> None:
    torch.manual_seed(0)
    subject = synthetic.make(spec, "cpu", lambda _step: None)
    manifest: Manifest = subject.manifest
    a, family = manifest.architecture, FAMILIES[manifest.architecture.model_type]
    for number, block in enumerate(subject.model.model.layers):
        packed: Any = block.mlp.experts.packed
        up = {"up.q": packed.signal.q, "up.scale": packed.signal.scale, "up.zero": packed.signal.zero}
        tables = {"threshold": packed.thresholds, "product": packed.products}
        write_tensors(folder / layer_file(number), {"rows": packed.rows.data, **up, **tables})
    write_tensors(folder / "dense.safetensors", synthetic.dense_tensors(spec, family))
    profile = {
        "popularity": torch.full((a.layers, a.experts), 1 / a.experts),
        "router_score": torch.linspace(0.5, 1, manifest.calibration.quantiles).repeat(a.layers, 1),
    }
    write_tensors(folder / "profile.safetensors", profile)
    demo = asset("demo/packed")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, folder / name)
    config = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    theirs = spec.config().to_dict()
    config |= {key: value for key, value in theirs.items() if key in SIZES and key in config}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    files = {path.name: file_entry(path) for path in sorted(folder.iterdir())}
    replace(manifest, files=files).write(folder)
