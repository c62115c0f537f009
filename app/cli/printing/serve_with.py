"""The command lines that serve a model's checkpoint with other engines, and the memory that each will need."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ....engine.planning.footprint import kv_bytes
from ....models import catalog
from ....models.catalog_entry import CatalogEntry
from ....models.errors import UsageError
from ....models.gguf.parts import is_gguf
from ....models.pack.manifest import Manifest
from ....models.typed_names import hub_repo

_QUANTIZED = 4.85  # bits of a weight in llama.cpp's Q4_K_M, by its own table of quantizations (Llama 3.1 8B)
_GPU_REST = 2 << 30  # bytes for activations, graphs and libraries, a rough allowance
_CPU_REST = 1 << 29


@dataclass(frozen=True, slots=True)
class Serving:
    """One engine. `lines`: to be run in this order. `bytes`: an estimate of the memory. `at`: its address then."""

    engine: str
    lines: tuple[str, ...]
    bytes: int
    where: str
    at: str


def servings(name: str, context: int) -> tuple[str, list[Serving]]:
    """What serves the checkpoint of the model `name` with a window of `context` tokens, and the checkpoint itself.

    The memory is computed from the architecture: weights as published (for llama-server as Q4_K_M, or as the GGUF file
    has them), 16-bit keys and values of one chat, and an allowance for the rest.

    Raises:
        UsageError: there is no such model, or its pack was made from a folder that is not known. FloeError: it cannot
            be read.
    """
    entry = catalog.described(name)
    context = min(context, entry.sizes.window or context)
    kept = kv_bytes(entry.sizes, 16).of(context)
    if entry.folder is not None and is_gguf(entry.folder) and not entry.packed:
        file = shlex.quote(str(entry.folder))
        return str(entry.folder), [_llama((), file, entry.folder.stat().st_size + kept, context)]
    place, revision = _checkpoint(entry, name)
    quoted, pinned = shlex.quote(place), f" --revision {revision}" if revision else ""
    on_card = entry.checkpoint_bytes + kept + _GPU_REST
    quantized = round(entry.sizes.parameters * _QUANTIZED / 8)
    made = Path(place).name.lower()
    converted, small = shlex.quote(f"{made}-bf16.gguf"), shlex.quote(f"{made}-q4_k_m.gguf")
    fetched = quoted if Path(place).is_dir() else shlex.quote(made)
    lines = [] if Path(place).is_dir() else [f"hf download {quoted} --local-dir {fetched}{pinned}"]
    lines += [
        f"python convert_hf_to_gguf.py {fetched} --outtype bf16 --outfile {converted}",
        f"llama-quantize {converted} {small} Q4_K_M",
    ]
    vllm = f"vllm serve {quoted}{pinned} --max-model-len {context} --host 127.0.0.1 --port 8000"
    sglang = f"python3 -m sglang.launch_server --model-path {quoted}{pinned} --context-length {context}"
    return place, [
        Serving("vLLM", (vllm,), on_card, "GPU memory", "http://127.0.0.1:8000"),
        Serving(
            "SGLang",
            (f"{sglang} --host 127.0.0.1 --port 30000",),
            on_card,
            "GPU memory",
            "http://127.0.0.1:30000",
        ),
        _llama(tuple(lines), small, min(quantized, entry.checkpoint_bytes) + kept, context),
    ]


def _llama(before: tuple[str, ...], file: str, taken: int, context: int) -> Serving:
    line = f"llama-server -m {file} -c {context} --jinja --host 127.0.0.1 --port 8080"
    where = "RAM and GPU memory together"
    return Serving("llama-server", (*before, line), taken + _CPU_REST, where, "http://127.0.0.1:8080")


def _checkpoint(entry: CatalogEntry, name: str) -> tuple[str, str]:
    """The hub id or folder of the checkpoint, and its commit, "" where that is not known."""
    if not entry.packed or entry.folder is None:
        place = entry.repo or str(entry.folder or "")
        if not place:
            raise UsageError(f"{name} has no checkpoint", "It is offered as a ready pack only.", "")
        return place, ""
    source = Manifest.read(entry.folder).source
    listed = catalog.published(source.name)
    repo = listed.repo if listed is not None else None
    if repo is None and (typed := hub_repo(source.name)) is not None:
        repo = typed.id
    if repo is None:
        cause = f"Its pack was made from {source.called}, a folder or file whose place is not recorded."
        raise UsageError(f"The checkpoint of {name} is not known", cause, "Give its folder instead of NAME.")
    return repo, source.commit or ""
