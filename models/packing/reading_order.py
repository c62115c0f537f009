"""The order in which a packer reads a checkpoint, and which shards it no longer needs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ..checkpoint import Checkpoint


class ReadingOrder:
    """Tells a shelf what will be read, and releases each shard as soon as nothing later needs it.

    Args:
        steps: what is left to do, in order, and the published names of the tensors that each step reads.
    """

    def __init__(self, source: Checkpoint, steps: Mapping[Hashable, Sequence[str]]) -> None:
        self._shelf = source.shelf
        self._last: dict[str, Hashable] = {}
        for step, names in steps.items():
            for file in dict.fromkeys(file for name in names for file in source.files(name)):
                self._last[file] = step
        first_use = [file for names in steps.values() for name in names for file in source.files(name)]
        self._shelf.order(list(dict.fromkeys(first_use)))
        for file in dict.fromkeys(file for name in source.places for file in source.files(name)):
            if file not in self._last:
                self._shelf.done(file)

    def finished(self, step: Hashable) -> None:
        """This step has read all that it needs."""
        for file in [file for file, last in self._last.items() if last == step]:
            del self._last[file]
            self._shelf.done(file)
