"""A model of Mixtral-8x7B's full width that can be chatted with: a few layers of random weights, and the demo's words.

What it says is nonsense; what it costs for each layer and token is what the real one costs. Each layer has only the two
experts that a token uses, so that packing takes minutes, unless --experts says 8, as many as the real one has: then
packing costs as much, too. Writes a 16-bit checkpoint (0.4 GB for each expert) into FOLDER/checkpoint and packs it into
FOLDER/packed, which `floe-chat --model` and tests/bench/screen.py take.

With --depth the packed layers are there again and again, as many as the real model has, in FOLDER/deep: their files are
the same (hard links), so that it takes seconds and little of the disk. In memory each layer is by itself.

Run: .venv/bin/python tests/bench/wide.py FOLDER [--layers 2] [--experts 2] [--depth 32]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from floe_chat.models.catalog import asset
from floe_chat.models.pack.manifest import Manifest, file_entry, layer_file
from floe_chat.models.pack.tensor_file import write_tensors
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, NEURONS, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128
_WEIGHT = 0.02  # the standard deviation, as transformers initializes them


def write(folder: Path, layers: int, experts: int) -> None:
    """The checkpoint, one file for each layer and one for the rest."""
    folder.mkdir(parents=True)
    demo = asset("demo", "packed")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, folder / name)
    config = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": HIDDEN, "intermediate_size": NEURONS, "num_hidden_layers": layers, "head_dim": HEAD}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_local_experts": experts}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    places: dict[str, str] = {}
    for number in range(layers + 1):
        name = f"model-{number + 1:05}-of-{layers + 1:05}.safetensors"
        tensors = dict(_layer(f"model.layers.{number}.", experts) if number < layers else _ends(config["vocab_size"]))
        save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _layer(at: str, experts: int) -> Iterator[tuple[str, Tensor]]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}{name}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
        yield f"{at}self_attn.{name}_proj.weight", _random(rows, HIDDEN)
    yield f"{at}self_attn.o_proj.weight", _random(HIDDEN, HEADS * HEAD)
    yield f"{at}block_sparse_moe.gate.weight", _random(experts, HIDDEN)
    for expert in range(experts):
        for name, shape in (("w1", (NEURONS, HIDDEN)), ("w2", (HIDDEN, NEURONS)), ("w3", (NEURONS, HIDDEN))):
            yield f"{at}block_sparse_moe.experts.{expert}.{name}.weight", _random(*shape)


def _ends(words: int) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", _random(words, HIDDEN)
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    yield "lm_head.weight", _random(words, HIDDEN)


def _random(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, _WEIGHT)


def deepen(packed: Path, target: Path, depth: int, *, copies: bool = False) -> None:
    """The pack with `depth` layers, which are the packed ones in turn: the same files, or `copies` of them."""
    target.mkdir(parents=True)
    manifest = Manifest.read(packed)
    layers = manifest.architecture.layers
    for number in range(depth):
        (shutil.copyfile if copies else os.link)(packed / layer_file(number % layers), target / layer_file(number))
    for name in manifest.files:
        if name == "config.json":
            config = json.loads((packed / name).read_text(encoding="utf-8"))
            (target / name).write_text(json.dumps(config | {"num_hidden_layers": depth}), encoding="utf-8")
        elif not name.endswith(".safetensors"):
            shutil.copy(packed / name, target / name)
        elif name not in map(layer_file, range(layers)):
            with safe_open(packed / name, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys() if not key.startswith("_pad.")}  # noqa: SIM118
            write_tensors(target / name, dict(_repeated(tensors, layers, depth)))
    known = {layer_file(number): manifest.files[layer_file(number % layers)] for number in range(depth)}
    files = {path.name: known.get(path.name) or file_entry(path) for path in sorted(target.iterdir())}
    replace(manifest, architecture=replace(manifest.architecture, layers=depth), files=files).write(target)


def _repeated(tensors: dict[str, Tensor], layers: int, depth: int) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in tensors.items():
        if key.startswith("model.layers."):
            number, _, rest = key.removeprefix("model.layers.").partition(".")
            yield from ((f"model.layers.{each}.{rest}", tensor) for each in range(int(number), depth, layers))
        elif key in ("popularity", "router_score"):  # layer by layer
            yield key, torch.cat([tensor] * -(-depth // layers))[:depth]
        elif not key.startswith("lookahead."):  # what follows a layer is another one now
            yield key, tensor


def main() -> None:
    """Write and pack it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2, help="to be made and packed; default 2")
    parser.add_argument("--experts", type=int, default=2, help="of each layer; default 2")
    parser.add_argument("--depth", type=int, default=0, help="of FOLDER/deep; default: it is not made")
    given = parser.parse_args()
    checkpoint, packed = given.folder / "checkpoint", given.folder / "packed"
    if not packed.exists():
        write(checkpoint, given.layers, given.experts)
        command, began = Path(sys.executable).with_name("floe-chat"), time.monotonic()
        subprocess.run([command, "pack", checkpoint, packed, "--name", "wide"], check=True)
        print(f"packed in {time.monotonic() - began:.0f} s")
    if given.depth:
        deepen(packed, given.folder / "deep", given.depth)


if __name__ == "__main__":
    main()
