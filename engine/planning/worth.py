"""What speed is worth against quality loss: the rule of every recommendation, and of what is chosen by itself."""

from __future__ import annotations

import math

from .measured_figures import figures

WORTH = 0.02  # nats of quality loss, as the demo loses it, outweighed by twice the speed
READING = 6.0  # tokens/s: about 270 words a minute, as fast as most people read
ENOUGH = 20.0  # tokens/s, faster than most people read
BEYOND = 1 / 3  # share of that which twice the speed outweighs above it
DOWNLOAD = 1 / 4  # share of that which half the download outweighs
NEWER = 0.5  # years by which a newer model counts as twice as large
CLEARLY = 0.11  # doublings by which a choice must be better than the usual one, or than a more exact one
KV_FORMS = (16, 8)  # bits that keys and values may have; the first is the usual form


def of_speed(tokens_s: float) -> float:
    """Doublings of speed that count: all up to `ENOUGH`, `BEYOND` of those above."""
    return math.log2(min(tokens_s, ENOUGH)) + BEYOND * math.log2(max(tokens_s / ENOUGH, 1.0))


def pays(gain: float, loss: float) -> bool:
    """Whether so many doublings of speed are clearly worth so many nats."""
    return gain - loss / WORTH >= CLEARLY


def shorter_pays(times: float, loss: float) -> bool:
    """Whether a download shorter by so many times, once, is worth so many nats: `DOWNLOAD` of twice the speed."""
    return DOWNLOAD * math.log2(times) > loss / WORTH


def kv_loss(bits: int) -> float:
    """Quality loss of keys and values of so many bits, in nats of mean KL divergence, by the demo model."""
    return figures().quantization["kv"][bits]
