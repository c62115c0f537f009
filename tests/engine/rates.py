"""Made-up machines."""

from __future__ import annotations

import random

from floe_chat.engine.offload.lane_rates import Rates

RANDOM = random.Random()


def some_rates() -> Rates:
    def about(value: float) -> float:
        return value * 10 ** RANDOM.uniform(-1, 1)

    return Rates(
        link_bytes_s=about(20e9),
        link_latency_s=about(5e-6),
        cpu_bytes_s=about(30e9),
        cpu_batch_bytes_s=about(100e9),
        cpu_latency_s=about(2e-5),
        gpu_bytes_s=about(500e9),
        launch_s=about(5e-6),
    )
