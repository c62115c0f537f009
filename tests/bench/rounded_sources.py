"""What a checkpoint that was rounded before costs: mean KL of the demo, nothing skipped, from its 16-bit source, on a
text that it was not trained on.

    git restore --source "$(git rev-list -1 HEAD -- assets/demo/checkpoint)^" assets/demo/checkpoint
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

from tests.bench.calibrated_rounding import calibrated
from tests.models.test_quantized import FORMS, FP8, INT4, by_library, fp8, rounded

# With blocks and groups as they are published.
FORMS.update(
    {
        "FP8": (FP8 | {"weight_block_size": [128, 128]}, lambda weight: fp8(weight, (128, 128), torch.float32)),
        "INT4": by_library("pack-quantized", INT4 | {"group_size": 128, "strategy": "group"}),
    }
)
CALIBRATED = {"GPTQ": 128, "AWQ": 128}  # their groups; the others are rounded to the nearest
MEASURED = "nothing", "FP8", "INT8 bytes", "INT4", "NVFP4", "MXFP4", *CALIBRATED
TOKENS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=MEASURED, choices=MEASURED)
    parser.add_argument("--widths", nargs="+", default=["16/16/16", "4/4/8", "4/4/4", "3/4/4"])
    given = parser.parse_args()
    source = asset("demo", "checkpoint")
    print(f"| rounded as | {' | '.join(f'packed at {widths}' for widths in given.widths)} |")
    for name in given.names:
        with tempfile.TemporaryDirectory() as scratch:
            copy = source if name == "nothing" else Path(scratch) / "copy"
            if name in CALIBRATED:
                calibrated(source, copy, name, CALIBRATED[name])
            elif copy != source:
                rounded(source, copy, name)
            losses = [loss(copy, source, Path(scratch) / "pack", widths) for widths in given.widths]
            print(f"| {name} | {' | '.join(losses)} |", flush=True)


def loss(copy: Path, source: Path, pack: Path, widths: str) -> str:
    up, rows, dense = widths.split("/")
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
