"""llama.cpp on the same card, its experts of some layers on the CPU (`--n-cpu-moe`), at 4 bit.

Needs llama-bench of a CUDA build, on the path or named by LLAMA_BENCH, and a GGUF of Mixtral-8x7B's sizes named by
LLAMA_MODEL; without that, one of random weights is made if this Python has gguf.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from floe_chat.engine.bench.peer import llama, recipes
from floe_chat.engine.bench.synthetic import Spec

from .stages import Context, SkippedError

ON_CPU = (32, 28, 24, 16, 8, 0)
"""Layers whose experts the CPU has."""
_LAYERS = 32


def run(context: Context) -> None:
    """A row for each number of layers on the CPU."""
    program = os.environ.get("LLAMA_BENCH", shutil.which("llama-bench"))
    if not program:
        raise SkippedError("there is no llama-bench on the path, and LLAMA_BENCH names none")
    model = Path(os.environ["LLAMA_MODEL"]) if "LLAMA_MODEL" in os.environ else _made(context)
    for count in ON_CPU if context.real else ON_CPU[:1]:
        if context.left() < 20:
            context.unfinished = "no time was left for all placements"
            return
        command = [program, "-m", str(model), "-ngl", "99", "--n-cpu-moe", str(count), "-p", "512", "-n", "64"]
        command += ["-r", "2", "-o", "json"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=context.left())
        if ran.returncode:
            words = ran.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
            context.row(layers_on_CPU=count, note=f"llama-bench failed: {words[0][:120]}")
            continue
        for found in json.loads(ran.stdout):
            context.row(
                layers_on_CPU=count,
                test="decode" if found["n_gen"] else f"prompt of {found['n_prompt']}",
                tokens_s=float(found["avg_ts"]),
                backends=found.get("backends"),
                build=found.get("build_commit"),
            )


def _made(context: Context) -> Path:
    if importlib.util.find_spec("gguf") is None:
        raise SkippedError("LLAMA_MODEL names no GGUF, and this Python has no gguf to make one")
    sizes = recipes.PeerSizes.of(Spec("mixtral-8x7b", _LAYERS).config())
    recipe = recipes.Recipe("Q4_0", sizes, _LAYERS)
    file = recipe.file(context.folder)
    if not file.exists():
        llama.make_file(sys.executable, recipe, file)
    return file
