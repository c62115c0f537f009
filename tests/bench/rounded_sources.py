"""What a checkpoint that was rounded before costs: mean KL of the demo, nothing skipped, from the model before it was
rounded in each format; packed at two widths, on a text that it was not trained on.

    python tests/bench/rounded_sources.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from floe_chat.models.catalog import asset

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine.trained import demo_source
from tests.models.test_quantized import FORMS, FP8, INT4, by_library, fp8, rounded

# With blocks and groups as they are published; four bits are rounded to the nearest, without calibration.
FORMS.update(
    {
        "FP8": (FP8 | {"weight_block_size": [128, 128]}, lambda weight: fp8(weight, (128, 128), torch.float32)),
        "INT4": by_library("pack-quantized", INT4 | {"group_size": 128, "strategy": "group"}),
    }
)
MEASURED = "FP8", "INT8 bytes", "INT4", "NVFP4", "MXFP4"
WIDTHS = {"4/4/8": ("4", "4", "8"), "3/4/4": ("3", "4", "4")}
TOKENS = 4096


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = demo_source(folder / "source")
        print(f"| rounded as | {' | '.join(f'packed at {widths}' for widths in WIDTHS)} |")
        for name in ("nothing", *MEASURED):
            copy = source
            if name in MEASURED:
                copy = folder / "copy"
                rounded(source, copy, name)
            print(
                f"| {name} | {' | '.join(loss(copy, source, folder / 'pack', bits) for bits in WIDTHS)} |", flush=True
            )
            if copy != source:
                shutil.rmtree(copy)


def loss(copy: Path, source: Path, pack: Path, widths: str) -> str:
    up, rows, dense = WIDTHS[widths]
    floe("pack", str(copy), str(pack), "--up", up, "--rows", rows, "--dense", dense)
    measured = ("--source", str(source), "--text", str(asset("demo", "heldout.md")), "--tokens", str(TOKENS))
    said = json.loads(floe("eval", str(pack), *measured, "--sparsity", "0", "--json"))
    shutil.rmtree(pack)
    return f"{said['presets'][0]['kl_mean']:.4f}"


def floe(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "floe_chat.app", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    main()
