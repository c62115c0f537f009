"""What a GGUF file's metadata and tensors say about a model's configuration, asked for by name."""

from __future__ import annotations

from .header import GgufTensor
from .parts import Gguf


class Metadata:
    """Answers in the types that a configuration needs.

    Raises (all methods):
        ValueError: the file does not say it, or says something else.
    """

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number. key: behind the architecture, or a whole key."""
        found = self._value(key, default)
        if type(found) is not int:
            raise ValueError(f"{key} is not a whole number")
        return found

    def real(self, key: str, default: float | None = None) -> float:
        """Any number."""
        found = self._value(key, default)
        if type(found) not in (int, float):
            raise ValueError(f"{key} is not a number")
        return float(found)  # pyright: ignore[reportArgumentType]

    def flag(self, key: str, *, default: bool) -> bool:
        """Yes or no."""
        return self._value(key, default) is True

    def wholes(self, key: str, count: int) -> list[int]:
        """A whole number for each of `count` layers; of a file that has one, that one for all."""
        found = self._value(key, None)
        if type(found) is int:
            return [found] * count
        if not isinstance(found, list) or len(found) < count or any(type(each) is not int for each in found):
            raise ValueError(f"{key} is not a whole number for each layer")
        return [int(each) for each in found[:count]]

    def texts(self, key: str) -> list[str]:
        """A list of texts; none where there is none."""
        found = self._value(key, [])
        if not isinstance(found, list) or any(type(each) is not str for each in found):
            raise ValueError(f"{key} is not a list of texts")
        return [str(each) for each in found]

    def reals(self, key: str, count: int) -> list[float]:
        """A list of at least so many numbers."""
        found = self._value(key, None)
        if not isinstance(found, list) or len(found) < count or any(type(each) is not float for each in found):
            raise ValueError(f"{key} is not a list of {count:,} numbers")
        return [float(each) for each in found]

    def flags(self, key: str, count: int) -> list[bool]:
        """Yes or no for each of `count` layers."""
        found = self._value(key, None)
        if not isinstance(found, list) or len(found) < count or any(type(each) is not bool for each in found):
            raise ValueError(f"{key} is not yes or no for each layer")
        return [bool(each) for each in found[:count]]

    def says(self, key: str) -> bool:
        """Whether there is such a value."""
        return key in self.gguf.values or f"{self.gguf.architecture}.{key}" in self.gguf.values

    def text(self, key: str) -> str:
        """A text; "" where there is none."""
        found = self._value(key, "")
        return found if isinstance(found, str) else ""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name, or one in any layer if that has a star: `blk.*.attn_q.bias`."""
        if "*" not in name:
            return name in self.gguf.tensors
        first, last = name.split("*")
        return any(each.startswith(first) and each.endswith(last) for each in self.gguf.tensors)

    def tensor(self, name: str) -> GgufTensor:
        """A tensor; one of any layer if its name has a star."""
        first, star, last = name.partition("*")
        found = self.gguf.tensors.get(name)
        if star:
            ends = (each for key, each in self.gguf.tensors.items() if key.startswith(first) and key.endswith(last))
            found = next(ends, None)
        if found is None:
            raise ValueError(f"there is no tensor {name}")
        return found

    def layers_with(self, part: str, count: int) -> list[int]:
        """The first `count` layers' numbers, of those that have this tensor: `ffn_gate_inp.weight`."""
        return [layer for layer in range(count) if f"blk.{layer}.{part}" in self.gguf.tensors]

    def _value(self, key: str, default: object) -> object:
        values = self.gguf.values
        found = values.get(f"{self.gguf.architecture}.{key}", values.get(key, default))
        if found is None:
            raise ValueError(f"it does not say {key}")
        return found
