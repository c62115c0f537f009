"""The model that the wizard is about to set up, and its folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ....models import catalog
from ....models.errors import FloeError
from ...settings.file import change_soon
from ...setup.wish import Wish, of_ready, unfinished, wish
from ...widgets.setup.choice import Chosen


class Intent:
    """The user's choice, before the setup starts.

    Attributes:
        chosen: a model and its bits. wish: what will be started. earlier: an unfinished setup of that name, which is
            deleted when this one starts. left: the setup that the user left to choose again.
    """

    def __init__(self, settings: Path | None) -> None:
        """`settings`: the file in which the models folder is saved, None: it applies to this run only."""
        self._settings = settings
        self._folder_before: Path | None = None  # the models folder, until a setup starts in another one
        self.chosen: Chosen | None = None
        self.wish: Wish | None = None
        self.earlier: Wish | None = None
        self.left: Wish | None = None

    def choose(self, chosen: Chosen) -> None:
        """Set this up, in the current models folder; an unfinished setup with the same settings is continued.

        Raises:
            UsageError: there is a model of that name.
        """
        self.chosen = chosen
        entry, spec = chosen.entry, chosen.option.spec
        bits = {"up": spec.up, "gate": spec.gate, "down": spec.down, "dense": spec.dense}
        if (ready := entry.only_pack) is not None:
            made = of_ready(wish(ready.place, entry.name), ready)
        else:
            made = wish(entry.repo or str(entry.folder), entry.name, bits)
        begun = [*([self.left] if self.left else []), *unfinished()]
        earlier = next((one for one in begun if one.name == made.name), None)
        if earlier is not None and _alike(earlier) == _alike(made):
            made, earlier = earlier, None
        self.wish, self.earlier = made, earlier

    def use_folder(self, folder: Path) -> None:
        """Set it up in another models folder. Raises FloeError: that cannot be; the folder is as it was."""
        before = catalog.models_folder()
        if folder == before or self.chosen is None:
            return
        catalog.use_models_folder(folder)
        try:
            self.choose(self.chosen)
        except FloeError:
            catalog.use_models_folder(before)
            raise
        self._folder_before = self._folder_before or before

    def save_folder(self) -> None:
        """Save the folder in the settings. Raises FloeError: they cannot be written."""
        if self._folder_before is not None and self._settings is not None:
            change_soon(self._settings, {"folders.models": str(catalog.models_folder())}, lambda _error: None)
        self._folder_before = None

    def put_folder_back(self) -> None:
        """Nothing was started: restore the models folder."""
        if self._folder_before is not None:
            catalog.use_models_folder(self._folder_before)


def _alike(one: Wish) -> Wish:
    """A setup without what becomes known, or is chosen, once it begins."""
    return dataclasses.replace(one, commit="", pack="", to="")
