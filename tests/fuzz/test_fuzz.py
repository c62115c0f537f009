"""A short campaign of every kind of hostile input; `make fuzz` runs long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import driver

INPUTS = 4
"""Of each kind: the same seeds on every machine. `make fuzz` goes further."""


@pytest.mark.slow
@pytest.mark.thorough  # a process that imports transformers for inputs that all have tests of their own
def test_hostile_inputs_are_refused_or_read() -> None:
    kinds = driver.kinds()
    campaign = driver.run("_together", inputs=INPUTS * len(kinds))
    assert campaign.findings == [], "\n".join(map(str, campaign.findings))
    assert {*campaign.outcomes.values()} == {INPUTS} and len(campaign.outcomes) == len(kinds)


MADE_UP = """
import os, signal

def attempt(seed, scratch):
    if seed == 1:
        raise ValueError('torn')
    if seed == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    while seed == 5:
        pass
    held = b'x' * (5 << 25 if seed == 7 else 1)
    return 'fine'
"""


def test_the_driver_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up kind misbehaves at some seeds: these are named, and those behind them are tried."""
    made_up = tmp_path / "made_up.py"
    made_up.write_text(MADE_UP)
    monkeypatch.setattr(driver, "HANG_S", 0.3)
    monkeypatch.setattr(driver, "WAIT_S", 3.0)
    monkeypatch.setattr(driver, "GROWTH", 1 << 27)
    campaign = driver.run(str(made_up), inputs=9)
    named = {1: "torn", 3: "signal 11", 5: "hung", 7: "memory grew"}
    assert [finding.seed for finding in campaign.findings] == [*named]
    assert all(named[finding.seed] in finding.what for finding in campaign.findings)
    assert campaign.inputs == 9
    assert campaign.outcomes["fine"] == 5
