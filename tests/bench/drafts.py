"""How much faster an answer comes with guessed tokens that are right, and with none that are.

    python tests/bench/drafts.py [--synthetic qwen3.6-35b-a3b] [--layers 8] [--tokens 64] [--rounds 5]
    python tests/bench/drafts.py PACK [--rounds 5]

Of a model of full width: milliseconds of a token where 1 to 4 are computed in a pass, all of them right, with the head.
Of a pack: the answers to held-out questions, and to each of them asked again in the same chat, which repeats the
answer, with as many guesses as the engine finds worth it and without, in turns: the ratio of their seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from floe_chat.assets.demo.make.facts import read_heldout
from floe_chat.engine import quality_presets
from floe_chat.engine.bench import synthetic
from floe_chat.engine.bench.subject import Subject
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.drafts import Depth
from floe_chat.engine.events import MOST_TOGETHER, Sampling
from floe_chat.engine.generate import Answer, Progress
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.machine.conditions import computing
from floe_chat.engine.sampling import Sampler
from floe_chat.models.tokenizer.chat_format import ChatFormat

GREEDY = Sampling(temperature=0.0)


def follows(subject: Subject, prompt: Sequence[int], count: int, answer: list[int], tokens: int) -> float:
    """Seconds of each of the next tokens, `count` in a pass. answer: what they are; is filled if it is empty."""
    kv, sampler, times = KVCache(), Sampler(GREEDY, prompt), list[float]()
    subject.decoder.forward(prompt[:-1], kv)
    kv.computed(prompt[:-1], subject.control.preset)
    known, drawn = list(answer), list[int]()
    token = prompt[-1]
    while len(drawn) < tokens:
        began = time.perf_counter()
        guessed = known[len(drawn) : len(drawn) + count - 1]
        found = subject.decoder.several(token, kv, sampler, count, (), guessed)
        assert found is not None and len(found[0]) == 1 + found[2], "a guess is wrong"
        times.append((time.perf_counter() - began) / len(found[0]))
        kv.computed([token, *found[0][:-1]], subject.control.preset)
        drawn += found[0]
        token = drawn[-1]
    answer[:] = answer or drawn
    return median(times)


def synthetic_model(name: str, layers: int, tokens: int, rounds: int, presets: Sequence[str]) -> None:
    """Print how long a token takes, by how many are computed in a pass."""
    subject = synthetic.make(synthetic.Spec(name, layers), "cpu", lambda _step: None)
    a = subject.manifest.architecture
    with computing(None, a.hidden, a.intermediate), torch.inference_mode():
        for preset in presets:
            subject.control.preset = quality_presets.get(preset, subject.manifest)
            prompt, answer, times = subject.prompt(32), list[int](), dict[int, list[float]]()
            for _ in range(rounds + 1):  # the first warms up
                for count in range(1, MOST_TOGETHER + 1):
                    times.setdefault(count, []).append(follows(subject, prompt, count, answer, tokens))
            middle = {count: median(found[1:]) for count, found in times.items()}
            parts = [f"{count}: {took * 1e3:.2f} ms, {middle[1] / took:.2f}x" for count, took in middle.items()]
            print(f"{preset}: " + "; ".join(parts), flush=True)


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
    parser.add_argument("pack", type=Path, nargs="?")
    parser.add_argument("--synthetic", default="qwen3.6-35b-a3b", choices=synthetic.MODELS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--presets", nargs="*", default=["High", "Balanced", "Fast"])
    asked = parser.parse_args()
    if asked.pack is None:
        synthetic_model(asked.synthetic, asked.layers, asked.tokens, asked.rounds, asked.presets)
        return
    of_pack(asked.pack, asked.rounds)


if __name__ == "__main__":
    main()
