"""Random cases of the kernels' tests from the full cross product of their axes, which `make test` covers by pairs.

    .venv/bin/python tests/bench/kernel_sweep.py --rounds 10

Each round is one seed: `FLOE_TEST_SWEEP=SEED:COUNT .venv/bin/pytest tests/kernels` runs the same cases again. A failure
ends it with pytest's words and the seed. Otherwise one JSON line says what was run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "kernels"
FILES = "test_operations.py", "test_cpu_native.py"


def run(seed: int, count: int) -> int:
    """How many cases passed; ends the program where one failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", *(str(FOLDER / name) for name in FILES)]
    environment = os.environ | {"FLOE_TEST_SWEEP": f"{seed}:{count}"}
    # Not from the root, where our folder `kernels` hides another package of that name.
    done = subprocess.run(command, env=environment, cwd=FOLDER, capture_output=True, text=True, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or passed is None:
        sys.exit(f"{done.stdout[-8000:]}{done.stderr[-2000:]}\nseed {seed}, {count} cases of each test")
    return int(passed[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cases", type=int, default=40, help="of each test in a round (default %(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round (default: the time)")
    asked = parser.parse_args()
    passed = sum(run(asked.seed + number, asked.cases) for number in range(asked.rounds))
    print(json.dumps({"bench": "kernel_sweep", "seed": asked.seed, "rounds": asked.rounds, "passed": passed}))


if __name__ == "__main__":
    main()
