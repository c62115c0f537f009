"""Texts that end an answer, however it is cut into pieces."""

from __future__ import annotations

import random

from floe_chat.app.server.stops import Stops


def test_as_if_the_text_came_at_once() -> None:
    rng = random.Random(0)
    met = 0
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randrange(30)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4))]
        ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        cutter, got, rest = Stops(stops), "", text
        while rest:
            size = rng.randrange(1, 5)
            got += cutter.feed(rest[:size])
            rest = rest[size:]
        got += cutter.rest()
        assert cutter.met == bool(ends)
        assert got == (text[: min(ends)[1]] if ends else text)  # the stop that is complete first ends it
        met += bool(ends)
    assert met > 1000
