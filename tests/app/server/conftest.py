"""Servers that many tests ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.models.catalog import asset

from .serving import Served, serving


@pytest.fixture(scope="session")
def demo() -> Iterator[Served]:
    """The demo model."""
    with serving(asset("demo", "packed")) as served:
        yield served


@pytest.fixture
def slow(long_winded: Path) -> Iterator[Served]:
    """Answers that do not end by themselves, of which two may wait."""
    with serving(long_winded, queue=2) as served:
        yield served
