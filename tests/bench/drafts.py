"""How much faster answers come with guessed tokens than without, with as many as the engine finds worth it: the ratio
of their seconds, in turns. What a pass of several tokens costs is `floe-chat bench decode --draft`.

    OMP_WAIT_POLICY=passive python tests/bench/drafts.py PACK [--rounds 5]

The answers to held-out questions, and to each of them asked again in the same chat, which repeats the answer.

    OMP_WAIT_POLICY=passive python tests/bench/drafts.py --synthetic qwen3.6-35b-a3b [--layers 16]
        [--right 0.88 0.8 0.7] [--preset Balanced]

A model of full width and random weights, with a drafting head or assistant that computes all that it would, but whose
first, second and third guesses are right as often as said. It has too few layers, so that guesses take a larger share
of a token than they would: seconds of a guess, in those of a token, are printed for that.

    python tests/bench/drafts.py --synthetic qwen3-30b-a3b --layers 12 --drafter 2 4 6 [--right 0.8 0.8 0.8]

The same with another model of those widths and so many layers as a drafter, one after the other.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from floe_chat.assets.demo.make.facts import read_heldout
from floe_chat.engine import quality_presets
from floe_chat.engine.bench import synthetic
from floe_chat.engine.bench.subject import Subject
from floe_chat.engine.decoder.draft_assistant import DraftAssistant
from floe_chat.engine.decoder.draft_model import DraftModel
from floe_chat.engine.decoder.fused_pass import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.drafts import Depth
from floe_chat.engine.events import Sampling
from floe_chat.engine.generate import Answer, Progress
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.machine.conditions import computing
from floe_chat.models.tokenizer.chat_format import ChatFormat
from torch import Tensor

GREEDY = Sampling(temperature=0.0)


class Answered(NamedTuple):
    """An answer's tokens, and seconds from the first to the last."""

    tokens: list[int]
    seconds: float


def answered(
    loaded: LoadedModel | Subject, prompt: Sequence[int], stop: Sequence[int], depth: Depth | None
) -> Answered:
    """A greedy answer."""
    loaded.telemetry.begin(1, len(prompt), 0.0)
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


class SetHead:
    """Guesses by the model's answer, right as often as set, once the head itself has guessed."""

    def __init__(self, own: Any) -> None:
        """own: of whose guesses a quarter of the vocabulary is thought, as if the text were in it, which is random."""
        self._own = own
        if isinstance(own, DraftAssistant):
            heads = getattr(own, "_heads")  # noqa: B009
            heads[:] = [heads[1]] * len(heads)
        else:
            quarter = [*getattr(own, "_parts")][1]  # noqa: B009
            setattr(own, "_nearest", lambda: quarter)  # noqa: B010
        self.saw: Callable[[KVCache, Sequence[int], Tensor], None] = own.saw

    @property
    def behind(self) -> int:
        """See `DraftHead`."""
        return self._own.behind

    def begin(self, prompt: int, answer: Sequence[int], right: Sequence[float], seed: int) -> None:
        """answer: what the model draws behind so many tokens of a prompt."""
        self._set = prompt, answer, right, random.Random(seed)

    def guess(self, token: int, kv: KVCache, more: Callable[[list[float]], bool]) -> tuple[list[int], list[float]]:
        """See `DraftHead`."""
        prompt, answer, right, drawn = self._set

        def asked(likely: list[float]) -> bool:
            return more(list(right[: len(likely)]))

        tokens, _ = self._own.guess(token, kv, asked)
        following = answer[kv.length + 1 - prompt :][: len(tokens)]
        wrong = [drawn.random() > chance for chance in right]
        return [one + missed for one, missed in zip(following, wrong, strict=False)], list(right[: len(following)])


class SetReader:
    """A drafter's decoder that computes all that it would, but whose guesses are the model's answer, right as often as
    set.

    Attributes:
        model: the drafter.
    """

    model: DraftModel

    def __init__(self, decoder: FusedDecoder, text: Sequence[int], right: float, seed: int) -> None:
        self._decoder, self._text, self._right, self._random = decoder, text, right, random.Random(seed)
        self.forward, self.back, self.vocabulary = decoder.forward, decoder.back, decoder.vocabulary
        self._set = 0

    def few(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """See `Reader`."""
        at = self.model._start + kv.length + len(ids)  # pyright: ignore[reportPrivateUsage]
        right = at < len(self._text) and self._random.random() < self._right
        self._set = self._text[at] if right else 1
        return self._decoder.few(ids, kv)

    def ends_of(self, rows: int) -> SetReader:
        """See `Reader`."""
        self._ends = self._decoder.ends_of(self.vocabulary // 4)  # as if the text were in it, which is random
        return self

    def logits(self, stream: Tensor, bits: int) -> Tensor:
        """See `NativeEnds`."""
        self._ends.logits(stream, bits)
        chosen = torch.zeros(1, self.vocabulary)
        chosen[0, self._set] = math.log(self._right / (1 - self._right) * self.vocabulary)
        return chosen


def drafting_models(spec: synthetic.Spec, layers: Sequence[int], preset: str, right: float, rounds: int) -> None:
    """Print how much faster answers come with drafters of so many layers."""
    subject = synthetic.make(spec, "cpu", lambda _step: None)
    decoder, a = subject.decoder, subject.manifest.architecture
    assert isinstance(decoder, FusedDecoder)
    subject.control.preset = quality_presets.get(preset, subject.manifest)
    prompt = subject.prompt(32)
    for count in layers:
        other = synthetic.make(replace(spec, layers=count), "cpu", lambda _step: None)
        assert isinstance(other.decoder, FusedDecoder)
        other.control.preset = quality_presets.get("Fast", other.manifest)
        depth = Depth(count / spec.layers)
        with computing(None, a.hidden, a.intermediate):
            for number in range(rounds):
                decoder.head = None
                plain = answered(subject, prompt, (), None)
                reader = SetReader(other.decoder, [*prompt, *plain.tokens], right, number)
                reader.model = DraftModel("It", reader, other.control, other.window, 1.0)  # pyright: ignore[reportArgumentType]
                decoder.draft_with(reader.model)
                drafted = answered(subject, prompt, (), depth)
                assert drafted.tokens == plain.tokens
                counts = subject.telemetry.answer
                guess, read = depth._guessing, depth._reading  # pyright: ignore[reportPrivateUsage]
                print(
                    f"{count} of {spec.layers} layers, {preset}, {right} right: {plain.seconds / drafted.seconds:.2f}x"
                    f" {plain.seconds / len(plain.tokens) * 1e3:.1f} ms a token, {counts.accepted} of {counts.drafted}"
                    f" accepted, a guess takes {guess:.2f} of a token, one of a prompt {read:.2f}",
                    flush=True,
                )


def synthetic_model(spec: synthetic.Spec, preset: str, right: Sequence[float], rounds: int) -> None:
    """Print how much faster answers come."""
    subject = synthetic.make(spec, "cpu", lambda _step: None)
    head = synthetic.head(spec) or synthetic.assistant_of(spec)
    decoder: Any = subject.decoder
    a = subject.manifest.architecture
    assert head is not None and isinstance(decoder, FusedDecoder)
    decoder.draft_by(head, spec.dense)
    own = SetHead(decoder.head)
    subject.control.preset = quality_presets.get(preset, subject.manifest)
    prompt, depth = subject.prompt(32), Depth()
    with computing(None, a.hidden, a.intermediate):
        for number in range(rounds):
            decoder.head = None
            plain = answered(subject, prompt, (), None)
            decoder.head = own  # pyright: ignore[reportAttributeAccessIssue]
            own.begin(len(prompt), plain.tokens, right, number)
            drafted = answered(subject, prompt, (), depth)
            assert drafted.tokens == plain.tokens
            counts = subject.telemetry.answer
            guess = depth._guessing  # pyright: ignore[reportPrivateUsage]
            print(
                f"{preset}: {plain.seconds / drafted.seconds:.2f}x {plain.seconds / len(plain.tokens) * 1e3:.1f} ms a"
                f" token, {counts.accepted} of {counts.drafted} accepted, a guess takes {guess:.2f} of a token",
                flush=True,
            )


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, nargs="?")
    parser.add_argument("--synthetic", default="qwen3.6-35b-a3b", choices=synthetic.MODELS)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--right", type=float, nargs=3, default=(0.88, 0.8, 0.7))
    parser.add_argument("--preset", default="Balanced")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafter", type=int, nargs="+", default=())
    asked = parser.parse_args()
    if asked.drafter:
        spec = synthetic.Spec(asked.synthetic, asked.layers)
        drafting_models(spec, asked.drafter, asked.preset, asked.right[0], asked.rounds)
        return
    if asked.pack is None:
        synthetic_model(synthetic.Spec(asked.synthetic, asked.layers), asked.preset, asked.right, asked.rounds)
        return
    of_pack(asked.pack, asked.rounds)


if __name__ == "__main__":
    main()
