"""The compiled CPU kernels' library: records and functions as `floe.h`, `floe_offload.h`
and `floe_pack.h` declare them, and the instruction set in use.

`records.calls(count=2, token=..., ...)` makes a `floe_calls`, and `library().moe_step(...)` calls `floe_moe_step`. All
fields are passed by name. For a C pointer, both take a tensor or an array, refuse a wrong type, and pass its address;
None is NULL if the header says FLOE_OPTIONAL. A record keeps alive the objects whose addresses it holds. Shapes,
strides and devices are checked before (`arguments.py`, `weights.required`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import Array, Structure, addressof, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..sampling import NotNumbersError
from . import header
from .header import Declared

ISAS = ("avx512", "avx2", "portable")
_SUFFIXES = (".so", ".pyd", ".dll", ".dylib")


class NativeUnavailableError(RuntimeError):
    """The compiled kernels cannot be used here; the text says why."""


@dataclass(frozen=True, slots=True)
class Isa:
    """The instruction set in use ("avx512", "avx2", "portable"), and why."""

    name: str
    reason: str


_SCALARS = {"int": c_int, "int32_t": c_int32, "int64_t": c_int64, "float": c_float, "double": c_double, "void": None}
_TORCH = {"int32_t": torch.int32, "int64_t": torch.int64, "float": torch.float32, "double": torch.float64}
_NUMPY = {"int32_t": np.int32, "int64_t": np.int64, "uint64_t": np.uint64, "float": np.float32, "double": np.float64}
_RAW = ("uint8_t", "void")  # bytes, whatever they mean
_INTERFACE = header.read()
_structures: dict[str, type[Structure]] = {}


def _type(declared: Declared, *, field: bool) -> Any:
    """The ctypes type; fields take only addresses, so that `_converted` sees the objects behind them."""
    if not declared.stars:
        return _structures.get(declared.type) or _SCALARS[declared.type]
    if declared.type == "char":
        return c_char_p
    if declared.stars == 1 and declared.type in _structures and not field:
        return ctypes.POINTER(_structures[declared.type])
    return c_void_p


def _converter(declared: Declared) -> Callable[[Any], int | None]:
    """The function that makes an address of an object that is not a tensor of the declared type."""
    pointed = c_void_p if declared.stars > 1 else _structures.get(declared.type) or _SCALARS.get(declared.type)
    raw = declared.type in _RAW and declared.stars == 1
    dtype = np.dtype(_structures.get(declared.type) or _NUMPY.get(declared.type, np.uint8))

    def address(value: Any) -> int | None:
        if isinstance(value, np.ndarray):
            if value.dtype is dtype or value.dtype == dtype:
                try:
                    return addressof(c_char.from_buffer(value.data)) if value.size else None
                except TypeError:  # it may not be written
                    return value.ctypes.data  # takes five times as long
        elif isinstance(value, Array | Structure):
            if (value._type_ if isinstance(value, Array) else type(value)) is pointed:
                return addressof(value)
        elif raw and isinstance(value, Tensor):
            return value.data_ptr()
        given = value.dtype if isinstance(value, np.ndarray | Tensor) else type(value).__name__
        raise TypeError(f"{declared.name} must be of {declared.type}, not {given}")

    return address


def _converted(declared: Declared, *, field: bool) -> str:
    """The Python expression for an argument's conversion; tensors, the most frequent arguments, need no
    further call.
    """
    name = declared.name
    if _type(declared, field=field) is not c_void_p:
        return name
    code = f"to_{name}({name})"
    if declared.type in _TORCH and declared.stars == 1:
        code = f"{name}.data_ptr() if getattr({name}, 'dtype', None) is {declared.type} else {code}"
    return f"None if {name} is None else {code}" if declared.optional else code


def _compiled(name: str, given: Sequence[Declared], target: Any, *, record: bool) -> Any:
    """A function that converts arguments for `target`, written out: a loop would take longer than the call itself."""
    scope = {f"to_{one.name}": _converter(one) for one in given} | {"_target": target} | _TORCH
    names = ", ".join(one.name for one in given)
    values = ", ".join(_converted(one, field=record) for one in given)
    if record:
        held = "".join(f"{one.name}, " for one in given if one.stars or one.type in _structures)
        code = f"def {name}(*, {names}):\n _made = _target({values})\n _made.held = ({held})\n return _made"
    else:
        code = f"def {name}({names}):\n return _target({values})"
    exec(compile(code, "floe.h", "exec"), scope)
    return scope[name]


def _short(name: str) -> str:
    return name.removeprefix("floe_").removeprefix("FLOE_")


def _records() -> Any:
    made: dict[str, Any] = {}
    for name, fields in _INTERFACE.records.items():
        pairs = [(one.name, _type(one, field=True)) for one in fields]
        _structures[name] = type(name, (Structure,), {"__slots__": ("held",), "_fields_": pairs})
        made[_short(name)] = _compiled(_short(name), fields, _structures[name], record=True)
    return SimpleNamespace(**made)


records = _records()
codes: Any = SimpleNamespace(**{_short(name): value for name, value in _INTERFACE.codes.items()})
_REFUSALS = {
    codes.BAD_SHAPE: "sizes that no layout has, or that do not fit each other",
    codes.BAD_INDEX: "an index out of range, or offsets that do not rise",
    codes.REPEATED: "a neuron is listed twice in one call",
}


def array_of(items: Sequence[Structure]) -> Array[Any]:
    """An array of copies of records; the caller must keep alive what they point to."""
    return (type(items[0]) * len(items))(*items)


def addresses_of(items: Sequence[Structure | Tensor | None]) -> Array[c_void_p]:
    """Addresses of records or checked tensors, which the caller must keep alive; of None it is NULL."""
    found = (item.data_ptr() if isinstance(item, Tensor) else item and addressof(item) for item in items)
    return (c_void_p * len(items))(*found)


def check(code: int) -> None:
    """Check an operation's return code.

    Raises:
        ValueError: sizes or indices that do not fit. NotNumbersError: logits without a largest one. MemoryError: out of
            memory. RuntimeError: anything else.
    """
    if code >= 0:
        return
    if code in _REFUSALS:
        raise ValueError(_REFUSALS[code])
    if code == codes.NOT_A_NUMBER:
        raise NotNumbersError
    if code == codes.NO_MEMORY:
        raise MemoryError("the CPU kernels could not allocate memory")
    known = next((name for name, value in vars(codes).items() if value == code), "which this program does not know")
    raise RuntimeError(f"the CPU kernels failed with error {code}, {known}")


def refused(code: int) -> bool:
    """Whether an operation refused its arguments, so that its definition can report the reason.

    Raises:
        MemoryError, RuntimeError: another error.
    """
    if code >= 0:
        return False
    if code not in _REFUSALS:
        check(code)
    return True


def library_path() -> Path:
    """The path of the compiled library.

    Raises:
        NativeUnavailableError: it was not built.
    """
    if named := os.environ.get("FLOE_CPU_LIBRARY"):
        return Path(named)
    # The shortest name first: older builds, which may still lie there, had the version of Python in theirs.
    for path in sorted(Path(__file__).parent.glob("_floe*"), key=lambda path: len(path.name)):
        if path.suffix in _SUFFIXES:
            return path
    raise NativeUnavailableError("the CPU kernels were not compiled (no C++ compiler when the package was installed)")


@cache
def library() -> Any:
    """The declared functions, without their prefix, on the instruction set that the environment asks for.

    Raises:
        NativeUnavailableError: the library is missing, was built from another header, or cannot run as asked.
    """
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path))
        made = {_short(name): _function(loaded, name) for name in _INTERFACE.functions}
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"the compiled CPU kernels cannot be loaded ({error}): install again") from error
    expected = [_INTERFACE.mark]
    for name, fields in _INTERFACE.records.items():
        structure = _structures[name]
        expected += [ctypes.sizeof(structure), *(getattr(structure, field.name).offset for field in fields)]
    numbers = made["layout"]()
    if numbers[: numbers[0] + 1] != [len(expected), *expected]:
        raise NativeUnavailableError(
            f"{path.name} was built from another floe.h: install the package again, or run cpu/build.py"
        )
    functions = SimpleNamespace(**made)
    if wanted := os.environ.get("FLOE_CPU_ISA"):
        _select(functions, wanted)
    return functions


def _function(loaded: ctypes.CDLL, name: str) -> Any:
    result, parameters = _INTERFACE.functions[name]
    function = loaded[name]
    function.argtypes = [_type(one, field=False) for one in parameters]
    function.restype = ctypes.POINTER(_SCALARS[result.type]) if name == "floe_layout" else _type(result, field=False)
    return _compiled(_short(name), parameters, function, record=False)


def _select(functions: Any, name: str) -> None:
    if name not in ISAS:
        raise NativeUnavailableError(f"no such instruction set: {name!r}; valid are {', '.join(ISAS)}")
    if functions.select_isa(name.encode()) != codes.OK:
        raise NativeUnavailableError(f"this CPU cannot run the {name} kernels")


def isa_is_forced() -> bool:
    """Whether FLOE_CPU_ISA asks for an instruction set by name, so that nothing else may run in its place."""
    return bool(os.environ.get("FLOE_CPU_ISA"))


def isa() -> Isa:
    """The instruction set in use.

    Raises:
        NativeUnavailableError: no library, or FLOE_CPU_ISA asks for what this CPU lacks.
    """
    functions = library()
    return Isa(functions.isa().decode(), functions.isa_reason().decode())


def select_isa(name: str | None) -> Isa:
    """Use this instruction set from now on, for tests and benchmarks; None: as at the start.

    Raises:
        NativeUnavailableError: it does not exist, or this CPU cannot run it.
    """
    if wanted := name or os.environ.get("FLOE_CPU_ISA"):
        _select(library(), wanted)
    else:
        library().select_isa(None)
    return isa()


class Stop:
    """Tells compiled code in another thread to stop; the code checks it in every layer."""

    def __init__(self) -> None:
        self.record = records.stop(raised=0)

    def set(self, raised: bool) -> None:
        """Raise it, or take it back."""
        try:
            functions = library()
        except NativeUnavailableError:
            return  # no compiled code runs
        functions.stop_set(self.record, raised)
