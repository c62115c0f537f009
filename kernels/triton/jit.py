"""How device code is declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def device_code(*changing: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function that Triton compiles, or interprets under TRITON_INTERPRET=1.

    Args:
        changing: integer arguments that take many values; none of them gets a compilation of its own.
    """
    return triton.jit(do_not_specialize=list(changing))
