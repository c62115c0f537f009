"""Process 0 of a test's group: it does what it reads from stdin, a JSON object a line, and prints what came of it."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from floe_chat.engine.decoder import fused_pass, layers
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.events import Load, Sampling, SpreadBy
from floe_chat.engine.experts.moe_layer import Cancelled
from floe_chat.engine.generate import generate
from floe_chat.engine.loader import LoadedModel, load_together
from floe_chat.engine.parallel.group import Group
from floe_chat.engine.parallel.leading import group, lead
from floe_chat.engine.quality_presets import Preset
from floe_chat.kernels.rule import Rule
from floe_chat.models.errors import FloeError
from floe_chat.models.transformers_import import import_model_code
from torch import Tensor

_forked: dict[int, int] = {}  # process ids by rank


def silent(_step: str, _share: float) -> None:
    """Nobody waits for progress."""


class Leader:
    """The commands, a method each; `kv` keeps the conversation from one answer to the next."""

    def __init__(self) -> None:
        self.loaded: LoadedModel | None = None
        self.kv = KVCache()

    def open(self, pack: str, pattern: str, balanced: bool = False) -> dict[str, Any]:
        """Open a model in all processes; says what this one holds of its first layer, and why it computes so."""
        command = Load(pack, None, "cpu", spread=SpreadBy(pattern, balanced))
        spread = lead(command, silent)
        assert spread is not None
        self.kv = KVCache()
        self.loaded, event = load_together(lambda: Path(pack), command, silent, spread)
        layer = next(one for one in self.loaded.model.modules() if hasattr(one, "spread"))
        held = layer.packed.rows.data.shape[:2], layer.packed.signal.q.shape[:2]
        return {"held": held, "reason": event.reason, "window": event.context_window}

    def answer(
        self,
        prompt: list[int],
        new: int,
        into: str,
        rule: dict[str, Any],
        fresh: bool,
        stop_after: int = -1,
        signal: Sequence[int] = (),
    ) -> dict[str, Any]:
        """A greedy answer; the logits of each pass go into a file.

        Args:
            stop_after: passes after whose begin it is told to stop. signal: to be sent after some passes: how many, the
                number of a process, and of the signal.
        """
        loaded = self._open()
        if fresh:
            self.kv = KVCache()
        loaded.control.preset = preset_of(rule)
        loaded.control.cancelled.clear()
        loaded.telemetry.begin(1, len(prompt), 0.0)
        seen, seconds = list[Tensor](), list[float]()
        decoder, forward, counts = loaded.decoder, loaded.decoder.forward, loaded.telemetry.layers

        def noted(ids: Sequence[int], kv: KVCache) -> Tensor:
            if len(seen) == stop_after:
                threading.Timer(0.002, loaded.control.cancelled.set).start()
            if signal and len(seen) == signal[0]:
                os.kill(_group().members.all[signal[1]].pid, signal[2])
            seen.append(torch.empty(0))
            began = time.perf_counter()
            seen[-1] = forward(ids, kv)
            seconds.append(time.perf_counter() - began)
            return seen[-1]

        decoder.forward = noted
        traffic = _group().traffic
        traffic.clear()
        try:
            tokens, reason = run(loaded, self.kv, prompt, new)
        except Cancelled:
            tokens, reason = [], "cancelled"
        finally:
            decoder.forward = forward
        torch.save([each[0] for each in seen if len(each)], into)
        counted = [(each.dropped, each.neurons, each.active, each.bytes, list(each.calls)) for each in counts]
        kinds = {kind: asdict(count) for kind, count in traffic.kinds.items()}
        return {
            "tokens": tokens,
            "reason": reason,
            "kept": self.kv.length,
            "passes": len(seen),
            "seconds": seconds,
            "counted": counted,
            "kinds": kinds,
        }

    def ended(self, rank: int) -> dict[str, int]:
        """The exit code of a process that this one has forked."""
        return {"code": os.waitstatus_to_exitcode(os.waitpid(_forked[rank], 0)[1])}

    def _open(self) -> LoadedModel:
        assert self.loaded is not None
        return self.loaded


def _group() -> Group:
    joined = group()
    assert joined is not None
    return joined


def preset_of(rule: dict[str, Any]) -> Preset:
    return Preset("test", Rule(**rule), 22)


def run(loaded: LoadedModel, kv: KVCache, prompt: list[int], new: int) -> tuple[list[int], str]:
    """A greedy answer: its tokens, and why it ended."""
    steps = generate(
        loaded.decoder,
        kv,
        prompt,
        Sampling(temperature=0),
        max_new_tokens=new,
        stop_ids=(),
        window=loaded.window,
        control=loaded.control,
        telemetry=loaded.telemetry,
    )
    tokens: list[int] = []
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return tokens, end.value
        if step.token is not None:
            tokens.append(step.token)


def as_computed(model: Any, _family: object, _kv_bits: int) -> torch.dtype:
    """Of keys and values: in 16 bits, a sum in another order may round one of them the other way."""
    return model.model.embed_tokens.weight.dtype


def fork(size: int, folder: Path, modules: Sequence[str]) -> None:
    """Become process 0 of as many as import torch and these modules once; the others as `processes.py` starts them."""
    from floe_chat.app.start import command

    layers.kept_dtype = fused_pass.kept_dtype = as_computed
    import_model_code()  # by itself a family's module would load all of torch's compiler
    for name in modules:
        importlib.import_module(name)
    for rank in range(1, size):
        if (process := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(0, 1)
            os.dup2(os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
            sys.argv = ["floe-chat", "ask", "unused"]
            command()
            os._exit(0)
        _forked[rank] = process


def main() -> None:
    """Until stdin ends."""
    if sys.argv[1:]:
        fork(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    leader, out = Leader(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            found = getattr(leader, asked.pop("do"))(**asked)
        except FloeError as error:
            found = {"error": str(error), "kind": type(error).__name__}
        except IndexError as error:
            found = {"broke": type(error).__name__}
        out.write(json.dumps(found) + "\n")
        out.flush()
    joined = group()
    if joined is not None:
        joined.end()
    os._exit(0)


if __name__ == "__main__":
    main()
