"""The stages of `make card`, tried without a GPU: on tiny sizes, the interpreter, a made-up CUDA and a virtual card."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from . import driver, report

DRIVER = Path(driver.__file__)
pytestmark = pytest.mark.timeout(600)


def drive(out: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The driver as `make card` calls it, on what stands in for a card."""
    return subprocess.run(
        [sys.executable, "-P", str(DRIVER), "--place", "virtual", "--out", str(out), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def called(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Called:
    """The same in this process, but for the stages: its exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["driver", "--place", "virtual", "--out", str(tmp_path), *arguments])
        code, printed = driver.main(), capfd.readouterr()
        return code, printed.out, printed.err

    monkeypatch.setattr(driver, "_make_importable", Mock())
    return call


def result(out: Path, stage: str) -> dict[str, Any]:
    return json.loads((out / f"{stage}.json").read_text(encoding="utf-8"))


@pytest.mark.thorough
def test_every_stage_runs(tmp_path: Path) -> None:
    listed = drive(tmp_path, "--list").stdout
    names = [line.split()[0] for line in listed.splitlines()]
    names = [name for name in names if name not in ("decode-10", "decode-12", "decode-16")]  # as decode-8 and -24
    ran = drive(tmp_path, "--seconds", "170", "--minutes", "30", *names, LLAMA_BENCH="")
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    results = {name: result(tmp_path, name) for name in names}
    assert {name for name, found in results.items() if found["state"] == "skipped"} <= {"peer", "kernels"}
    for name, found in results.items():
        assert found["rows"] or found["reason"], name
        assert f"### {name}: {found['state']}" in ran.stdout
    whole = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))
    assert {found["stage"] for found in whole["stages"]} == set(names) and whole["facts"]["place"] == "virtual"
    assert all(found["showed"] or found["state"] == "skipped" for found in whole["stages"])
    pools = [row["pool"] for row in results["tokens"]["rows"] if row["pool"]]
    assert len(pools) > 1 and min(pools) < 0.7 and all(row["answers"] == 4 for row in results["tokens"]["rows"])
    assert all(row["tokens s"] > 0 for row in results["decode-8"]["rows"])


def test_a_stage_that_passed_is_not_run_again(called: Called, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = "passed"

    def process(command: list[str], **_how: object) -> Mock:
        found = {"state": state, "reason": "", "showed": "It shines"}
        report.write(tmp_path, command[command.index("--one") + 1], found)
        return Mock(pid=0, poll=Mock(return_value=0))

    monkeypatch.setattr(driver.subprocess, "Popen", process)
    monkeypatch.setattr(driver.os, "killpg", Mock())
    monkeypatch.setattr(report, "facts", Mock(return_value={"missing": "", "gpu": "one"}))
    code, out, err = called("link")
    assert code == 0 and "link: passed in 0 s. It shines. The best chunk" in err and "### link: passed" in out
    first, state = result(tmp_path, "link"), "failed"
    code, out, err = called("link")
    assert code == 0 and "passed before" in err and "### link: passed" in out and result(tmp_path, "link") == first
    code, _, err = called("link", "--again")
    assert code == 1 and "link: failed in 0 s. It shines. No figure of it" in err
    code, _, err = called("link", "--again", "--minutes", "0.1")
    assert code == 3 and "no time was left" in err and result(tmp_path, "link")["state"] == "failed"


@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_found_is_kept_when_the_run_is_stopped(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-P", str(DRIVER), "--place", "virtual", "--out", str(tmp_path), "kernels"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:

        def passed() -> int:
            path = tmp_path / "card.json"
            stages = json.loads(path.read_text(encoding="utf-8"))["stages"] if path.exists() else []
            return sum(row["passed"] for stage in stages for row in stage["rows"])

        while run.poll() is None and passed() < 2:
            time.sleep(0.05)
        run.send_signal(how)
    assert run.returncode == (143 if how == signal.SIGTERM else -how) and passed() >= 2
    kept = result(tmp_path, "kernels")
    assert kept["state"] == "unfinished" and kept["reason"] in ("it was stopped", "it was still running")
    assert "### kernels: unfinished" in (tmp_path / "card.md").read_text(encoding="utf-8")
    if how == signal.SIGTERM:
        assert kept["next"] == "The same command continues it"


def test_wheels_are_taken_for_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "NEEDED", ("json", "floe_missing"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    for name in ("json-1-py3-none-any", "floe_missing-1-cp27-cp27-any", "floe_missing-1-py3-none-any"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{name.partition('-')[0]}.py", f"name = {name!r}")
    driver._take_wheels(tmp_path, tmp_path / "site")  # pyright: ignore[reportPrivateUsage]
    assert importlib.import_module("floe_missing").name == "floe_missing-1-py3-none-any"
    assert not (tmp_path / "site" / "json.py").exists()
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'site'}{os.pathsep}before"


@pytest.mark.thorough
def test_a_stage_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    """However fast the machine is: the interpreter of the first stage never gets as far as the stage."""
    slow = "import sys, time\nargv = sys.orig_argv\nif '--one' in argv and 'link' in argv:\n    time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(slow, encoding="utf-8")
    ran = drive(tmp_path, "--seconds", "1", "--grace", "0", "link", "peer", PYTHONPATH=str(tmp_path), LLAMA_BENCH="")
    assert ran.returncode == 1 and "link: failed" in ran.stderr and "\npeer: " in ran.stderr
    assert result(tmp_path, "link")["state"] == "failed"
    assert "did not end within 1 s" in result(tmp_path, "link")["reason"]
    assert "### link: failed" in ran.stdout


@pytest.mark.thorough
def test_llama_bench_is_read(tmp_path: Path) -> None:
    told = [{"n_gen": 0, "n_prompt": 512, "avg_ts": 99.5}, {"n_gen": 64, "n_prompt": 0, "avg_ts": 12.5}]
    bench = tmp_path / "llama-bench"
    check = "import sys\nassert '--n-cpu-moe' in sys.argv and 'some.gguf' in sys.argv\n"
    bench.write_text(f"#!{sys.executable}\n{check}print({json.dumps(told)!r})\n")
    bench.chmod(bench.stat().st_mode | stat.S_IXUSR)
    ran = drive(tmp_path, "peer", LLAMA_BENCH=str(bench), LLAMA_MODEL="some.gguf")
    assert ran.returncode == 0, ran.stderr
    rows = result(tmp_path, "peer")["rows"]
    assert [(row["test"], row["tokens s"]) for row in rows] == [("prompt of 512", 99.5), ("decode", 12.5)]


def test_what_is_wrong_is_said(called: Called) -> None:
    code, _, err = called("lnik")
    assert code == 2 and "lnik" in err
    with pytest.raises(SystemExit) as ended:
        called("--seconds", "0", "link")
    assert ended.value.code == 2
    if not torch.cuda.is_available():
        code, _, err = called("--place", "cuda")
        assert code == 1 and "There is no GPU here" in err


def test_where_floe_chat_is_not_installed_its_folders_are_used(tmp_path: Path) -> None:
    """A machine that is lent has torch and Triton, and none of our packages."""
    code = "import importlib.util, sys; real = importlib.util.find_spec\n"
    code += "importlib.util.find_spec = lambda name, *rest: None if name == 'floe_chat' else real(name, *rest)\n"
    code += f"sys.argv = ['driver', '--list', '--out', {str(tmp_path)!r}]\n"
    code += f"import runpy; runpy.run_path({str(DRIVER)!r}, run_name='__main__')"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "decode-24" in ran.stdout, ran.stderr
    package = (tmp_path / "package" / "floe_chat" / "__init__.py").read_text(encoding="utf-8")
    assert re.search(r"__path__ = \['.+'\]", package)
