"""How much faster an answer comes with guessed tokens that are right, and with none that are.

    python tests/bench/drafts.py [--synthetic qwen3.6-35b-a3b] [--layers 8] [--tokens 64] [--rounds 5]
    python tests/bench/drafts.py PACK [--tokens 200] [--rounds 5]

Of a model of full width: milliseconds of a token where 1 to 4 are computed in a pass, all of them right, with the head.
Of a pack: an answer that copies a text word by word, and one that repeats nothing, as in a chat, with guesses (however
many the engine finds worth it) and without, in turns: the median of the ratios of their tokens per second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from floe_chat.engine import quality_presets
from floe_chat.engine.bench import subject as subjects
from floe_chat.engine.bench import synthetic
from floe_chat.engine.bench.subject import Subject
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.drafts import Depth
from floe_chat.engine.events import MOST_TOGETHER, Sampling
from floe_chat.engine.generate import Answer
from floe_chat.engine.machine.conditions import computing
from floe_chat.engine.sampling import Sampler

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
        assert found is not None and len(found.tokens) == 1 + found.guessed, "a guess is wrong"
        times.append((time.perf_counter() - began) / len(found.tokens))
        kv.computed([token, *found.tokens[:-1]], subject.control.preset)
        drawn += found.tokens
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


def speed(subject: Subject, prompt: Sequence[int], tokens: int, depth: Depth | None) -> float:
    """Tokens per second of an answer."""
    answer = Answer(
        *(subject.decoder, KVCache(), prompt, Sampling(seed=0)),
        max_new_tokens=tokens,
        stop_ids=(),
        window=subject.window,
        control=subject.control,
        telemetry=subject.telemetry,
        depth=depth,
    )
    at = list[float]()
    while not answer.end:
        at += [one.at for one in answer.step() if one.token is not None and one.at is not None]
    return (len(at) - 1) / sum(after - before for before, after in pairwise(at))


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
    text = "The sea is salt, and the sea is deep, and what is deep is cold. " * 8
    subject = subjects.from_pack(asked.pack, "cpu", text)
    for name, prompt in (("repeats", subject.prompt(200)), ("does not", [*range(300, 340)])):
        ratios, depth = list[float](), Depth()
        for _ in range(asked.rounds):
            plain = speed(subject, prompt, asked.tokens, None)
            ratios.append(speed(subject, prompt, asked.tokens, depth) / plain)
        answer = subject.telemetry.answer
        accepted = f"{answer.accepted} of {answer.drafted} accepted"
        print(f"{name}: {median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}), {accepted}", flush=True)


if __name__ == "__main__":
    main()
