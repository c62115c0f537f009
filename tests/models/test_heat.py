"""Heat in its file: written whole, for its owner alone, and never trusted."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from floe_chat.models.pack import usage_file
from floe_chat.models.pack.usage_file import Heat
from numpy.typing import NDArray


def random_heat(layers: int, experts: int, neurons: int) -> Heat:
    rng = np.random.default_rng(layers + neurons)
    return Heat(
        rng.dirichlet(np.ones(experts), layers).astype(np.float32),
        rng.random((layers, experts, neurons), dtype=np.float32),
    )


def test_heat_survives_in_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    kept, path = random_heat(2, 3, 11), tmp_path / "new" / "heat.safetensors"
    for _ in range(2):
        usage_file.write(path, kept)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [*path.parent.iterdir()] == [path]
    back = usage_file.read(path, 2, 3, 11)
    assert back is not None and (back.scores == kept.scores).all()
    np.testing.assert_allclose(back.uses, kept.uses, atol=1e-3)


def test_no_heat_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert usage_file.read(tmp_path / "none", 1, 1, 1) is None and not caplog.records


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def of_another_model(path: Path) -> None:
    usage_file.write(path, random_heat(2, 3, 12))


def spoil(value: float, *, scores: bool) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        kept = random_heat(2, 3, 11)
        array: NDArray[np.float32] = kept.scores if scores else kept.uses
        array.reshape(-1)[4] = value
        usage_file.write(path, kept)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        content(b""),
        content(b"\xff" * 400),
        of_another_model,
        spoil(float("nan"), scores=True),
        spoil(-0.5, scores=True),
        spoil(1.5, scores=False),
        spoil(float("inf"), scores=False),
    ],
    ids=["cut", "empty", "noise", "other model", "nan", "negative", "too often", "infinite"],
)
def test_damaged_heat_is_ignored_and_told(
    damage: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "heat.safetensors"
    usage_file.write(path, random_heat(2, 3, 11))
    damage(path)
    with caplog.at_level(logging.WARNING):
        assert usage_file.read(path, 2, 3, 11) is None
    assert "earlier expert use is unknown" in caplog.text


def test_each_pack_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert usage_file.file_of(tmp_path / "a") != usage_file.file_of(tmp_path / "b")
    assert usage_file.file_of(tmp_path / "a" / ".." / "b") == usage_file.file_of(tmp_path / "b")
