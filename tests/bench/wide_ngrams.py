"""A model of type qwen4_exp at full width, with some layers of random weights and its n-gram table on the disk.

Writes a 16-bit checkpoint into FOLDER/checkpoint (3.3 GB a layer, 2 GB of embedding and head, and the table), packs it
into FOLDER/packed, and answers random tokens, none of whose rows are in RAM: milliseconds of a token, of its table
among them, and the RAM that the process takes. Last line: one JSON object.

Run: OMP_WAIT_POLICY=passive .venv/bin/python -P tests/bench/wide_ngrams.py FOLDER [--layers 2] [--experts 512] [--gb 8]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.loader import load
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.families.derived import tables, tree
from floe_chat.models.pack.manifest import FILE_NAME
from floe_chat.models.pack.table import Lookup
from floe_chat.models.pack.tensor_file import TensorFile
from floe_chat.models.packing.pack import PackSpec, pack
from floe_chat.models.transformers_import import import_model_code
from torch import Tensor

_WEIGHT, _DRAWN = 0.02, 1 << 24  # standard deviation of weights, and how many are drawn, which come again and again
_PARTS = 8  # of the table, as published


def config_of(layers: int, experts: int, nbytes: float) -> Any:
    """The library's defaults, with what they leave open, fewer layers, and a table of about so many bytes."""
    from transformers import Qwen4ExpTextConfig

    return Qwen4ExpTextConfig(
        num_hidden_layers=layers,
        layer_types=["full_attention" if index % 4 == 1 else "linear_attention" for index in range(layers)],
        num_experts=experts,
        ple_layer_ids=[1],
        eos_token_id=2,
        ngram_vocab_size_base=int(nbytes / (2 * 2048)),
        split_ngram_parts=_PARTS,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=128,
        indexer_budget=2048,
        indexer_compress_ratio=32,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    )


def write(folder: Path, config: Any) -> None:
    """The checkpoint, a file for each layer and one for the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, drawn = (
        tree(config),
        torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)).mul_(_WEIGHT).bfloat16(),
    )
    files: dict[str, dict[str, Tensor]] = {}
    apart = {f"{name}.weight": shape for name, shape in tables(whole).items()}
    for name, own in whole.state_dict().items():
        part = f"layer-{name.split('.')[2]}" if ".layers." in name else "rest"
        if name in apart:
            rows, stem = apart[name][0], name.removesuffix(".weight")
            for index in range(_PARTS):
                some = rows * (index + 1) // _PARTS - rows * index // _PARTS
                files.setdefault(f"{part}-table", {})[f"{stem}.shard_{index}.weight"] = torch.empty(
                    some, own.shape[1], device="meta", dtype=torch.bfloat16
                )
        else:
            files.setdefault(part, {})[name] = own
    for stem, tensors in files.items():
        if (folder / f"{stem}.safetensors").exists():  # of a run before
            continue
        plan = {
            name: (torch.bfloat16 if own.is_floating_point() else own.dtype, tuple(own.shape))
            for name, own in tensors.items()
        }
        with TensorFile(folder / f"{stem}.safetensors", plan) as file:
            for name in tensors:
                _fill(file[name], name, drawn, whole)
    config.architectures = ["Qwen4ExpForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")


def _fill(into: Tensor, name: str, drawn: Tensor, whole: Any) -> None:
    flat, shift = into.view(-1), sum(map(ord, name))
    if not into.is_floating_point():  # multipliers and sizes of hashes, which the module knows
        owner: Any = whole.get_submodule(name.rpartition(".")[0])
        own = torch.nn.Module.__new__(type(owner))
        own.__dict__ = dict(owner.__dict__)
        own._buffers = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in owner._buffers.items()}
        own._modules = {}
        whole._init_weights(own)
        into.copy_(own._buffers[name.rpartition(".")[2]])
        return
    for start in range(0, len(flat), _DRAWN):
        some = flat[start : start + _DRAWN]
        some.copy_(drawn.roll(shift + start // _DRAWN)[: len(some)])
    if "norm" in name and len(into.shape) == 1:
        into.mul_(0.1)


def main() -> None:
    """Write, pack, answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--gb", type=float, default=8.0, help="of the table at 16 bits; default 8")
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    import_model_code()
    source, packed = given.folder / "checkpoint", given.folder / "packed"
    if not (source / "config.json").exists():
        write(source, config_of(given.layers, given.experts, given.gb * 1e9))
    if not (packed / FILE_NAME).exists():
        text = torch.randint(3, 5000, (4, 128), generator=torch.Generator().manual_seed(1))

        def said(step: str, _share: float, _left: float | None) -> None:
            print(step, file=sys.stderr)

        pack(Checkpoint(source), packed, PackSpec(), text, "wide", said)
    print(json.dumps(_answered(packed, given.tokens)))


def _answered(packed: Path, tokens: int) -> dict[str, object]:
    for path in packed.glob("table_*"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, times, looking = psutil.Process().memory_info(), list[float](), list[float]()
    model, _ = load(packed, None, "cpu", lambda _step, _share: None)
    own = Lookup.forward

    def timed(self: Lookup, ids: Tensor) -> Tensor:
        begun = time.perf_counter()
        found = own(self, ids)
        looking.append(1e3 * (time.perf_counter() - begun))
        return found

    Lookup.forward = timed
    ids = torch.randint(3, 200_000, (64 + tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    kv, logits = KVCache(), torch.empty(0)
    for start, end in [(0, 64), *((at, at + 1) for at in range(64, 64 + tokens))]:
        begun = time.perf_counter()
        logits = model.decoder.forward(ids[start:end], kv)
        kv.computed(ids[start:end], model.control.preset)
        times.append(1e3 * (time.perf_counter() - begun))
    table = sum(path.stat().st_size for path in packed.glob("table_*"))
    return {
        "table_gb": round(table / 1e9, 2),
        "pack_gb": round(sum(path.stat().st_size for path in packed.iterdir() if path.is_file()) / 1e9, 2),
        "finite": bool(logits.isfinite().all()),
        "ms_a_token": round(median(times[5:]), 1),
        "table_ms_a_token": {"mean": round(mean(looking[1:]), 2), "median": round(median(looking[1:]), 2)},
        "prompt_table_ms_a_token": round(looking[0] / 64, 2),
        "anonymous_gb": round((_anonymous() - before.rss + before.shared) / 1e9, 2),
    }


def _anonymous() -> int:
    found = psutil.Process().memory_info()
    return found.rss - found.shared


if __name__ == "__main__":
    main()
