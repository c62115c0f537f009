"""The papers' tables, each on a tiny pack: they are all there, and their figures behave as what they measure does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from floe_chat.engine.paper.papers import Grid, Made, entries, entry
from floe_chat.engine.paper.study import Study
from floe_chat.engine.paper.tables import MAKERS, make
from floe_chat.engine.quality.candidates import Candidate, compute
from floe_chat.engine.quality.pack_source import PackSource
from floe_chat.engine.quality.references import NO_SPARSITY, pack_logits
from floe_chat.engine.quality.told import Told
from floe_chat.models.errors import UsageError

from ..helpers import relative_rms

TOKENS = 512
NEEDS_SOURCE = {"dualsparse-t1"}


def study_of(pack: Path, source: Path | None = None) -> Study:
    ids = torch.randint(3, 250, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    return Study(pack, "tiny", source, ids, "random", TOKENS, "", Told(lambda _step: None, lambda _note: None))


@pytest.fixture(scope="module")
def study(tiny_pack: Path) -> Study:
    return study_of(tiny_pack)


@pytest.fixture(scope="module")
def with_source(tiny_pack: Path, tiny_checkpoint: Path) -> Study:
    return study_of(tiny_pack, tiny_checkpoint)


def titled(made: Made, title: str) -> Grid:
    return next(grid for grid in made.grids if grid.title == title)


def rising(row: tuple[float | None, ...], slack: float = 0.0) -> bool:
    known = [value for value in row if value is not None]
    return all(later >= earlier - slack for earlier, later in itertools.pairwise(known))


def loses_more(made: Made) -> None:
    """By share or with fewer bits, each way by itself: from the first figure to the last, at least."""
    for row in titled(made, "KL, nats").rows.values():
        known = [value for value in row if value is not None]
        assert known[-1] > known[0] >= 0 and known[-1] == max(known)


def drops_more(made: Made) -> None:
    rows = made.grids[0].rows
    assert rows["dropped, %"][0] == 0 == rows["KL, nats"][0] and rising(rows["dropped, %"])
    assert rows["dropped, %"][-1] not in (None, 0)


def loses_by_theta(made: Made) -> None:
    rows = made.grids[0].rows
    assert rows["active neurons, %"][0] == 100 and rising(tuple(-(value or 0) for value in rows["active neurons, %"]))
    assert rows["KL, nats"][0] == 0 != rows["KL, nats"][-1]


def drops_as_many(made: Made) -> None:
    rows = made.grids[0].rows
    assert rows["no drop"][:2] == (0, 0)
    assert all(0 < (row[0] or 0) < 100 and (row[1] or 0) > 0 for name, row in rows.items() if name != "no drop")


def replaces_more(made: Made) -> None:
    absent = made.grids[0].rows["absent bytes, %"]
    assert (absent[-1] or 0) < (absent[0] or 0) and made.grids[0].rows["KL, nats"][0] == 0


def more_bits_are_better(made: Made) -> None:
    rows = made.grids[0].rows
    kl, bits = ({name: row[at] or 0 for name, row in rows.items()} for at in (0, 3))
    assert kl["HQQ INT3"] < kl["HQQ INT2"] and bits["HQQ INT3"] > bits["HQQ INT2"]
    assert bits["FloE 90%"] < bits["FloE 80%"] < bits["FloE-Wup 80%"]


def finer_experts_give_the_same(made: Made) -> None:
    rows = made.grids[0].rows
    whole = [row[1] or 0 for name, row in rows.items() if "1T" not in name]
    assert whole == pytest.approx([whole[0]] * 3, rel=1e-4)
    assert all((row[0] or 0) > 0 for name, row in rows.items() if "1T" in name)


def loses_with_corm(made: Made) -> None:
    rows = made.grids[0].rows
    assert (rows["4 bits"][0] or 0) < (rows["CORM, 55 % left out"][0] or 0)


CHECKS: dict[str, Callable[[Made], None]] = {
    **dict.fromkeys(("floe-t5", "floe-t6", "floe-t7", "floe-t8", "floe-f3", "floe-f9"), loses_more),
    **dict.fromkeys(("floe-t3", "floe-f10"), more_bits_are_better),
    "corm-t2": loses_with_corm,
    "corm-f10": loses_by_theta,
    "dualsparse-t1": finer_experts_give_the_same,
    "dualsparse-t2": drops_as_many,
    "dualsparse-f7": drops_more,
    "importance-t3": replaces_more,
}


@pytest.mark.parametrize("name", {maker: name for name, maker in MAKERS.items()}.values())
def test_made(name: str, study: Study, with_source: Study) -> None:
    made = make(name, with_source if name in NEEDS_SOURCE else study)
    figures = [value for grid in made.grids for row in grid.rows.values() for value in row if value is not None]
    assert figures and all(map(math.isfinite, figures)) and made.here
    assert all(0 <= share <= 1 for row in made.heat.values() for share in row)
    CHECKS[name](made)


def test_every_entry_is_made_or_says_why_not() -> None:
    assert {one.id for one in entries().values() if not one.why_not} == set(MAKERS) == set(CHECKS)
    with pytest.raises(UsageError, match="floe-t8"):
        entry("floe-t88")
    with pytest.raises(UsageError, match="dense model"):
        entry("floe-t2")


def test_a_table_that_needs_the_source_says_so(study: Study) -> None:
    with pytest.raises(UsageError, match="--source"):
        make("dualsparse-t1", study)


def test_a_pack_in_its_sources_place_gives_its_own_logits(study: Study) -> None:
    windows, passages = torch.randint(3, 250, (2, 2, 40), generator=torch.Generator().manual_seed(2))
    source = PackSource(study.loaded)
    with torch.inference_mode():
        plain, sparse = compute(
            source, [Candidate(), Candidate(theta=0.3)], passages, windows, 20, lambda _step: None, ()
        )
        expected = torch.stack([pack_logits(study.loaded, NO_SPARSITY, row[None], 20) for row in windows])
    assert relative_rms(plain.logits(), expected) <= 1e-3
    assert relative_rms(sparse.logits(), expected) > 1e-2 and sparse.taken.active < plain.taken.active
