"""Importing torch leaves the interpreter as it was, and what was made is no longer looked through for garbage."""

from __future__ import annotations

import gc
import subprocess
import sys

from floe_chat.engine.torch_import import import_torch


def test_garbage_is_looked_for_as_before() -> None:
    program = (
        "import gc, sys\n"
        "from floe_chat.engine.torch_import import import_torch\n"
        "import_torch()\n"
        "print('torch' in sys.modules, gc.isenabled(), gc.get_freeze_count() > 50_000)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]


def test_what_a_second_model_finds_is_not_kept_for_ever() -> None:
    import_torch()  # which this process has done already
    kept = gc.get_freeze_count()
    import_torch()
    assert gc.get_freeze_count() == kept
