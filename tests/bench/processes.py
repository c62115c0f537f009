"""Tokens per second of one model in several processes of this machine, by pattern.

The processes share this machine's cores and memory, so that none of this is a reason to start several on one machine
without several cards: it shows what dividing costs. One process computes a token layer by layer here, as the others do;
alone it would take one compiled call.

    .venv/bin/python tests/bench/processes.py [--wide]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from floe_chat.engine.decoder.decoders import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.ways import Compiled
from floe_chat.engine.loader import load
from floe_chat.models.catalog import asset
from floe_chat.models.packing.pack import EXACT

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.engine.parallel.leader import preset_of
from tests.engine.parallel.processes import Processes
from tests.helpers import make_checkpoint, make_pack

PROMPT, NEW = 256, 40
WIDE: dict[str, Any] = {"hidden": 1024, "intermediate": 3584, "experts": 8, "top_k": 2, "layers": 4, "shards": False}


def alone(pack: Path, prompt: list[int]) -> tuple[float, float]:
    """Seconds of the prompt and of a token in one process."""
    loaded = load(pack, None, "cpu", lambda _step, _share: None)[0]
    decoder = loaded.decoder
    assert isinstance(decoder, FusedDecoder) and isinstance(decoder.way, Compiled)
    decoder.way._whole = None  # pyright: ignore[reportPrivateUsage]
    loaded.control.preset, kv, found = preset_of({}), KVCache(), list[float]()
    for ids in (prompt, *([token] for token in prompt[:NEW])):
        began = time.perf_counter()
        decoder.forward(ids, kv)
        found.append(time.perf_counter() - began)
        kv.computed(ids, loaded.control.preset)
    return found[0], statistics.median(found[1:])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--wide", action="store_true", help="random experts a quarter as wide as Mixtral's")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, pack = Path(name), asset("demo", "packed")
        if given.wide:
            pack = folder / "packed"
            make_pack(make_checkpoint(folder / "source", **WIDE), pack, EXACT)
        prompt = torch.randint(3, 250, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
        alone(pack, prompt)  # which brings the file to memory
        figures = {"1": alone(pack, prompt)}
        for size in (2, 4):
            home = folder / str(size)
            home.mkdir()
            group = Processes(size, home)
            for pattern in ("tp", "ep", "s-etp"):
                group.do("open", pack=str(pack), pattern=pattern)
                group.answer(prompt[:20], 4)
                seconds = group.answer(prompt, NEW)[0]["seconds"]
                figures[f"{size} {pattern}"] = seconds[0], statistics.median(seconds[1:])
            group.end()
            group.kill()
    for name, (read, one) in figures.items():
        print(f"{name:8}{PROMPT / read:>10.0f} tokens/s of a prompt{1 / one:>10.1f} tokens/s of an answer")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
