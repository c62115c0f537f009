"""Checkpoints that lie: scales that are gone, of other shapes or types, and a config.json of something else. Some are
rounded, and some of families without a record.

Each is described as `plan` describes it, and every tensor is read of what opens.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import shutil
from pathlib import Path
from random import Random
from typing import Any

import torch
from floe_chat.kernels.codes import group_size
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.models import catalog
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import FloeError
from floe_chat.models.pack.quantize import keeping, quantize
from floe_chat.models.supported import MODELOPT
from floe_chat.models.visible import visible
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..engine.test_derived import published
from ..helpers import make_checkpoint
from ..models.test_quantized import FORMS, rounded

_COPIES: list[tuple[dict[str, Any], dict[str, Tensor], Path]] = []
_TYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn)
_VALUES: tuple[Any, ...] = (
    None,
    0,
    -1,
    3,
    4,
    8,
    32,
    1 << 40,
    1.5,
    True,
    "",
    "gemm",
    "fp8",
    [],
    [0, 0],
    [7, 64],
    {},
    [[1]],
)


def good(scratch: Path) -> None:
    """One of each form, all of which open."""
    logging.disable(logging.WARNING)
    source = make_checkpoint(scratch / "source", layers=1, experts=2, hidden=64, intermediate=64)
    for name in FORMS:
        base = scratch / name.replace(" ", "_")
        rounded(source, base, name)
        _add(base)
    for kind in ("minimax_m2", "qwen4_exp", "granitemoehybrid"):
        published(kind, scratch / kind)
        _add(scratch / kind)


def _add(base: Path) -> None:
    assert _opened(base) == "opened", base.name
    _COPIES.append((json.loads((base / "config.json").read_bytes()), load_file(base / "model.safetensors"), base))


def attempt(seed: int, scratch: Path) -> str:
    rng = Random(seed)
    fields, tensors, base = rng.choice(_COPIES if rng.random() < 0.7 else _COPIES[-3:])
    folder = scratch / "attempt"
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    try:
        changed = dict(tensors)
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            _change(rng, changed)
        fields = json.loads(json.dumps(fields))
        for _ in range(rng.choice((0, 0, 1, 2))):
            _lie(rng, fields.get("quantization_config", fields))
        if "ModelOpt" in base.name and rng.random() < 0.5:  # said in a file of its own
            (folder / MODELOPT).write_text(json.dumps({"quantization": fields.pop("quantization_config")}))
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(changed, folder / "model.safetensors")
        return _opened(folder)
    finally:
        shutil.rmtree(folder)


def _change(rng: Random, tensors: dict[str, Tensor]) -> None:
    """One tensor, mostly a scale, zero or code."""
    names = sorted(tensors)
    parts = [name for name in names if any(word in name for word in ("scale", "zero", "g_idx", "shape", "packed", "q"))]
    name = rng.choice(parts if parts and rng.random() < 0.8 else names)
    tensor = tensors[name]
    match rng.randrange(6):
        case 0:
            del tensors[name]
        case 1:
            tensors[rng.choice(names)] = tensor.clone()
        case 2:
            tensors[name] = tensor.float().nan_to_num().clamp(-100, 100).to(rng.choice(_TYPES))
        case 3:
            shape = [max(0, size + rng.choice((-1, 0, 0, 1, size))) for size in tensor.shape] or [rng.randrange(3)]
            tensors[name] = torch.zeros(shape[: rng.choice((1, 2, 3))], dtype=tensor.dtype)
        case 4:
            raw = bytearray(tensor.contiguous().view(-1).view(torch.uint8).tolist())
            for _ in range(rng.choice((1, 8))):
                if raw:
                    raw[rng.randrange(len(raw))] = rng.randrange(256)
            if raw:
                tensors[name] = torch.tensor(list(raw), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        case _:
            tensors[name] = tensor[None].clone() if rng.random() < 0.5 else tensor.reshape(-1).clone()


def _lie(rng: Random, stated: Any) -> None:
    """Another value, somewhere in what it states of its weights."""
    while True:
        key = rng.choice([*stated] if isinstance(stated, dict) else range(len(stated)))
        inner = stated[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
            stated = inner
            continue
        if isinstance(stated, dict) and rng.random() < 0.2:
            del stated[key]
        else:
            stated[key] = copy.deepcopy(rng.choice(_VALUES))
        return


def _opened(folder: Path) -> str:
    try:
        assert catalog.described(str(folder)).sizes.parameters > 0
        checkpoint = Checkpoint(folder)
        for name, (_, place) in checkpoint.places.items():
            assert checkpoint.tensor(name).numel() == math.prod(place.shape)
            if (kept := checkpoint.codes(name)) is not None:
                layout = VectorLayout(place.shape[1], kept.bits, group_size(place.shape[1]), short=True)
                if (by := keeping(kept, layout, quantize)) is not quantize:
                    by(checkpoint.tensor(name), kept.bits, layout.group)
        assert checkpoint.whole_expert(0, 0) and checkpoint.fingerprint()
    except FloeError as error:
        for text in (error.title, error.cause, error.hint):
            assert "bug in floe-chat" not in text and "Traceback" not in text and text == visible(text), ascii(text)
            assert len(text) < 2100
        return "refused"
    return "opened"
