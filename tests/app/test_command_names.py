"""Names that people bring from other programs, and mistyped ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from floe_chat.app.cli.command_names import translated

from ..helpers import explained, run_cli


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("run mixtral", "--model mixtral"),
        ("run mixtral --preset fast", "--model mixtral --preset fast"),
        ("run mixtral hello", "ask --model mixtral hello"),
        ("run", ""),
        ("run --plain", "--plain"),
        ("chat --plain", "--plain"),
        ("pull mixtral", "setup mixtral"),
        ("list", "models"),
        ("ls --json", "models --json"),
        ("rm mixtral -y", "models remove mixtral -y"),
        ("ask run", "ask run"),
        ("", ""),
    ],
)
def test_names_of_other_programs_become_ours(typed: str, meant: str) -> None:
    assert translated(typed.split()) == meant.split()


def test_they_run(tiny_pack: Path) -> None:
    listed = run_cli("list")
    assert listed.code == 0 and "demo" in listed.out and listed.out == run_cli("models").out
    ran = run_cli("run", str(tiny_pack), "hi", "--max-tokens", "3", "--seed", "1")
    assert ran.code == 0 and ran.out.strip()
    assert "nonesuch" in explained(run_cli("rm", "nonesuch"), 2)
    assert "nonesuch" in explained(run_cli("pull", "nonesuch"), 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["docter"], "Did you mean doctor?"),
        (["chatt"], "Did you mean chat?"),
        (["history", "lst"], "Did you mean list?"),
        (["history", "rm"], "Did you mean delete?"),
        (["models", "delete"], "Did you mean remove?"),
        (["bench", "krenels"], "Did you mean kernels?"),
        (["zzz"], "floe-chat --help"),
        (["What's an expert?"], """floe-chat ask 'What'"'"'s an expert?'"""),
    ],
)
def test_what_is_no_command_is_answered_with_the_right_one(arguments: list[str], named: str) -> None:
    assert named in explained(run_cli(*arguments), 2)
