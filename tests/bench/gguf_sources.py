"""What GGUF files cost: mean KL of the demo from its 16-bit source, of files rounded by llama.cpp without importance
matrix; packed as they are and at two widths, with nothing skipped and by each preset, on the text of the other figures.

    git restore --source "$(git rev-list -1 HEAD -- assets/demo/checkpoint)^" assets/demo/checkpoint
    python tests/bench/gguf_sources.py PEER/lib/python3.11/site-packages/llama_cpp/lib/libllama.so [FORMAT ...]

Its blocks have 256 weights and the demo's experts 384 neurons: 128 neurons of zeros are added first, which changes no
answer.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from floe_chat.app.cli.quality.comparison import text_ids
from floe_chat.engine.quality import evaluate, references
from floe_chat.engine.quality.told import Told
from floe_chat.models.catalog import asset
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers import edit_json
from tests.models.gguf.converting import convert

FILES = {"Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q4_K_M": 15, "IQ4_XS": 30, "Q3_K_M": 12}  # llama.cpp's numbers of them
WIDTHS = {"16": ("16", "16", "16"), "4/4/8": ("4", "4", "8"), "3/4/4": ("3", "4", "4")}
TOKENS = 4096
BLOCK = 256  # weights of a block of llama.cpp's


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("library", type=Path, help="llama.cpp's")
    arguments.add_argument("formats", nargs="*", default=["nothing", *FILES], help="of these only")
    arguments.add_argument("--widths", choices=WIDTHS, action="append", help="these only")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = widened(asset("demo", "checkpoint"), folder / "source")
        print("| rounded as | packed at | nothing skipped | High | Balanced | Fast |", flush=True)
        for name in given.formats:
            copy = source
            if name in FILES:
                copy = folder / "copy.gguf"
                quantized(given.library, source, copy, name)
            for widths in given.widths or WIDTHS:
                found = losses(copy, source, folder / "pack", widths)
                print(f"| {name} | {widths} | {' | '.join(found)} |", flush=True)


def widened(source: Path, folder: Path) -> Path:
    """The same model with neurons of zeros up to a multiple of `BLOCK`."""
    folder.mkdir()
    for path in source.glob("*.json*"):
        shutil.copyfile(path, folder / path.name)
    shutil.copyfile(source / "chat_template.jinja", folder / "chat_template.jinja")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {name: one for path in source.glob("*.safetensors") for name, one in load_file(path).items()}
    for name, one in tensors.items():
        if name.endswith((".w1.weight", ".w3.weight")):
            tensors[name] = torch.nn.functional.pad(one, (0, 0, 0, -len(one) % BLOCK))
        elif name.endswith(".w2.weight"):
            tensors[name] = torch.nn.functional.pad(one, (0, -one.shape[1] % BLOCK))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_json(
        folder / "config.json",
        lambda fields: fields.update(intermediate_size=-(-fields["intermediate_size"] // BLOCK) * BLOCK),
    )
    return folder


class Parameters(ctypes.Structure):
    """llama.h's llama_model_quantize_params, as far as its first fields; the rest stays as it is by default."""

    _fields_ = (("nthread", ctypes.c_int32), ("ftype", ctypes.c_int), ("rest", ctypes.c_byte * 256))


def quantized(library: Path, source: Path, file: Path, name: str) -> None:
    """A GGUF file of the checkpoint, rounded by llama.cpp."""
    for each in ("libggml-base.so", "libggml-cpu.so", "libggml.so"):
        ctypes.CDLL(str(library.with_name(each)), mode=ctypes.RTLD_GLOBAL)
    llama = ctypes.CDLL(str(library))
    llama.llama_model_quantize_default_params.restype = Parameters
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = FILES[name]
    wide = convert(source, file.with_name("wide.gguf"), "BF16")
    code = llama.llama_model_quantize(str(wide).encode(), str(file).encode(), ctypes.byref(parameters))
    assert code == 0, code
    wide.unlink()


def losses(copy: Path, source: Path, pack: Path, widths: str) -> list[str]:
    up, rows, dense = WIDTHS[widths]
    floe("pack", str(copy), str(pack), "--up", up, "--rows", rows, "--dense", dense)
    ids = text_ids(pack, asset("demo", "manual.md"))
    told = Told(lambda _step: None, lambda _note: None)
    with patch.object(references, "identify", return_value=str(source)):  # a rounded embedding is another one
        found = evaluate.run(pack, source, ids, ["No sparsity", "High", "Balanced", "Fast"], TOKENS, "cpu", told)
    shutil.rmtree(pack)
    return [f"{each.divergence.kl_mean:.4f}" for each in found.presets]


def floe(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "floe_chat.app", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main()
