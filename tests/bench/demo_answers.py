"""How many held-out questions the packed demo model answers with every key fact, preset by preset (greedy answers).

Run: .venv/bin/python tests/bench/demo_answers.py [PACK] [--presets Balanced Fast] [--drop 0.64 [--major 0.72]], which
leaves out experts, or halves, whose score is below such a share of the mean beside what each preset leaves out.
`python -m floe_chat.assets.demo.make CHECKPOINT --check-only` asks the 16-bit checkpoint the same. The last line is one
JSON object, with the numbers of the questions that were missed, to compare two packs question by question.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from floe_chat.assets.demo.make.check import ANSWER_TOKENS, missing_facts
from floe_chat.assets.demo.make.facts import FactCheck, read_heldout
from floe_chat.engine import quality_presets
from floe_chat.engine.events import Sampling
from floe_chat.engine.generate import KVCache, generate
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.models.catalog import asset
from floe_chat.models.tokenizer.chat_format import ChatFormat


def silent(step: str, share: float) -> None:
    """No progress: the table is the output."""


def reply(loaded: LoadedModel, chat: ChatFormat, check: FactCheck) -> str:
    """The greedy answer to a check's question, after the greedy answers to the questions before it."""
    messages: list[dict[str, str]] = []
    for question in [*check.get("history", []), check.get("question", "")]:
        messages.append({"role": "user", "content": question})
        steps = generate(
            loaded.decoder,
            KVCache(),
            chat.encode(messages),
            Sampling(temperature=0),
            max_new_tokens=ANSWER_TOKENS,
            stop_ids=chat.stop_ids,
            window=loaded.window,
            control=loaded.control,
            telemetry=loaded.telemetry,
        )
        text = chat.decoder().push([step.token for step in steps if step.token is not None])
        messages.append({"role": "assistant", "content": text})
    return messages[-1]["content"]


def main() -> None:
    """Print a line per preset, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path, nargs="?", default=asset("demo", "packed"))
    parser.add_argument("--presets", nargs="*", default=["High", "Balanced", "Fast"])
    parser.add_argument("--drop", type=float, help="leave out experts below this share of the mean score")
    parser.add_argument("--major", type=float, help="below this share, halves of experts")
    options = parser.parse_args()
    given = {name: share for name in ("drop", "major") if (share := getattr(options, name)) is not None}
    loaded, _ = load(options.pack, None, "cpu", silent)
    chat, checks = ChatFormat(options.pack), read_heldout()
    right: dict[str, int] = {}
    missed: dict[str, list[int]] = {}
    dropped: dict[str, float] = {}
    for name in options.presets:
        preset = quality_presets.get(name, loaded.packed.manifest)
        loaded.control.preset = replace(preset, rule=replace(preset.rule, **given))
        missed[name] = []
        left, chosen = 0, 0  # halves of experts, of the last answer to each check
        for number, check in enumerate(checks):
            if missing_facts(check, reply(loaded, chat, check)):
                missed[name].append(number)
            loaded.telemetry.settle()
            left += sum(layer.dropped for layer in loaded.telemetry.layers)
            chosen += 2 * sum(sum(layer.calls) for layer in loaded.telemetry.layers)
        right[name], dropped[name] = len(checks) - len(missed[name]), left / chosen
        share = right[name] / len(checks)
        print(f"{name}: {right[name]} of {len(checks)} right ({share:.1%}), {dropped[name]:.1%} dropped", flush=True)
    found = {"checks": len(checks), "right": right, "dropped": dropped, "missed": missed} | given
    print(json.dumps({"bench": "demo_answers", "widths": loaded.packed.manifest.widths.describe()} | found))


if __name__ == "__main__":
    main()
