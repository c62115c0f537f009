"""What a chat does not need is not imported: it would take longer than the answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = (
    *("transformers", "huggingface_hub", "hqq", "textual", "torch._dynamo", "torch.distributed.tensor", "sympy"),
    *("scipy", "httpx2", "floe_chat.app.client.remote.client", "floe_chat.app.client.remote.http"),
)
PROGRAM = """
import os, sys
from floe_chat.app.cli.main import command

def told(code):
    print(code, *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
    sys.stderr.flush()
    end(code)

end, os._exit = os._exit, told
command()
"""


def test_an_answer_imports_nothing_heavy(tiny_pack: Path) -> None:
    options = ["--repetition-penalty", "1.1", "--top-k", "40", "--top-p", "0.9", "--max-tokens", "3", "--seed", "1"]
    command = [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), "ask", "hi", "-m", str(tiny_pack), *options]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.stdout.strip() and done.stderr.split() == ["0"]
