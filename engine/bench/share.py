"""`floe-chat bench share`: what a chat with a model gives on this machine, as one small record that people can post.

It holds no text and no name but the machine's parts and a published model's: nothing of a person, no path, no folder's
name. The answers go the way of a chat's, so that placement, pool and predictors are those of a chat on this machine.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...kernels.rule import Rule
from ...models import catalog
from ...models.errors import UsageError
from ...models.pack.manifest import Manifest
from ...models.tokenizer.chat_process import encode
from .. import quality_presets
from ..events import Advanced, Loaded, Rows, Sampling, Stats
from ..generate import KVCache, generate
from ..loader import LoadedModel, load
from ..machine import hardware

FORMAT = 1
"""Changes whenever a field changes its meaning."""
_ROWS = (
    *("ready", "coming", "copied", "on_cpu", "left_out", "in_place", "expert_hits", "recall", "precision"),
    *("expert_recall", "substituted", "moved_per_token", "waited_per_token", "link_peak", "link_busy", "link_hidden"),
    *("pool", "pool_used", "up", "dense", "whole"),
)


@dataclass(frozen=True, slots=True)
class ShareRun:
    """What to measure.

    Attributes:
        preset: None for the default one. rule: set by hand, in its place. vram: the most of the card's memory, bytes.
        prompt, tokens: how many are read and written. answers: that count, after one that warms up.
    """

    pack: Path
    preset: str | None
    rule: Rule | None
    device: str
    vram: int | None
    advanced: Advanced
    prompt: int
    tokens: int
    answers: int


def run(plan: ShareRun, text: str, report: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Answer a text's beginning, and return the record.

    Raises:
        UsageError: a preset or device that does not exist, or a text or window too short for the tokens.
        FloeError: as `load`.
    """
    manifest = Manifest.read(plan.pack)
    custom = None if plan.rule is None else quality_presets.custom(manifest, plan.rule)

    def step(what: str, _share: float) -> None:
        report(what, 0, 1)

    given = plan.pack, plan.preset, plan.device, step
    loaded, facts = load(*given, vram=plan.vram, advanced=plan.advanced)
    loaded.control.preset = preset = custom or loaded.control.preset
    prompt = _prompt(plan, text, loaded.window)
    found: list[Stats] = []
    for number in range(plan.answers + 1):
        report(f"Answer {number} of {plan.answers}", number, plan.answers + 1)
        found.append(_answer(loaded, number, prompt, plan.tokens))
    a = manifest.architecture
    return {
        "floe_chat_share": FORMAT,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": _machine(),
        "model": {
            "name": _public_name(plan.pack, manifest),
            "architecture": asdict(a),
            "weights": facts.widths,
            "bytes": sum(entry.size for entry in manifest.files.values()),
        },
        "preset": {
            "name": preset.name,
            "rule": asdict(preset.rule),
            "note": quality_presets.differs(preset.name, manifest),
        },
        "run": {
            "device": facts.device,
            "kernels": facts.backend,
            "settings": list(facts.advanced),
            "vram_limit": plan.vram,
            "answers": plan.answers,
            "prompt_tokens": plan.prompt,
            "new_tokens": plan.tokens,
        },
        **_figures(found[1:], facts),
        "versions": {name: version(name) for name in ("floe-chat", "torch")} | {"python": platform.python_version()},
    }


def _prompt(plan: ShareRun, text: str, window: int) -> list[int]:
    if plan.prompt + plan.tokens > window:
        has = f"The model's window is {window:,}; {plan.prompt:,} + {plan.tokens:,} are more."
        raise UsageError("Prompt and answer do not fit the window", has, "Give --prompt or --tokens a smaller number.")
    ids = encode(plan.pack, text)
    if len(ids) < plan.prompt:
        has = f"The built-in text has {len(ids):,} tokens for this model."
        raise UsageError(f"There is no text of {plan.prompt:,} tokens", has, "Give --prompt a smaller number.")
    return ids[: plan.prompt]


def _answer(loaded: LoadedModel, number: int, prompt: Sequence[int], tokens: int) -> Stats:
    loaded.telemetry.begin(number, len(prompt), loaded.telemetry.clock())
    for _ in generate(
        *(loaded.decoder, KVCache(), prompt, Sampling(temperature=0)),
        max_new_tokens=tokens,
        stop_ids=(),
        window=loaded.window,
        control=loaded.control,
        telemetry=loaded.telemetry,
    ):
        pass
    return loaded.telemetry.stats(
        kv_bytes=0, vram_bytes=loaded.vram_bytes(), context_used=0, context_window=loaded.window
    )


def _figures(found: Sequence[Stats], facts: Loaded) -> dict[str, Any]:
    """Medians of the answers; of what is a part of something, the last answer's, so that parts add up."""
    last = found[-1]

    def median(name: str) -> float | None:
        values = [value for stats in found if (value := getattr(stats, name)) is not None]
        return statistics.median(values) if values else None

    return {
        "figures": {
            "tokens_s": median("decode_tps_mean"),
            "tokens_s_of_each": [stats.decode_tps_mean for stats in found],
            "first_token_s": median("first_token_s"),
            "prompt_tokens_s": median("prefill_tps"),
            "active_neurons": median("active_neurons"),
            "bytes_per_token": median("bytes_per_token"),
            "ram_bytes": last.ram_bytes,
            "vram_bytes": last.vram_bytes,
            "resident_bytes": facts.memory_bytes,
        },
        "rows": None if last.rows is None else _rows(last.rows),
        "simulated": last.rows is not None and last.rows.virtual,
    }


def _rows(rows: Rows) -> dict[str, Any]:
    return {name: getattr(rows, name) for name in _ROWS}


def _machine() -> dict[str, Any]:
    found = hardware.probe(Path.cwd())
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": found.cpu,
        "cores": found.cores_usable,
        "instructions": found.cpu_isa,
        "ram_bytes": found.ram_total,
        "gpus": [{"name": gpu.name, "vram_bytes": gpu.vram_total} for gpu in found.gpus],
    }


def _public_name(pack: Path, manifest: Manifest) -> str | None:
    """The name of a published model; None of another, whose name may be private."""
    if pack == catalog.find(catalog.DEMO):
        return catalog.DEMO
    return manifest.source.called if manifest.source.commit else None
