"""Records and functions as `floe.h` declares them, and what a library says of itself."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from floe_chat.kernels.cpu import binding, header
from floe_chat.kernels.cpu.binding import NativeUnavailableError, codes, records

HEADER = """
#define FLOE_API
enum { FLOE_OK = 0, FLOE_WRONG = -1 }; // codes
typedef struct {
    int64_t n, *of; // two at once
    FLOE_OPTIONAL const float *a,
        *b;
} floe_one;
FLOE_API int64_t floe_use(const floe_one *one, void *const *kv,
                          double how);
FLOE_API void floe_nothing(void);
"""


def active(**changes: object) -> object:
    given = {
        "offsets": torch.tensor([0, 1]),
        "neurons": torch.tensor([3], dtype=torch.int32),
        "values": torch.tensor([0.5]),
    }
    return records.active(**{**given, **changes})


def test_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one.h"
    path.write_text(HEADER, encoding="utf-8")
    found = header.read([path])
    assert found.codes == {"FLOE_OK": 0, "FLOE_WRONG": -1}
    fields = [(one.name, one.type, one.stars, one.optional) for one in found.records["floe_one"]]
    assert fields == [
        *(("n", "int64_t", 0, False), ("of", "int64_t", 1, False)),
        *(("a", "float", 1, True), ("b", "float", 1, True)),
    ]
    use = found.functions["floe_use"]
    assert (use.result.type, use.result.stars) == ("int64_t", 0)
    assert [(one.name, one.type, one.stars) for one in use.parameters] == [
        *(("one", "floe_one", 1), ("kv", "void", 2), ("how", "double", 0)),
    ]
    assert found.functions["floe_nothing"].parameters == ()
    path.write_text(HEADER.replace("// two at once", "// other words"), encoding="utf-8")
    assert header.read([path]).mark == found.mark
    path.write_text(HEADER.replace("double how", "float how"), encoding="utf-8")
    assert header.read([path]).mark != found.mark


def test_headers_are_read_together(tmp_path: Path) -> None:
    first, second = tmp_path / "one.h", tmp_path / "two.h"
    first.write_text(HEADER, encoding="utf-8")
    second.write_text("typedef struct { floe_one one; } floe_two;", encoding="utf-8")
    alone, both = header.read([first]), header.read([first, second])
    assert set(both.records) == {"floe_one", "floe_two"} and both.functions == alone.functions
    assert both.mark != alone.mark, "the mark covers every header"
    assert {path.name for path in header.PATHS} == {path.name for path in header.PATHS[0].parent.glob("*.h")}


def test_each_field_of_a_record_is_asked_for_by_name() -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        records.vector(n=64, group=64, bits=4)
    with pytest.raises(TypeError, match="width"):
        records.vector(n=64, group=64, bits=4, bfloat16=0, scale_bytes=2, width=3)
    assert records.vector(n=64, group=64, bits=4, bfloat16=0, scale_bytes=2).bits == 4


@pytest.mark.parametrize(
    "wrong",
    [torch.tensor([1]), torch.tensor([1.0]), np.zeros(2, np.float64), 12345, None, [1]],
    ids=["int64", "float", "array", "number", "nothing", "list"],
)
def test_a_pointer_takes_values_of_its_type_alone(wrong: object) -> None:
    with pytest.raises(TypeError, match="neurons must be of int32_t"):
        active(neurons=wrong)


def test_only_what_may_be_null_may_be_none() -> None:
    limits = records.limits(experts=1, signal=torch.ones(1), product=None, late=None)
    assert limits.product is None and limits.signal
    with pytest.raises(TypeError, match="signal"):
        records.limits(experts=1, signal=None, product=None, late=None)


def test_a_record_of_another_kind_is_refused() -> None:
    functions = binding.library()
    with pytest.raises((TypeError, ctypes.ArgumentError)):
        functions.dense_check(active())
    with pytest.raises(TypeError, match="stop must be of floe_stop"):
        records.pace(dense_digits=1, expert_digits=1, threads=1, stop=active())


def test_a_record_keeps_what_it_has_addresses_of() -> None:
    values = torch.ones(1)
    alive = weakref.ref(values)
    made = active(values=values)
    del values
    gc.collect()
    assert alive() is not None
    del made
    gc.collect()
    assert alive() is None


def test_errors_say_what_they_are() -> None:
    for code, error in ((codes.BAD_SHAPE, ValueError), (codes.REPEATED, ValueError), (codes.NO_MEMORY, MemoryError)):
        with pytest.raises(error):
            binding.check(code)
    with pytest.raises(RuntimeError, match="error -99, which this program does not know"):
        binding.check(-99)
    with pytest.raises(RuntimeError, match="UNSUPPORTED"):
        binding.check(codes.UNSUPPORTED)
    assert binding.refused(codes.BAD_INDEX) and not binding.refused(0)
    with pytest.raises(RuntimeError, match="does not know"):
        binding.refused(-99)


def test_a_library_of_another_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = header.read()
    monkeypatch.setattr(binding, "_INTERFACE", known._replace(mark=known.mark + 1))
    binding.library.cache_clear()
    try:
        with pytest.raises(NativeUnavailableError, match="another floe"):
            binding.library()
    finally:
        binding.library.cache_clear()


def test_a_stop_is_raised_and_taken_back() -> None:
    stop = binding.Stop()
    stop.set(True)
    assert stop.record.raised
    stop.set(False)
    assert not stop.record.raised
