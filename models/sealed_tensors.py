"""Files of tensors that only this user's programs wrote: safetensors with a keyed hash over all that they hold."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import private_file


@dataclass(frozen=True, slots=True)
class Sealed:
    """What a file holds, not checked yet: `tensors` are the file's own memory.

    Attributes:
        how: a text of its header.
    """

    file: Path
    how: str
    tensors: Mapping[str, Tensor]
    seal: str

    def checked(self, secret: bytes) -> dict[str, Tensor]:
        """Copies of the tensors. Raises ValueError: they are not what was written with this secret."""
        copies = {name: tensor.clone() for name, tensor in self.tensors.items()}  # from here on no longer the file's
        if not hmac.compare_digest(_seal(self.file, self.how, copies, secret), self.seal):
            raise ValueError("it is damaged, or from elsewhere")
        return copies


def save(file: Path, how: str, tensors: Mapping[str, Tensor], secret: bytes) -> None:
    """Write a file, whole or not at all. Raises OSError."""
    with private_file.replacing(file) as partial:
        save_file(dict(tensors), partial, {"how": how, "seal": _seal(file, how, tensors, secret)})


def read(file: Path) -> Sealed:
    """Map a file. Raises OSError; ValueError: it is none of these."""
    try:
        with safe_open(file, "pt") as opened:
            said = opened.metadata()
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return Sealed(file, said["how"], tensors, said["seal"])
    except (SafetensorError, TypeError, LookupError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def _seal(file: Path, how: str, tensors: Mapping[str, Tensor], secret: bytes) -> str:
    """Of all that a file holds, its name, and the secret."""
    seal = hmac.new(secret, f"{file.name} {how}".encode(), "sha256")
    for name in sorted(tensors):
        seal.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        seal.update(memoryview(tensors[name].contiguous().view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return seal.hexdigest()
