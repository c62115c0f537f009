"""Which rows leave a pool, by each policy; what it remembers of their use, and begins with."""

from __future__ import annotations

import random

import numpy as np
import pytest
from floe_chat.engine.offload import eviction
from floe_chat.engine.offload.eviction import Policy
from floe_chat.engine.offload.row_pool import Keys, RowPool
from floe_chat.models.pack.usage_file import Heat, from_popularity

from ..kernels.plain_pool import definition
from .pools import POLICIES, bring, find, keys_of, present


def hits(policy: Policy, asked: list[Keys], experts: int, neurons: int, capacity: int) -> float:
    pool = RowPool(1, experts, neurons, capacity, policy)
    count = total = 0
    for keys in asked:
        found = find(pool, 0, keys)
        count, total = count + int(found.ready.sum()), total + keys.size
        bring(pool, 0, keys[found.slots < 0])
        pool.release()
    return count / total


@pytest.mark.parametrize("capacity", [1, 5, 20])
@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_where_the_window_is_the_whole_pool_the_policy_is_exact(policy: Policy, capacity: int) -> None:
    dice, pool = random.Random(capacity), RowPool(1, 3, 11, capacity, policy)
    order: list[int] = []  # the next to go first
    for _ in range(300):
        key = min(dice.randrange(33), dice.randrange(33))
        found = find(pool, 0, keys_of(key))
        assert found.ready[0] == (key in order)
        if key in order:
            if policy == "lru":
                order.remove(key)
                order.append(key)
        else:
            order = [*order[len(order) == capacity :], key]
            bring(pool, 0, keys_of(key))
        pool.release()
        assert present(pool) == set(order)


def test_by_score_the_rows_of_the_expert_that_the_router_forgot_go_first() -> None:
    pool = RowPool(1, 2, 8, 8)
    for turn in range(40):
        definition(pool.table).hear(0, np.array([0.9, 0.1] if turn < 20 else [0.1, 0.9]))
        keys = keys_of(0, 1, 2, 3) if turn < 20 else keys_of(8, 9, 10, 11)
        found = find(pool, 0, keys)
        bring(pool, 0, keys[found.slots < 0])
        pool.release()
    bring(pool, 0, keys_of(12, 13))
    assert len(present(pool) & {0, 1, 2, 3}) == 2 and {8, 9, 10, 11, 12, 13} <= present(pool)


def test_by_score_the_neuron_that_is_active_more_often_stays() -> None:
    rng, often = np.random.default_rng(5), 20
    asked = [
        np.concatenate([np.flatnonzero(rng.random(often) < 0.8), often + np.flatnonzero(rng.random(180) < 0.2)])
        for _ in range(400)
    ]
    found = {policy: hits(policy, asked, 1, 200, 60) for policy in POLICIES}
    assert found["score"] > max(found["lru"], found["fifo"]) + 0.02, found


def test_by_score_the_layer_whose_turn_is_next_keeps_its_rows() -> None:
    pool = RowPool(3, 1, 4, 9)
    for turn in range(30):
        find(pool, turn % 3, np.arange(3))
        if turn < 3:
            bring(pool, turn, np.arange(3))
        pool.release()
    find(pool, 0, keys_of(3))  # layers 1 and 2 come before layer 0 does again
    bring(pool, 0, keys_of(3))
    assert [len(present(pool, layer)) for layer in range(3)] == [3, 3, 3]


def test_a_prefetch_leaves_rows_that_are_worth_more_than_a_guess() -> None:
    pool = RowPool(1, 2, 8, 4)
    for _ in range(300):
        definition(pool.table).hear(0, np.array([1.3, 0.0]))
        keys = np.arange(4)
        bring(pool, 0, keys[find(pool, 0, keys).slots < 0])
        pool.release()
    assert pool.reserve(0, keys_of(8, 9), urgent=False).size == 0 and present(pool) == {0, 1, 2, 3}
    assert pool.reserve(0, keys_of(8, 9), urgent=True).size == 2


def test_a_prefetch_does_not_displace_another_that_is_still_to_be_asked_for() -> None:
    pool = RowPool(2, 1, 8, 4)
    bring(pool, 1, keys_of(0, 1, 2), urgent=False)
    assert bring(pool, 1, keys_of(3, 4), urgent=False).size == 1
    find(pool, 1, keys_of(7))  # the guess was wrong: its rows have no claim any more
    assert bring(pool, 1, keys_of(4, 5, 6), urgent=False).size == 3


def test_a_pool_keeps_a_small_part_of_itself_free_for_the_next_step() -> None:
    for capacity, kept in ((30, 3), (64, 6)):
        pool = RowPool(1, 2, 100, capacity)
        bring(pool, 0, np.arange(capacity))
        pool.release()
        slots = pool.visit(6)
        assert slots.size == 6
        pool.keep(0, np.arange(100, 106), slots)
        pool.release()
        assert pool.capacity - pool.used == kept
    for policy in ("lru", "fifo"):
        pool = RowPool(1, 2, 100, 30, policy)
        bring(pool, 0, np.arange(30))
        pool.release()
        pool.filled(pool.keep(0, np.arange(100, 106), pool.visit(6)))
        assert pool.used == 30, "all rows stay that were copied"


def test_by_score_rows_that_are_seldom_used_displace_no_others() -> None:
    """FloE's rows have long tails: what is used once in a while is copied for its step alone."""
    rng, pool = np.random.default_rng(3), RowPool(4, 2, 400, 400)
    for turn in range(1200):
        layer = turn % 4
        often = np.flatnonzero(rng.random(60) < 0.9)
        seldom = 60 + np.flatnonzero(rng.random(340) < 0.05)
        keys = np.concatenate([often, seldom])
        found = find(pool, layer, keys)
        absent = keys[found.slots < 0]
        slots = pool.visit(absent.size)
        pool.filled(pool.keep(layer, absent[: slots.size], slots))
        pool.release()
    assert sum(len(present(pool, layer) & set(range(60))) for layer in range(4)) >= 228


def test_scores_that_are_no_numbers_are_forgotten() -> None:
    pool = RowPool(1, 2, 3, 3)
    before = pool.heat().scores
    definition(pool.table).hear(0, np.array([np.nan, 0.5]))
    definition(pool.table).hear(0, np.array([np.inf, 0.5]))
    assert (pool.heat().scores == before).all()


@pytest.mark.parametrize("growth", [3.0, 1e20], ids=["often", "never"])
def test_uses_are_moving_means_over_the_calls_of_an_expert(growth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "LARGEST_GROWTH", growth)
    rng, neurons = np.random.default_rng(2), 9
    pool, mean = RowPool(2, 3, neurons, 5), np.zeros((2, 3, neurons))
    for turn in range(300):
        layer = turn % 2
        active = rng.random((3, neurons)) < 0.4
        active[rng.integers(3)] = False
        for expert in np.flatnonzero(active.any(1)):
            mean[layer, expert] += eviction.USE_RATE * (active[expert] - mean[layer, expert])
        find(pool, layer, np.flatnonzero(active.reshape(-1)))
    np.testing.assert_allclose(pool.heat().uses, mean, rtol=1e-4)


def random_heat(layers: int, experts: int, neurons: int) -> Heat:
    rng = np.random.default_rng(layers + neurons)
    return Heat(
        rng.dirichlet(np.ones(experts), layers).astype(np.float32),
        rng.random((layers, experts, neurons), dtype=np.float32),
    )


@pytest.mark.parametrize("capacity", [0, 1, 17, 2 * 3 * 11, 100])
def test_a_warm_start_names_the_hottest_neurons_first(capacity: int) -> None:
    kept = random_heat(2, 3, 11)
    pool = RowPool(2, 3, 11, capacity)
    layers, keys = pool.warm(kept)
    worth = (kept.scores[..., None] * kept.uses).reshape(2, 33)
    assert keys.size == min(capacity, 66) and len(set(zip(layers.tolist(), keys.tolist(), strict=True))) == keys.size
    assert worth[layers, keys].tolist() == sorted(worth.reshape(-1).tolist(), reverse=True)[: keys.size]
    for layer in range(2):
        bring(pool, layer, keys[layers == layer], urgent=False)
    assert sum(len(present(pool, layer)) for layer in range(2)) == keys.size
    np.testing.assert_allclose(pool.heat().uses, kept.uses, rtol=1e-6)


def test_without_heat_popular_experts_come_first_and_of_each_the_important_neurons() -> None:
    guess = from_popularity(np.array([[3.0, 1.0], [0.0, 0.0]]), 4)
    np.testing.assert_allclose(guess.scores, [[0.75, 0.25], [0.5, 0.5]])
    layers, keys = RowPool(2, 2, 4, 3).warm(guess)
    assert (layers.tolist(), keys.tolist()) == ([0, 0, 0], [0, 1, 2])


def test_heat_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="heat of"):
        RowPool(2, 3, 11, 4).warm(random_heat(2, 3, 12))
