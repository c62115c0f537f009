"""A short campaign of every kind of hostile input; `make fuzz` runs long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import driver

INPUTS = 4
"""Of each kind: the same seeds on every machine. `make fuzz` goes further."""


@pytest.mark.slow
def test_hostile_inputs_are_refused_or_read() -> None:
    kinds = driver.kinds()
    campaign = driver.run("_together", inputs=INPUTS * len(kinds))
    assert campaign.findings == [], "\n".join(map(str, campaign.findings))
    assert {*campaign.outcomes.values()} == {INPUTS} and len(campaign.outcomes) == len(kinds)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("raise ValueError('torn')", "torn"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("while True: pass", "hung"),
        ("held = b'x' * (5 << 28)", "memory grew"),
    ],
    ids=["exception", "signal", "loop", "memory"],
)
def test_the_driver_finds(body: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up kind misbehaves at seed 3 alone: that seed is named, and those behind it are tried."""
    made_up = tmp_path / "made_up.py"
    made_up.write_text(f"def attempt(seed, scratch):\n    if seed == 3:\n        {body}\n    return 'fine'\n")
    if named == "hung":
        monkeypatch.setattr(driver, "HANG_S", 1.0)
        monkeypatch.setattr(driver, "WAIT_S", 3.0)
    campaign = driver.run(str(made_up), inputs=6)
    assert [finding.seed for finding in campaign.findings] == [3]
    assert named in campaign.findings[0].what
    assert campaign.inputs == 6
    assert campaign.outcomes["fine"] == 5
