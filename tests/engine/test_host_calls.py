"""How much Python a decode step of an offloaded layer runs: its calls, counted. Each takes the host some fraction of a
microsecond at least, and those of torch several; while they run, neither device nor link is given work.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch

from .test_waits import HIDDEN, NBYTES, PLAIN, Counted, layers

# Functions, of Python and of C, that one layer and token may call, several tokens' mean: lower these as they fall. Half
# of the steps here copy rows.
MOST = {None: 425, "gate": 700}


@pytest.mark.parametrize("predict", [None, "gate"])
def test_a_layer_takes_so_many_calls(predict: str | None) -> None:
    device = Counted(NBYTES)
    made, _ = layers(device, PLAIN, predict=predict)
    calls, tokens = Counter[str](), 20

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call"):
            name = frame.f_code.co_qualname if event == "call" else getattr(called, "__qualname__", str(called))
            calls[f"{event} {name}"] += 1

    with torch.inference_mode():
        for token in range(2 * tokens):
            x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(token))
            chosen, weights = torch.tensor([[token % 4, 3 - token % 4]]), torch.tensor([[0.6, 0.4]])
            for layer in made:
                sys.setprofile(count if token >= tokens else None)
                try:
                    x = layer(x, chosen, weights)
                finally:
                    sys.setprofile(None)
    device.close()
    each = calls.total() / (tokens * len(made))
    assert 0 < each <= MOST[predict], calls.most_common(30)
