"""The state of a running training, saved so that an hour's work survives an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from floe_chat.models import private_file
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

_MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW remembers of each parameter


class TrainingProgress:
    """A model's weights and its optimizer's moments in one file.

    Args:
        plan: what is trained, in words: the state of another plan is not continued.
    """

    def __init__(self, file: Path, model: nn.Module, optimizer: torch.optim.AdamW, plan: str) -> None:
        self._file, self._optimizer, self._plan = file, optimizer, plan
        self._parameters = dict(model.named_parameters())
        self._weights = model.state_dict()  # with buffers that training changes

    def keep(self, steps: int) -> None:
        """Write the state after so many steps, whole or not at all."""
        tensors = {f"weight.{name}": tensor for name, tensor in self._weights.items()}
        for name, parameter in self._parameters.items():
            state: dict[str, Any] = self._optimizer.state[parameter]
            tensors |= {f"{moment}.{name}": state[moment] for moment in _MOMENTS}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with private_file.replacing(self._file, private_file.SHARED) as partial:
            save_file(tensors, partial, metadata={"plan": self._plan, "steps": str(steps)})

    def restore(self) -> int:
        """Load the saved state of this plan, if there is one; returns its number of steps, else 0."""
        try:
            with safe_open(self._file, "pt") as file:
                told = file.metadata() or {}
                if told.get("plan") != self._plan:
                    return 0
                steps = int(told["steps"])
                for name, tensor in self._weights.items():
                    tensor.copy_(file.get_tensor(f"weight.{name}"))
                for name, parameter in self._parameters.items():
                    moments = {moment: file.get_tensor(f"{moment}.{name}") for moment in _MOMENTS}
                    self._optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **moments}
        except (FileNotFoundError, SafetensorError):
            return 0
        return steps

    def remove(self) -> None:
        """Forget the state: the training is done."""
        self._file.unlink(missing_ok=True)
