"""Whether a chat's states are worth a file: what writing and reading them takes, and reading its prompt again.

    OMP_WAIT_POLICY=passive python tests/bench/states.py [--synthetic NAME] [--layers 8] [--tokens 64 256 1024 4096]

Each file is read once past the page cache. Figures are of so many layers; the last line says how many the model has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from floe_chat.engine import state_folder
from floe_chat.engine.bench import synthetic
from floe_chat.engine.bench.subject import Subject
from floe_chat.engine.decoder import state_files
from floe_chat.engine.decoder.kv_cache import KVCache, Parked
from floe_chat.engine.decoder.state_files import StateFiles
from floe_chat.engine.events import Sampling
from floe_chat.engine.generate import generate
from floe_chat.models.pack.marks import FILE_NAME

CHAT = 1


def now() -> dict[str, float]:
    """By the clock, and of this process's processors."""
    return {"s": time.perf_counter(), "cpu_s": time.process_time()}


def measured(subject: Subject, files: StateFiles, tokens: int) -> dict[str, float]:
    """MB and seconds: of the prompt, of the copy, until that is on the disk, and until it is back."""
    prompt, kv, began = subject.prompt(tokens + 1), KVCache(), now()
    subject.telemetry.begin(0, tokens, time.perf_counter())
    steps = generate(
        *(subject.decoder, kv, prompt[:-1], Sampling(temperature=0)),
        max_new_tokens=1,
        stop_ids=(),
        window=subject.window,
        control=subject.control,
        telemetry=subject.telemetry,
    )
    for step in steps:
        if step.done == tokens:
            break
    read = now()
    files.keep(CHAT, kv, time.time())
    copied = now()
    files.close(600)
    written = now()
    (file,) = state_folder.files()
    opened = os.open(file, os.O_RDONLY)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(opened)
    back, preset = KVCache(), subject.control.preset

    def common(parked: Parked) -> int:
        return parked.common(prompt, preset)

    start = now()
    parked = files.find(CHAT, subject.decoder.store(back), common, 1)
    assert parked is not None and back.resume(parked, tokens)
    end = now()
    parts = {"prompt": (began, read), "copy": (read, copied), "write": (copied, written), "back": (start, end)}
    found = {f"{name}_{at}": b[at] - a[at] for name, (a, b) in parts.items() for at in ("s", "cpu_s")}
    return {"tokens": tokens, "mb": file.stat().st_size / 1e6, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--synthetic", default="qwen3.6-35b-a3b", choices=synthetic.MODELS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096])
    asked = parser.parse_args()
    spec = synthetic.Spec(asked.synthetic, asked.layers or synthetic.usual_layers(asked.synthetic))
    subject = synthetic.make(spec, "cpu", lambda _step: None)
    state_files.LEAST = 1
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        (Path(folder) / FILE_NAME).write_text("{}", encoding="utf-8")
        files = StateFiles(Path(folder), "", 1 << 40)
        measured(subject, files, 256)  # weights are touched for the first time
        found = [measured(subject, files, tokens) for tokens in asked.tokens]
    names = [f"{name}_{at}" for at in ("s", "cpu_s") for name in ("prompt", "copy", "write", "back")]
    print("tokens      MB" + "".join(f"{name:>14}" for name in names))
    for one in found:
        print(f"{one['tokens']:6}{one['mb']:8.1f}" + "".join(f"{one[name]:14.3f}" for name in names))
    whole = {"model": asked.synthetic, "layers": spec.layers, "of": spec.published_layers, "figures": found}
    print(json.dumps(whole))


if __name__ == "__main__":
    main()
