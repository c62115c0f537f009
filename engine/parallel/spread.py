"""A model's experts over the processes of a group: who holds what, and how tokens reach it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import msgspec

from ...models.errors import FloeError, UsageError
from ...models.pack.manifest import Manifest
from ...models.pack.packed_model import PackedLayer
from ..events import SpreadBy
from ..machine import gpus
from ..planning.device_choice import DeviceChoice
from .divided import Divided
from .group import Group
from .holding import Grid, Holding
from .messages import Ready
from .routes import Routes

Opened = TypeVar("Opened")
_LEAST = 9  # tokens of a pass that is divided: the others go neuron by neuron


class Spread:
    """One model over a group.

    Args:
        by: how.

    Attributes:
        routes: by which tokens of a prompt travel to their experts; None: each process computes all tokens.
        divided: of the running pass, if each process computes the dense part of its own tokens only.
    """

    def __init__(self, group: Group, by: SpreadBy) -> None:
        self.group, self.by = group, by
        self.routes: Routes | None = None
        self.divided: Divided | None = None

    def begin(self, manifest: Manifest) -> None:
        """Divide a model with this manifest.

        Raises:
            UsageError: it cannot be divided so.
        """
        a = manifest.architecture
        self.grid = Grid.of(self.by.pattern, self.group.size, a.experts, a.intermediate)
        self.holding = Holding(self.grid, self.group.rank, a.experts, self.by.balanced)

    def held(self, layer: PackedLayer) -> PackedLayer:
        """This process's part of a layer."""
        return self.holding.of_layer(layer)

    def place(self, device: str) -> str:
        """The device of this process, by what process 0 was asked for.

        Raises:
            UsageError: a device that stands in for a card.
        """
        if device.startswith(("sim:", "throttled:")):
            raise UsageError(
                f"Several processes cannot compute on {device}", "It is a test device.", "Use --device cpu or cuda."
            )
        if device in ("auto", "cuda") and (there := gpus.of_torch()[0]):
            return f"cuda:{self.group.world.local % len(there)}"
        return device

    def check(self, choices: Sequence[DeviceChoice]) -> None:
        """Raises UsageError: this process has several cards, or one that its experts do not fit."""
        if len(choices) > 1:
            hint = "Start a process for each card with torchrun, or one process with --devices."
            raise UsageError("Each of several processes computes on one device", "", hint)
        choice = choices[0]
        if choice.make is not None:
            raise UsageError(
                f"The experts of process {self.group.rank} do not fit {choice.place}",
                "With several processes, each has its part of the experts in the memory that computes them.",
                "Start more processes, or add --device cpu.",
            )

    def divide(self, tokens: int) -> AbstractContextManager[Divided] | None:
        """This process's part of a prompt's pass; None where each process computes all tokens. See `FusedDecoder`."""
        if self.routes is None or tokens < max(_LEAST, 2 * self.group.size):
            return None
        return self._dividing(Divided(self.group, tokens))

    @contextmanager
    def _dividing(self, part: Divided) -> Generator[Divided]:
        self.divided = part
        try:
            yield part
        finally:
            self.divided = None

    def _connect(self, places: Sequence[str]) -> None:
        """Make the lines of the pattern for tensors of these devices."""
        self.group.settle(places)
        self.routes = None if self.grid.pattern == "tp" else Routes(self.group, self.holding)

    def together(self, opening: Callable[[], tuple[Opened, Ready]]) -> tuple[Opened, int]:
        """What `opening` gives, if it succeeds in all processes, and the window of the smallest; joins them.

        Raises:
            FloeError: it failed in one of them, or their packs differ.
        """
        opened, failed = None, None
        try:
            opened, ready = opening()
        except FloeError as error:
            failed, ready = error, Ready("", 0, "", error.title, error.cause, error.hint, error.exit_code)
        # Whatever it is, the others wait to hear of it.
        except Exception as error:  # noqa: BLE001
            failed, ready = error, Ready(title="It failed", cause=f"{type(error).__name__}: {error}")
        all_ready = [msgspec.json.decode(each, type=Ready) for each in self.group.gathered(msgspec.json.encode(ready))]
        if failed is not None:
            raise failed
        for rank, one in enumerate(all_ready):
            if one.title:
                where = f"Process {rank}, on {self.group.members.all[rank].host}, cannot open the model"
                error = FloeError(where, f"{one.title}. {one.cause}", one.hint)
                error.exit_code = one.exit_code
                raise error
            if one.seal != all_ready[0].seal:
                raise UsageError(
                    f"Process {rank}, on {self.group.members.all[rank].host}, has another pack",
                    "All processes need the same pack, to the last byte.",
                    "Copy the model's folder from the machine of process 0 to the others.",
                )
        assert opened is not None
        self._connect([one.place for one in all_ready])
        return opened, min(one.window for one in all_ready)
