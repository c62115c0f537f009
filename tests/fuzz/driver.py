"""Runs hostile inputs, made from seeds, against the real code, in a child process that may hang, crash or swell.

A kind of input is a module beside this one with `attempt(seed, scratch) -> str`: it makes one input from the seed,
feeds it to the code, and returns a word for the outcome ("refused", "accepted", ...). An exception that leaves it is a
finding. So are a hang, a signal, and memory far above what a good input takes (`good(scratch)`, if the module has one).

    python tests/fuzz/driver.py --inputs 1000            every kind, 1,000 inputs each
    python tests/fuzz/driver.py packs --seed 4711        one input again, with its traceback
    python tests/fuzz/driver.py --seconds 3600           what `make fuzz` does
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

HERE = Path(__file__).resolve().parent
HANG_S = 10.0
"""An input that takes more of the processor's time is a finding."""
WAIT_S = 40.0
"""So is one that takes longer by the clock: other programs may have the processor meanwhile."""
LOOK_S = 0.2
GROWTH = 1 << 30
"""Bytes of memory above a good input's that are a finding."""
START_S = 300.0
"""A worker may import and build that long before its first input."""
STOP_AFTER = 20
"""Findings of one campaign after which it ends: the rest would mostly be the same."""


@dataclass(frozen=True)
class Finding:
    kind: str
    seed: int
    what: str

    def __str__(self) -> str:
        return f"{self.kind}, seed {self.seed}: {self.what}"


@dataclass
class Campaign:
    """What came of one kind's inputs."""

    kind: str
    inputs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


def kinds() -> list[str]:
    """The modules here that make inputs."""
    return sorted(p.stem for p in HERE.glob("*.py") if p.stem != "driver" and not p.stem.startswith(("test_", "_")))


class _Worker:
    """The child process and the lines that it sends; each is {"seed"}, {"outcome", "rss"} or {"finding"}."""

    def __init__(self, kind: str, first: int, scratch: Path) -> None:
        # No home of a person, no variable that points into one.
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "HF_", "FLOE_CHAT"))}
        keep |= {"HOME": str(scratch), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
        self.errors = (scratch / "stderr").open("w+b")
        out, into = os.pipe()
        command = [sys.executable, str(HERE / "driver.py"), kind, "--worker", str(into), "--seed", str(first)]
        self.process = subprocess.Popen(
            [*command, "--scratch", str(scratch)],
            env=keep,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            pass_fds=(into,),
            start_new_session=True,
        )
        os.close(into)
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, args=(os.fdopen(out),), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def cpu(self) -> float:
        """Seconds of the processor's time that the worker has had."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    def memory(self) -> int:
        try:
            return psutil.Process(self.process.pid).memory_info().rss
        except psutil.Error:
            return 0

    def last_words(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-1500:].decode(errors="replace")

    def end(self, *, look: bool = False) -> None:
        """Kills the worker and what it started; `look`: with every thread's stack among its last words."""
        if look:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(kind: str, *, inputs: int | None = None, seconds: float | None = None, first: int = 0) -> Campaign:
    """Inputs from seed `first` on, until one of the limits. A worker that dies is replaced after the input at fault."""
    campaign = Campaign(kind)
    began = time.monotonic()
    seed = first

    def wanted() -> bool:
        if inputs is not None and campaign.inputs >= inputs:
            return False
        if seconds is not None and campaign.inputs and time.monotonic() - began >= seconds:
            return False
        return len(campaign.findings) < STOP_AFTER

    while wanted():
        scratch = Path(tempfile.mkdtemp(prefix=f"fuzz-{Path(kind).stem}-"))
        worker = _Worker(kind, seed, scratch)
        try:
            seed = _watch(worker, campaign, seed, wanted)
        finally:
            worker.end()
            worker.errors.close()
            shutil.rmtree(scratch, ignore_errors=True)
    campaign.seconds = time.monotonic() - began
    return campaign


def _watch(worker: _Worker, campaign: Campaign, seed: int, wanted: Callable[[], bool]) -> int:
    """Counts until the limit or until the worker is of no more use; the next seed to try."""
    under_way = False
    base = 0
    waited = 0.0  # counted by looks, so that a computer that sleeps is no finding
    used: float | None = None

    def found(what: str) -> int:
        campaign.findings.append(Finding(campaign.kind, seed, what))
        campaign.inputs += 1
        campaign.outcomes["finding"] += 1
        return seed + 1

    while True:
        try:
            line = worker.lines.get(timeout=LOOK_S)
        except queue.Empty:
            waited += LOOK_S
            if under_way and base and worker.memory() > base + GROWTH:
                return found(f"memory grew by more than {GROWTH >> 20} MiB")
            used = worker.cpu() if used is None else used
            if not under_way and waited > START_S:
                worker.end(look=True)
                raise RuntimeError(f"the worker of {campaign.kind} did not start: {worker.last_words()}") from None
            if under_way and (waited > WAIT_S or worker.cpu() - used > HANG_S):
                worker.end(look=True)
                return found(f"hung for {waited:.0f} s\n{worker.last_words()}")
            continue
        waited, used = 0.0, None
        if line is None:
            code = worker.process.wait()
            if not under_way:
                raise RuntimeError(f"the worker of {campaign.kind} did not start ({code}): {worker.last_words()}")
            died = f"signal {-code}" if code < 0 else f"exit code {code}"
            return found(f"the process ended with {died}\n{worker.last_words()}")
        if "seed" in line:
            seed, under_way, base = line["seed"], True, base or line["rss"]
        elif "finding" in line:
            under_way = False
            found(line["finding"])
        else:
            if line["rss"] > base + GROWTH:
                return found(f"memory grew by {(line['rss'] - base) >> 20} MiB")
            under_way = False
            campaign.inputs += 1
            campaign.outcomes[line["outcome"]] += 1
        if not under_way and not wanted():
            return seed + 1


def _module(kind: str) -> types.ModuleType:
    """The kind's module as part of the package `tests`, without the project's root on the path.

    From the root, the folder `kernels` would shadow Hugging Face's package. A kind may also be a file's path.
    """
    if kind.endswith(".py"):
        alone = types.ModuleType("alone")
        exec(compile(Path(kind).read_text(), kind, "exec"), alone.__dict__)
        return alone
    package = types.ModuleType("tests")
    package.__path__ = [str(HERE.parent)]
    sys.modules["tests"] = package
    return importlib.import_module(f"tests.fuzz.{kind}")


def _peak() -> int:
    """The most memory in bytes that this process has had; `ru_maxrss` would begin with what its parent had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _work(kind: str, first: int, scratch: Path, into: int) -> None:
    """The child: one input after the other, told through the pipe, until it is killed."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    module = _module(kind)
    with os.fdopen(into, "w", buffering=1) as out:

        def send(**line: object) -> None:
            out.write(json.dumps(line) + "\n")

        if hasattr(module, "good"):
            module.good(scratch)
        base = _peak()
        for seed in _from(first):
            send(seed=seed, rss=base)
            try:
                outcome = module.attempt(seed, scratch)
            except BaseException as problem:
                if isinstance(problem, KeyboardInterrupt | SystemExit) and not problem.args:
                    raise
                send(finding=traceback.format_exc(limit=-12)[-3000:])
            else:
                send(outcome=str(outcome), rss=_peak())


def _from(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(kinds())}; all unless named")
    parser.add_argument("--inputs", type=int, help="inputs of each kind")
    parser.add_argument("--seconds", type=float, help="time for all kinds together")
    parser.add_argument("--seed", type=int, help="the one input to try again")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = {kind for kind in options.kinds if kind not in kinds()}
    if unknown and options.worker is None:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(kinds())}")
    if options.worker is not None:
        _work(options.kinds[0], options.seed, options.scratch, options.worker)
        return 0
    chosen: list[str] = options.kinds or kinds()
    share = None if options.seconds is None else options.seconds / len(chosen)
    first, inputs = (options.first, options.inputs) if options.seed is None else (options.seed, 1)
    if share is None and inputs is None:
        parser.error("say how long: --inputs N or --seconds S")
    bad = 0
    for kind in chosen:
        campaign = run(kind, inputs=inputs, seconds=share, first=first)
        bad += len(campaign.findings)
        for finding in campaign.findings:
            print(finding, file=sys.stderr)
        print(
            json.dumps(
                {
                    "kind": kind,
                    "inputs": campaign.inputs,
                    "first": first,
                    "seconds": round(campaign.seconds, 1),
                    "outcomes": dict(campaign.outcomes.most_common()),
                    "findings": [{"seed": f.seed, "what": f.what.strip().splitlines()[-1]} for f in campaign.findings],
                }
            ),
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
