"""How much each expert and each neuron of a model is used, saved between starts."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from .. import private_file

_log = logging.getLogger("floe_chat.models")


@dataclass(frozen=True, slots=True)
class Heat:
    """Expert and neuron use.

    Attributes:
        scores: (L, E) float32 >= 0, mean score of each expert. uses: (L, E, F) float32, 0..1, the share of an expert's
            calls in which the neuron was active.
    """

    scores: NDArray[np.float32]
    uses: NDArray[np.float32]

    def of(self, layers: Sequence[int]) -> Heat:
        """That of some layers."""
        return Heat(self.scores[layers], self.uses[layers])

    def updated(self, layers: Sequence[int], heat: Heat) -> Heat:
        """With that of some layers replaced."""
        scores, uses = self.scores.copy(), self.uses.copy()
        scores[layers], uses[layers] = heat.scores, heat.uses
        return Heat(scores, uses)


def from_popularity(popularity: NDArray[np.floating[Any]], neurons: int) -> Heat:
    """A guess for a model that was never used: its experts' popularity (L, E) on calibration text (Fiddler, 3.2).

    Each expert's neurons are sorted by falling importance, so the first are assumed to be active more often.
    """
    total = popularity.sum(1, keepdims=True, dtype=np.float64)
    scores = np.divide(popularity, total, out=np.full(popularity.shape, 1 / popularity.shape[1]), where=total > 0)
    uses = np.broadcast_to(np.linspace(0.6, 0.4, neurons, dtype=np.float32), (*popularity.shape, neurons))
    return Heat(scores.astype(np.float32), uses.copy())


def file_of(pack: Path) -> Path:
    """The file with the heat of a packed folder, in the user's cache."""
    key = hashlib.sha256(str(pack.resolve()).encode()).hexdigest()[:32]
    return Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)) / "heat" / f"{key}.safetensors"


def forget(pack: Path) -> None:
    """Delete the saved heat of a packed folder.

    Raises:
        OSError: it cannot be deleted.
    """
    file_of(pack).unlink(missing_ok=True)


def write(path: Path, heat: Heat) -> None:
    """Save heat in a file that only its owner can read: it may reveal what the user asked about.

    Raises:
        OSError: it cannot be written.
    """
    private_file.own_folder(path.parent)
    private_file.replace(path, save({"scores": heat.scores, "uses": heat.uses.astype(np.float16)}))


def read(path: Path, layers: int, experts: int, neurons: int) -> Heat | None:
    """The heat that `write` saved; None if there is none, or (logged) if it does not fit or is invalid."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in ("scores", "uses")}
            if shapes != {"scores": (layers, experts), "uses": (layers, experts, neurons)}:
                raise ValueError(f"shapes are {shapes}")
            scores, uses = (file.get_tensor(name).astype(np.float32) for name in ("scores", "uses"))
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        _log.warning("earlier expert use is unknown: %s cannot be read: %s", path, error)
        return None
    if not (_within(scores, np.inf) and _within(uses, 1.0)):
        _log.warning("earlier expert use is unknown: %s holds invalid values", path)
        return None
    return Heat(scores, uses)


def _within(values: NDArray[np.float32], end: float) -> bool:
    """Whether all are finite and 0..end."""
    return bool(np.isfinite(values).all() and (values >= 0).all() and (values <= end).all())
