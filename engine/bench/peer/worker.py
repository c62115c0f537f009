"""llama.cpp's side of a comparison: run by the interpreter of an environment with llama-cpp-python, numpy and gguf.

It is a script that imports nothing of floe-chat, since floe-chat is not installed there:

    worker.py version                            prints the version of llama-cpp-python
    worker.py make FILE                          writes a GGUF file of random weights, as stdin describes it
    worker.py answer THREADS CONTEXT VOCABULARY FILES    loads KIND:LAYERS:PATH files, then answers JSON lines
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

WEIGHT = 0.02  # about the standard deviation of all weights
REPEAT = 4096  # blocks of a tensor after which they repeat
MXFP4_EXPONENT = 120  # of a block, biased by 127: its values, 2.9 by root mean square, become about WEIGHT
# Where a block has its float16 scales, and how wide they make the weights: a byte of codes and, in K kinds, 6-bit or
# 8-bit sub-scales stand between. Kinds with a minimum get one that centres them (ggml-common.h).
SCALES = {
    "Q4_0": ((0, WEIGHT / 4.6),),
    "Q5_0": ((0, WEIGHT / 9.2),),
    "Q5_1": ((0, WEIGHT / 9.2), (2, -15.5 * WEIGHT / 9.2)),
    "Q8_0": ((0, WEIGHT / 74),),
    "MXFP4": (),
    "Q4_K": ((0, WEIGHT / (31.5 * 4.6)), (2, 7.5 * WEIGHT / (31.5 * 4.6))),
    "Q5_K": ((0, WEIGHT / (31.5 * 9.2)), (2, 15.5 * WEIGHT / (31.5 * 9.2))),
    "Q6_K": ((208, WEIGHT / (74 * 18.5)),),
}


def make(path: str, wanted: dict[str, Any]) -> None:
    """Write a model: `header` holds methods of the writer, or keys of arrays for which it may have none, and `tensors`
    name -> shape and type.
    """
    np, gguf = importlib.import_module("numpy"), importlib.import_module("gguf")
    writer: Any = gguf.GGUFWriter(path, wanted["architecture"])
    for what, value in wanted["header"].items():
        if "." in what:
            writer.add_array(f"{wanted['architecture']}.{what}", value)
        else:
            getattr(writer, f"add_{what}")(gguf.ExpertGatingFuncType(value) if what == "expert_gating_func" else value)
    writer.add_tokenizer_model("no_vocab")
    random: Any = np.random.default_rng(0)
    for name, (shape, kind) in wanted["tensors"].items():
        if kind == "F32":
            values = np.ones(shape) if len(shape) == 1 else random.standard_normal(shape) * WEIGHT
            writer.add_tensor(name, values.astype(np.float32))
            continue
        stored = gguf.GGMLQuantizationType[kind]
        per_block, size = gguf.GGML_QUANT_SIZES[stored]
        blocks = int(np.prod(shape)) // per_block
        pattern = random.integers(0, 256, size=(REPEAT, size), dtype=np.uint8)
        for start, scale in SCALES[kind]:
            pattern[:, start : start + 2] = np.frombuffer(np.float16(scale).tobytes(), dtype=np.uint8)
        if kind == "MXFP4":
            pattern[:, 0] = MXFP4_EXPONENT
        data = np.tile(pattern, (-(-blocks // REPEAT), 1))[:blocks]
        writer.add_tensor(name, data.reshape(*shape[:-1], shape[-1] // per_block * size), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answer(threads: int, context: int, vocabulary: int, files: list[str]) -> None:
    """Load all files, then answer requests until stdin ends: an empty one says that all is loaded."""
    # What llama.cpp prints goes to stderr: stdout is for answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    llama: Any = importlib.import_module("llama_cpp").Llama
    models: dict[tuple[str, int], Any] = {}
    for file in files:
        kind, layers, path = file.split(":", 2)
        models[kind, int(layers)] = llama(
            path,
            n_ctx=context,
            n_batch=512,
            n_ubatch=512,
            n_threads=threads,
            n_threads_batch=threads,
            use_mmap=False,  # the system may drop pages of a mapped file
            verbose=False,
        )
    for line in sys.stdin:
        request = json.loads(line)
        found = time_one(models[request["kind"], request["layers"]], vocabulary, request) if request else {}
        print(json.dumps(found), file=answers, flush=True)


def time_one(model: Any, vocabulary: int, request: dict[str, Any]) -> dict[str, float]:
    """Seconds of a prompt of random tokens, and the median of `tokens` more after it."""
    # Any sequence of tokens will do, since weights are random.
    ids = [(7919 * (place + 1)) % vocabulary for place in range(request["prompt"] + request["tokens"])]
    model.reset()
    start = time.perf_counter()
    model.eval(ids[: request["prompt"]])
    prompt = time.perf_counter() - start
    times: list[float] = []
    for token in ids[request["prompt"] :]:
        start = time.perf_counter()
        model.eval([token])
        times.append(time.perf_counter() - start)
    return {"prompt": prompt, "token": sorted(times)[len(times) // 2] if times else 0.0}


def main() -> None:
    """Do what the arguments say."""
    what, *rest = sys.argv[1:]
    if what == "version":
        importlib.import_module("gguf")
        print(importlib.import_module("llama_cpp").__version__)  # noqa: T201 - how it answers
    elif what == "make":
        make(rest[0], json.load(sys.stdin))
    else:
        answer(int(rest[0]), int(rest[1]), int(rest[2]), rest[3:])


if __name__ == "__main__":
    main()
