"""What a table is made from: a pack, perhaps its 16-bit source, a text, and a virtual card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from ...kernels.activation import Projection
from ...kernels.rule import Rule
from ...models.catalog import asset
from ...models.checkpoint import Checkpoint
from ...models.errors import UsageError
from ...models.packing import calibration
from ...models.transformers_import import import_model_code
from ..loader import LoadedModel, load
from ..machine.random_weights import Shapes
from ..quality.candidates import Candidate
from ..quality.frontier import Measure, Point
from ..quality.pack_source import PackSource
from ..quality.source_model import identify
from ..quality.text_windows import cut
from ..quality.told import Told
from ..quality.tune import in_rows
from .papers import Grid

Answered = Callable[[LoadedModel, Mapping[str, Rule]], Grid]  # rules by name -> a row for each
Ask = tuple[Candidate, Projection | None]  # a setting, and the projection that is the signal; None: the pack's own


@dataclass
class Study:
    """What a person gave.

    Attributes:
        name: of the pack. source: its 16-bit checkpoint; None: the pack stands for it. ids: the text by the pack's
            tokenizer; called: its name. tokens: to read of it. card: a virtual card's name, "" for the paper's own.
        synthetic: the model at whose width kernels, links and cards are measured, "" for the paper's own.
        shapes: of kernels, where they are no model's. answered: how well tasks are answered, where that was asked for.
    """

    pack: Path
    name: str
    source: Path | None
    ids: Sequence[int]
    called: str
    tokens: int
    card: str
    synthetic: str
    told: Told
    shapes: Shapes | None = None
    answered: Answered | None = None

    @cached_property
    def loaded(self) -> LoadedModel:
        """The pack on the CPU, with transformers' own modules."""
        self.told.step("Starting transformers")
        import_model_code()
        loaded, _ = load(self.pack, None, "cpu", lambda step, _share: self.told.step(step), library=True)
        return loaded

    @cached_property
    def origin(self) -> Checkpoint | PackSource:
        """What settings are compared with.

        Raises:
            UsageError: the folder is not the pack's source. CheckpointError: it cannot be read.
        """
        if self.source is None:
            return PackSource(self.loaded)
        found = Checkpoint(self.source)
        identify(found, self.loaded.packed)
        return found

    @cached_property
    def windows(self) -> tuple[Tensor, int]:
        """The text in windows (N, T), and how many tokens at the end of each are predicted."""
        return cut(self.ids, self.origin.config, self.tokens)

    @property
    def experts(self) -> int:
        """Of a layer."""
        return self.loaded.packed.manifest.architecture.experts

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self.loaded.packed.manifest.architecture.top_k

    @property
    def layers(self) -> int:
        """Those with experts."""
        return self.loaded.packed.manifest.architecture.layers

    @property
    def neurons(self) -> int:
        """Of an expert."""
        return self.loaded.packed.manifest.architecture.intermediate

    def need_silu(self) -> None:
        """Raises: UsageError: experts of another kind than the papers'."""
        family = self.loaded.packed.manifest.family
        if family.experts_by != "silu" or family.biased:
            raise UsageError(
                f"This cannot be made of {family.called}",
                "The papers' experts are SwiGLU without biases; this family's are not.",
                "Give another pack.",
            )

    def points(self, asked: Sequence[Ask]) -> list[Point]:
        """What each setting costs: one pass over the text for each signal.

        Raises:
            UsageError: experts of another kind, too few tokens, a text too short, or another source.
        """
        self.need_silu()
        windows, keep = self.windows
        manifest = self.loaded.packed.manifest
        text = asset("calibration.txt").read_text(encoding="utf-8")
        passages = in_rows(calibration.read_tokens(self.pack, text), windows)[: max(2, len(windows))]
        found: dict[Ask, Point] = {}
        kinds: dict[Projection | None, None] = dict.fromkeys(signal for _, signal in asked)
        for signal in kinds:
            signals: Sequence[Projection] = manifest.signals if signal is None else (signal,) * self.layers
            measure = Measure(
                *(self.origin, passages, windows, keep, self.told.step, signals), short=manifest.widths.short
            )
            settings = list(dict.fromkeys(setting for setting, own in asked if own == signal))
            where = "by the pack's signals" if signal is None else f"by {signal}"
            for point in measure(settings, f"Skipping {where}"):
                found[point.setting, signal] = point
        return [found[one] for one in asked]

    def accuracy(self, rules: Mapping[str, Rule]) -> tuple[Grid, ...]:
        """Tasks answered by the pack itself with each rule, where the person asked for them."""
        return () if self.answered is None else (self.answered(self.loaded, rules),)

    def here(self, how: str = "") -> str:
        """What was measured on, in words."""
        windows, keep = self.windows
        against = "itself with nothing left out" if self.source is None else f"its 16-bit source {self.source.name}"
        own = "rounded by floe-chat from the pack's own weights" if self.source is None else "rounded by floe-chat"
        read = f"{len(windows) * keep} tokens of {self.called} predicted"
        return f"{self.name} against {against}, {read}; {how or own}"
