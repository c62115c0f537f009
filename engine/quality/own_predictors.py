"""`floe-chat tune --text`: a pack's predictors of the next layer's experts, trained again on the calibration text and
the person's own.

They are in a file next to the pack's own (`AHEAD`), if they name more of the experts on the text's last part, which
they have not seen, than those in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models import private_file
from ...models.catalog import asset
from ...models.families import family_of
from ...models.pack import learned_predictor
from ...models.pack.learned_predictor import Lookahead, Training, carry
from ...models.pack.manifest import AHEAD, Manifest, file_entry
from ...models.pack.tensor_file import write_tensors
from ...models.packing.calibration import read_tokens
from ..loader import LoadedModel
from .references import NO_SPARSITY, use
from .told import Told

LEAST, MOST = 1024, 8192  # tokens of the person's text: fewer teach too little, and more are not read
_TAIL = 1 / 6  # of them, on which both predictors are compared


@dataclass(frozen=True, slots=True)
class OwnPredictors:
    """The share of the chosen experts that the predictors named, of as many as there are chosen, on `tokens` that
    neither has seen.

    Attributes:
        before, after: by those in use, and by those trained again, which are `kept` if they are better.
    """

    before: float
    after: float
    tokens: int

    @property
    def kept(self) -> bool:
        return self.after > self.before


class _Lessons:
    """Follows a pass through the model layer by layer.

    Args:
        study: tokens at the front that are learned from; the others compare.
    """

    def __init__(self, loaded: LoadedModel, study: int, told: Told) -> None:
        packed, config = loaded.packed, loaded.model.config
        family, layers = family_of(config.model_type), loaded.model.model.layers
        places, count = family.expert_layers(config), packed.manifest.architecture.layers
        each = [family.foresight(layers[place], packed.manifest.architecture.hidden) for place in places]
        self._routers, self._norms = ([part.detach().cpu() for part in parts] for parts in zip(*each, strict=True))
        self._old = _in_use(packed.lookahead(), packed.lookahead_gains()) if packed.has_lookahead() else []
        self._study, self._told, self._count = study, told, count
        self._before: tuple[Tensor, Tensor] | None = None
        self.training = Training(count, self._say)
        self.named: list[tuple[float, float]] = []  # by the old ones and the new ones, by layer

    def _say(self, layer: int) -> None:
        self._told.step(f"Training the predictor after layer {layer + 1} of {self._count}")

    def reach(self, layer: int, hidden: Tensor, chosen: Tensor) -> None:
        """What a layer's MoE block was given (T, H), and the experts (T, K)."""
        hidden, chosen, study = hidden.detach().cpu().float(), chosen.cpu(), self._study
        router, norm = self._routers[layer].float(), self._norms[layer]
        self.training.reach(layer, hidden[:study], chosen[:study], router, norm)
        if self._before is not None:
            given = *self._before, router * carry(self._norms[layer - 1], norm)
            found = self.training.learned[layer - 1]
            new = None if found is None else _in_use([found[0]], [found[1] > found[2]])[0]
            old = self._old[layer - 1] if self._old else None
            self.named.append((_recall(old, *given, chosen[study:]), _recall(new, *given, chosen[study:])))
        self._before = hidden[study:], chosen[study:]


def _in_use(learned: Sequence[Lookahead], gains: Sequence[bool]) -> list[Lookahead | None]:
    """None where the next router predicts."""
    return [one.to("cpu", torch.float32) if gained else None for one, gained in zip(learned, gains, strict=True)]


def _recall(by: Lookahead | None, hidden: Tensor, chosen: Tensor, router: Tensor, following: Tensor) -> float:
    scores = F.linear(hidden, router) if by is None else by.scores(hidden, chosen)
    return learned_predictor.recall(scores, following)


def run(loaded: LoadedModel, ids: Sequence[int], told: Told) -> OwnPredictors | None:
    """Train a pack's predictors again, and write them into it if they are better; None if there is too little text, or
    no next layer.

    Args:
        loaded: by transformers' modules. ids: the text by the pack's tokenizer, without a start token.

    Raises:
        PackError: the pack cannot be read.
    """
    folder = loaded.packed.folder
    if len(ids) < LEAST or loaded.packed.manifest.architecture.layers < 2:
        return None
    usual = read_tokens(folder, asset("calibration.txt").read_text(encoding="utf-8"))
    length = usual.shape[1]
    own = torch.tensor(list(ids[: min(MOST, len(ids) // length * length)])).view(-1, length)
    tail = max(1, round(_TAIL * len(own)))
    windows = torch.cat([usual, own])
    study = (len(windows) - tail) * length
    lessons = _Lessons(loaded, study, told)
    use(loaded, NO_SPARSITY)
    _watched(loaded.model, windows, lessons)
    tensors = lessons.training.tensors()
    if not tensors:
        return None
    before, after = (sum(each) / len(each) for each in zip(*lessons.named, strict=True))
    found = OwnPredictors(before, after, tail * length)
    if found.kept:
        _write(loaded, tensors)
    return found


@torch.inference_mode()
def _watched(model: Any, windows: Tensor, lessons: _Lessons) -> None:
    hooks: list[Any] = []
    for index, block in enumerate(family_of(model.config.model_type).blocks(model)):

        def given(_own: Any, given: Any, index: int = index) -> None:
            lessons.reach(index, given[0], given[1])

        hooks.append(block.experts.register_forward_pre_hook(given))
    try:
        model.model(input_ids=windows.to(model.model.embed_tokens.weight.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def _write(loaded: LoadedModel, tensors: dict[str, Tensor]) -> None:
    """While the file changes, the manifest does not name it: the pack runs with its own predictors."""
    folder = loaded.packed.folder
    manifest = Manifest.read(folder)
    others = {name: entry for name, entry in manifest.beside.items() if name != AHEAD}
    if AHEAD in manifest.beside:
        replace(manifest, beside=others).write(folder)
    with private_file.replacing(folder / AHEAD, private_file.SHARED) as new:
        write_tensors(new, tensors)
    replace(manifest, beside=others | {AHEAD: file_entry(folder / AHEAD)}).write(folder)
