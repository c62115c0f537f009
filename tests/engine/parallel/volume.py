"""What the patterns of DualSparse-MoE figure 5 send for a routing, counted in tokens' states.

R = G · T processes, G groups of experts with T slices each. A token is at home in one process, whose group is g. Its
experts lie in some groups; in each of these groups, all T processes need its state, and each of them has a part of the
group's result. Assumed are states that are sent once per process, whatever number of its experts a token chose, and
results that are added up before they are sent.

- EP and S-ETP: to and from T processes of each of those groups, without the home itself:
  sum over groups of (T - [group is g]) each way.
- ETP: the all-to-all brings the state to one process of each other group, and the all-gather to the T - 1 others of
  each: sum over groups of ([group is not g] + T - 1) each way, which is the same number.

What differs between them is the number of steps: 2 a layer for EP and S-ETP, 4 for ETP; and of messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sent:
    """What one process sends in a layer: states to experts, results back, and the messages of both ways."""

    rows: int
    results: int
    messages: int


def arriving(choices: Tensor, groups: int, slices: int, experts: int) -> Tensor:
    """(R, G) how many tokens of each home have experts in each group, for a routing (n, K)."""
    size, tokens = groups * slices, len(choices)
    firsts = torch.tensor([group * experts // groups for group in range(1, groups)], dtype=torch.long)
    group = torch.bucketize(choices, firsts, right=True)
    hit = torch.zeros(tokens, groups, dtype=torch.bool).scatter_(1, group, True)
    begins = [rank * tokens // size for rank in range(size + 1)]
    return torch.stack([hit[begins[r] : begins[r + 1]].sum(0) for r in range(size)])


def direct(come: Tensor, slices: int, rank: int) -> Sent:
    """EP, where slices is 1, and S-ETP."""
    size, own = len(come), rank // slices
    there = [int(come[rank, to // slices]) for to in range(size) if to != rank]
    back = [int(come[home, own]) for home in range(size) if home != rank]
    return Sent(sum(there), sum(back), sum(map(bool, there + back)))


def in_steps(come: Tensor, slices: int, rank: int) -> Sent:
    """ETP."""
    groups, (own, slice_) = come.shape[1], divmod(rank, slices)
    alike = [group * slices + slice_ for group in range(groups) if group != own]
    there = [int(come[rank, to // slices]) for to in alike]
    back = [int(come[home, own]) for home in alike]
    arrived = [int(sum(come[group * slices + t, own] for group in range(groups))) for t in range(slices)]
    gathered = [arrived[slice_]] * (slices - 1)
    scattered = [count for t, count in enumerate(arrived) if t != slice_]
    messages = sum(map(bool, there + back + gathered + scattered))
    return Sent(sum(there) + sum(gathered), sum(back) + sum(scattered), messages)
