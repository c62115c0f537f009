"""What a checkpoint that was rounded before costs: KL of the demo from the same model in each format, kept at 16 bits and
packed at a preset's usual widths, on a text that it was not trained on.

    python tests/bench/rounded_sources.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from floe_chat.models.catalog import asset

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine.trained import demo_source
from tests.models.test_quantized import FORMS, rounded

WIDTHS = {"16 bits": ("16", "16", "16"), "3/4/4": ("3", "4", "4")}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = demo_source(folder / "source")
        print("| format | " + " | ".join(f"KL, packed at {widths}" for widths in WIDTHS) + " |")
        for name in ("", *FORMS):
            copy = source
            if name:
                copy = folder / "copy"
                rounded(source, copy, name)
            print(f"| {name or 'as it is'} | " + " | ".join(loss(copy, source, folder, widths) for widths in WIDTHS) + " |")
            if name:
                subprocess.run(["rm", "-rf", str(copy)], check=True)


def loss(copy: Path, source: Path, folder: Path, widths: str) -> str:
    up, rows, dense = WIDTHS[widths]
    pack = folder / "pack"
    floe("pack", str(copy), str(pack), "--up", up, "--rows", rows, "--dense", dense)
    text = str(asset("demo", "heldout.md"))
    said = floe("eval", str(pack), "--source", str(source), "--text", text, "--preset", "Exact", "--json")
    subprocess.run(["rm", "-rf", str(pack)], check=True)
    return f"{json.loads(said)}"


def floe(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "floe_chat.app", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    main()
