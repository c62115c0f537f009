"""Texts that go through a model of full width together, against one after the other.

    python tests/bench/together.py [--synthetic mixtral-8x7b] [--layers 3] [--tokens 64] [--rounds 7]

Each round draws nothing and computes a token of each of 1 to 4 texts, in turns. The figure is milliseconds per layer
and token, and how many times as many tokens come in a second as with one text.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from floe_chat.engine import quality_presets
from floe_chat.engine.bench import synthetic
from floe_chat.engine.bench.subject import Subject
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.machine.conditions import computing

MOST = 4
STEPS = 4  # of a round, for each number of texts


def texts(subject: Subject, tokens: int) -> list[KVCache]:
    """Prompts of random tokens, each another one, in keys and values of its own."""
    found = [KVCache(), *(subject.decoder.beside() or KVCache() for _ in range(MOST - 1))]
    for number, kv in enumerate(found):
        drawn = torch.Generator().manual_seed(number)
        ids = torch.randint(0, subject.model.config.vocab_size, (tokens,), generator=drawn).tolist()
        subject.decoder.forward(ids, kv)
        kv.computed(ids, subject.control.preset)
    return found


def seconds(subject: Subject, kvs: list[KVCache], drawn: torch.Generator) -> float:
    """Of a token of each text, for each of them."""
    began = time.perf_counter()
    for _ in range(STEPS):
        tokens = torch.randint(0, subject.model.config.vocab_size, (len(kvs),), generator=drawn).tolist()
        if len(kvs) == 1:
            subject.decoder.forward(tokens, kvs[0])
        else:
            assert subject.decoder.together(tokens, kvs) is not None
        for token, kv in zip(tokens, kvs, strict=True):
            kv.computed([token], subject.control.preset)
    return (time.perf_counter() - began) / STEPS / len(kvs)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--synthetic", default="mixtral-8x7b", choices=synthetic.MODELS)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--presets", nargs="*", default=["High", "Balanced", "Fast"])
    asked = parser.parse_args()
    subject = synthetic.make(synthetic.Spec(asked.synthetic, asked.layers), "cpu", lambda _step: None)
    a = subject.manifest.architecture
    with computing(None, a.hidden, a.intermediate), torch.inference_mode():
        for name in asked.presets:
            subject.control.preset = quality_presets.get(name, subject.manifest)
            drawn, times = torch.Generator().manual_seed(1), dict[tuple[int, int], list[float]]()
            kvs: dict[int, list[KVCache]] = {}
            for _ in range(asked.rounds + 1):  # the first warms up
                for layers in (1, asked.layers):  # each with keys and values of its own
                    with subject.first_layers(layers):
                        own = kvs[layers] = kvs.get(layers) or texts(subject, asked.tokens)
                        for count in range(1, MOST + 1):
                            times.setdefault((layers, count), []).append(seconds(subject, own[:count], drawn))
            middle = {key: median(found[1:]) for key, found in times.items()}
            words: list[str] = []
            for count in range(1, MOST + 1):
                layer = (middle[asked.layers, count] - middle[1, count]) / (asked.layers - 1)
                one = (middle[asked.layers, 1] - middle[1, 1]) / (asked.layers - 1)
                words.append(f"{count}: {layer * 1e3:.2f} ms, {one / layer:.2f}x")
            print(f"{name}: " + "; ".join(words), flush=True)


if __name__ == "__main__":
    main()
