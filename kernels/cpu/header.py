"""What `floe.h`, `floe_offload.h` and `floe_pack.h` declare: `binding.py` makes records and functions of it, the build
what a library reports of itself.

The headers keep to plain C: `//` comments, `enum`, `typedef struct { ... } name;`, and prototypes behind FLOE_API. A
pointer that may be NULL is marked FLOE_OPTIONAL. Needs nothing but Python.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# Each includes those before it.
PATHS = tuple(Path(__file__).parent / name for name in ("floe.h", "floe_offload.h", "floe_pack.h"))


class Declared(NamedTuple):
    """A field, a parameter, or a function's result: `type` without const, and how many stars it has."""

    name: str
    type: str
    stars: int
    optional: bool


class Function(NamedTuple):
    """A prototype."""

    result: Declared
    parameters: tuple[Declared, ...]


class Interface(NamedTuple):
    """All of the headers. codes: of their enums. mark: changes with every declaration, not with comments."""

    records: dict[str, tuple[Declared, ...]]
    functions: dict[str, Function]
    codes: dict[str, int]
    mark: int


def read(paths: Sequence[Path] = PATHS) -> Interface:
    """Parse the headers, in the order in which they need each other."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    text = re.sub(r"//.*|^\s*#.*", "", text, flags=re.MULTILINE)
    codes: dict[str, int] = {}
    for body in re.findall(r"enum \{(.*?)\}", text, re.DOTALL):
        for number, entry in enumerate(filter(None, map(str.strip, body.split(",")))):
            name, _, value = entry.partition("=")
            codes[name.strip()] = int(value or number)
    records = {
        name: tuple(one for line in body.split(";") if line.strip() for one in _declared(line))
        for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", text, re.DOTALL)
    }
    functions = {}
    for result, name, given in re.findall(r"FLOE_API\s+([^;()]*?)(\w+)\(([^)]*)\);", text):
        parameters = tuple(one for each in given.split(",") for one in _declared(each)) if given != "void" else ()
        functions[name] = Function(_declared(f"{result} {name}")[0], parameters)
    return Interface(records, functions, codes, zlib.crc32(repr((records, functions, codes)).encode()))


def _declared(text: str) -> list[Declared]:
    """`const float *a, *b`."""
    optional, kind, names = re.fullmatch(r"\s*(FLOE_OPTIONAL\s+)?(?:const\s+)?(\w+)(.*)", text, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return [Declared(re.findall(r"\w+", one)[-1], kind, one.count("*"), bool(optional)) for one in names.split(",")]


def layout_source(interface: Interface) -> str:
    """C++ of `floe_layout`, by which a library reports what its compiler made of the records."""
    numbers = [f"{interface.mark}u"]
    for record, fields in interface.records.items():
        numbers += [f"sizeof({record})", *(f"offsetof({record}, {field.name})" for field in fields)]
    listed = ",\n        ".join((str(len(numbers)), *numbers))
    return f"""#include <stddef.h>
#include "{PATHS[-1].name}"

const int64_t *floe_layout(void) {{
    static const int64_t numbers[] = {{
        {listed}}};
    return numbers;
}}
"""
