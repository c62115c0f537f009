"""What each preset costs and gains on the demo model: KL divergence against Exact, and decode speed.

Run: .venv/bin/python tests/bench/presets.py. The last line is one JSON object.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from floe_chat.engine import quality
from floe_chat.engine.events import Sampling, Stats
from floe_chat.engine.generate import KVCache, generate
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.models.calibration import read_tokens
from floe_chat.models.catalog import asset
from floe_chat.models.chat_format import ChatFormat
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.pack import EXACT, pack

QUESTION = "What is an expert?"
ANSWER_TOKENS = 64
RUNS = 3


def silent(step: str, share: float) -> None:
    """No progress: the table is the output."""


def logits_of(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    """(N, T) tokens -> (N * T, V) log-probabilities."""
    with torch.inference_mode():
        return loaded.model(input_ids=tokens).logits.float().log_softmax(-1).flatten(0, 1)


def decode(loaded: LoadedModel, prompt: list[int]) -> Stats:
    """The counters of one greedy answer."""
    loaded.telemetry.begin(0, len(prompt), time.perf_counter())
    steps = generate(
        loaded.model,
        KVCache(),
        prompt,
        Sampling(temperature=0),
        max_new_tokens=ANSWER_TOKENS,
        stop_ids=(),
        window=loaded.window,
        control=loaded.control,
        telemetry=loaded.telemetry,
    )
    for _ in steps:
        pass
    return loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=loaded.window)


def main() -> None:
    """Measure every preset of the shipped demo pack against a lossless pack of its checkpoint."""
    source, packed = asset("demo", "checkpoint"), asset("demo", "packed")
    text = asset("demo", "manual.md").read_text(encoding="utf-8")
    tokens = read_tokens(source, text)
    prompt = ChatFormat(packed).encode([{"role": "user", "content": QUESTION}])
    with tempfile.TemporaryDirectory() as folder:
        pack(Checkpoint(source), Path(folder) / "exact", EXACT, tokens[:1], "exact")
        exact, _ = load(Path(folder) / "exact", "Exact", "cpu", silent)
        reference = logits_of(exact, tokens)
        rows: list[dict[str, Any]] = [{"preset": "Exact (16 bit)", "kl_mean": 0.0, **_speed(exact, prompt)}]
    loaded, _ = load(packed, None, "cpu", silent)
    widths = loaded.packed.manifest.widths.describe()
    for name in ("(no sparsity)", *quality.available(loaded.packed.manifest)):
        loaded.control.sparsity = 0.0 if name.startswith("(") else quality.get(name, loaded.packed.manifest).sparsity
        ours = logits_of(loaded, tokens)
        kl = (reference.exp() * (reference - ours)).sum(-1)
        same = (reference.argmax(-1) == ours.argmax(-1)).float().mean()
        quality_row = {"kl_mean": float(kl.mean()), "kl_99": float(kl.quantile(0.99)), "same_top": float(same)}
        rows.append({"preset": name, **quality_row, **_speed(loaded, prompt)})
    print(f"demo model, {widths}, {tokens.numel()} tokens of the manual, greedy decode of {ANSWER_TOKENS} tokens")
    for row in rows:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()))
    print(json.dumps({"bench": "presets", "widths": widths, "rows": rows}))


def _speed(loaded: LoadedModel, prompt: list[int]) -> dict[str, float | None]:
    decode(loaded, prompt)
    runs = sorted((decode(loaded, prompt) for _ in range(RUNS)), key=lambda stats: stats.decode_tps_mean or 0.0)
    middle = runs[len(runs) // 2]
    return {
        "decode_tps": middle.decode_tps_mean,
        "active": middle.active_neurons,
        "bytes_per_token": middle.bytes_per_token,
    }


if __name__ == "__main__":
    main()
