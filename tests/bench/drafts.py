"""How much faster answers come with guessed tokens than without.

    python tests/bench/drafts.py PACK [--rounds 5]

The answers to held-out questions, and to each of them asked again in the same chat, which repeats the answer, with as
many guesses as the engine finds worth it and without, in turns: the ratio of their seconds. What a pass of several
tokens costs is `floe-chat bench decode --draft`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from floe_chat.assets.demo.make.facts import read_heldout
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.drafts import Depth
from floe_chat.engine.events import Sampling
from floe_chat.engine.generate import Answer, Progress
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.models.tokenizer.chat_format import ChatFormat

GREEDY = Sampling(temperature=0.0)


class Answered(NamedTuple):
    """An answer's tokens, and seconds from the first to the last."""

    tokens: list[int]
    seconds: float


def answered(loaded: LoadedModel, prompt: Sequence[int], stop: Sequence[int], depth: Depth | None) -> Answered:
    """A greedy answer."""
    answer = Answer(
        *(loaded.decoder, KVCache(), prompt, GREEDY),
        max_new_tokens=300,
        stop_ids=stop,
        window=loaded.window,
        control=loaded.control,
        telemetry=loaded.telemetry,
        depth=depth,
    )
    steps, began, tokens = list[Progress](), 0.0, list[int]()
    while not answer.end:
        steps = answer.step()
        tokens += [one.token for one in steps if one.token is not None]
        began = began or (time.perf_counter() if tokens else 0.0)
    return Answered(tokens, time.perf_counter() - began)


def of_pack(folder: Path, rounds: int) -> None:
    """Print how much faster answers to the held-out questions come, and the same answers asked for again."""
    loaded, _ = load(folder, None, "cpu", lambda _step, _share: None)
    chat, questions = ChatFormat(folder), [check["question"] for check in read_heldout() if "question" in check]
    depth, ratios = Depth(), dict[str, list[float]]()
    for _ in range(rounds):
        took = dict[str, list[float]]()
        for question in questions[:40]:
            messages = [{"role": "user", "content": question}]
            for name in ("asked", "asked again"):
                prompt = chat.encode(messages)
                plain, drafted = (answered(loaded, prompt, chat.stop_ids, how) for how in (None, depth))
                assert plain.tokens == drafted.tokens
                for kind, one in (("plain", plain), ("drafted", drafted)):
                    took.setdefault(f"{name} {kind}", []).append(one.seconds)
                text = chat.decoder().push(plain.tokens)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
        for name in ("asked", "asked again"):
            ratios.setdefault(name, []).append(sum(took[f"{name} plain"]) / sum(took[f"{name} drafted"]))
    for name, found in ratios.items():
        print(f"{name}: {median(found):.2f}x ({min(found):.2f} to {max(found):.2f})", flush=True)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    of_pack(asked.pack, asked.rounds)


if __name__ == "__main__":
    main()
