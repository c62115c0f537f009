"""Drawing the next token from a model's logits, which warpers.py changes first."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.errors import UsageError
from .events import Sampling
from .warpers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def check(sampling: Sampling) -> None:
    """Raises UsageError: a value outside its range."""
    for name, value, good, valid in (
        ("temperature", sampling.temperature, 0 <= sampling.temperature <= 5, "0 (greedy) to 5"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 up to 1 (off)"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "0 (off) to 1"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            0 < sampling.repetition_penalty <= 10,
            "above 0 to 10",
        ),
        ("seed", sampling.seed, sampling.seed is None or 0 <= sampling.seed < 1 << 63, "0 to 2^63 - 1"),
    ):
        if not good:
            raise UsageError(f"{name} cannot be {value}", "", f"Valid is {valid}.")


class Sampler:
    """Draws tokens for one answer; the same seed, prompt and model draw the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        check(sampling)
        # Colder than this, float32 logits overflow and the likeliest token has all of the probability anyway.
        self._greedy = sampling.temperature < 1e-6
        self._processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if not self._greedy:
            self._processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._processors.append(TopPLogitsWarper(sampling.top_p))
            if sampling.min_p > 0:
                self._processors.append(MinPLogitsWarper(sampling.min_p))
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def draw(self, ids: Tensor, logits: Tensor) -> int:
        """The next token. ids: (1, T) int64 so far, the prompt included. logits: (1, V)."""
        scores = self._processors(ids, logits.float().cpu())
        if self._greedy:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
