"""The papers' tables, each on a tiny pack: they are all there, and their figures behave as what they measure does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from floe_chat.engine.machine.random_weights import Shapes
from floe_chat.engine.paper import predictors
from floe_chat.engine.paper.cards import STEPS, scene
from floe_chat.engine.paper.papers import Grid, Made, entries, entry
from floe_chat.engine.paper.study import Study
from floe_chat.engine.paper.tables import MAKERS, make
from floe_chat.engine.quality.candidates import Candidate, compute
from floe_chat.engine.quality.pack_source import PackSource
from floe_chat.engine.quality.references import NO_SPARSITY, pack_logits
from floe_chat.engine.quality.told import Told
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.types import Calls
from floe_chat.models.errors import UsageError
from floe_chat.models.packing.calibration import threshold_at
from floe_chat.models.packing.pack import PackSpec

from .. import families
from ..helpers import make_pack, relative_rms

TOKENS, LAYERS, EXPERTS, TOP_K = 512, 2, 4, 2
NEEDS_SOURCE = {"dualsparse-t1"}


def study_of(pack: Path, source: Path | None = None) -> Study:
    ids = torch.randint(3, 250, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    told = Told(lambda _step: None, lambda _note: None)
    return Study(pack, "tiny", source, ids, "random", TOKENS, "", "", told, Shapes(128, 96, 64))


@pytest.fixture(scope="module")
def study(tiny_pack: Path) -> Study:
    return study_of(tiny_pack)


@pytest.fixture(scope="module")
def with_source(tiny_pack: Path, tiny_checkpoint: Path) -> Study:
    return study_of(tiny_pack, tiny_checkpoint)


def titled(made: Made, title: str) -> Grid:
    return next(grid for grid in made.grids if grid.title == title)


def rising(row: tuple[float | None, ...], slack: float = 0.0) -> bool:
    known = [value for value in row if value is not None]
    return all(later >= earlier - slack for earlier, later in itertools.pairwise(known))


def loses_more(made: Made) -> None:
    """By share or with fewer bits, each way by itself: from the first figure to the last, at least."""
    for row in titled(made, "KL, nats").rows.values():
        known = [value for value in row if value is not None]
        assert known[-1] > known[0] >= 0 and known[-1] == max(known)


def drops_more(made: Made) -> None:
    rows = made.grids[0].rows
    assert rows["dropped, %"][0] == 0 == rows["KL, nats"][0] and rising(rows["dropped, %"])
    assert rows["dropped, %"][-1] not in (None, 0)


def loses_by_theta(made: Made) -> None:
    rows = made.grids[0].rows
    assert rows["active neurons, %"][0] == 100 and rising(tuple(-(value or 0) for value in rows["active neurons, %"]))
    assert rows["KL, nats"][0] == 0 != rows["KL, nats"][-1]


def drops_as_many(made: Made) -> None:
    rows = made.grids[0].rows
    assert rows["no drop"][:2] == (0, 0)
    assert all(0 < (row[0] or 0) < 100 and (row[1] or 0) > 0 for name, row in rows.items() if name != "no drop")


def replaces_more(made: Made) -> None:
    absent = made.grids[0].rows["absent bytes, %"]
    assert (absent[-1] or 0) < (absent[0] or 0) and made.grids[0].rows["KL, nats"][0] == 0


def more_bits_are_better(made: Made) -> None:
    rows = made.grids[0].rows
    kl, bits = ({name: row[at] or 0 for name, row in rows.items()} for at in (0, 3))
    assert kl["HQQ INT3"] < kl["HQQ INT2"] and bits["HQQ INT3"] > bits["HQQ INT2"]
    assert bits["FloE 90%"] < bits["FloE 80%"] < bits["FloE-Wup 80%"]


def finer_experts_give_the_same(made: Made) -> None:
    rows = made.grids[0].rows
    whole = [row[1] or 0 for name, row in rows.items() if "1T" not in name]
    assert whole == pytest.approx([whole[0]] * 3, rel=1e-4)
    assert all((row[0] or 0) > 0 for name, row in rows.items() if "1T" in name)


def loses_with_corm(made: Made) -> None:
    rows = made.grids[0].rows
    assert (rows["4 bits"][0] or 0) < (rows["CORM, 55 % left out"][0] or 0)


def shares_of_a_normal(made: Made) -> None:
    rows = made.grids[0].rows
    assert all(rising(row) and (row[0] or 0) >= 0 and (row[-1] or 0) <= 100 for row in rows.values())
    assert rows["a normal distribution"] == pytest.approx((7.97, 19.7, 38.3, 68.3, 95.4), abs=0.1)
    assert [sum(share for _, share in series) <= 1.001 for series in made.plot.values()] == 3 * [True]


def peaks_after_silu(made: Made) -> None:
    for before, deviation, _after, narrower, _close in made.grids[0].rows.values():
        assert abs(before or 0) < 1 and 0 < (narrower or 0) < (deviation or 0)


def shares_by_threshold(made: Made) -> None:
    rows = made.grids[0].rows
    assert len(rows) >= LAYERS and all(rising(row) for row in rows.values())
    assert all(0 <= (share or 0) <= 100 for row in rows.values() for share in row)


def fewer_by_theta(made: Made) -> None:
    rows = made.grids[0].rows
    assert list(rows) == ["layer 1", "layer 2", "all layers"]
    assert all(rising(tuple(-(share or 0) for share in row)) and (row[0] or 0) > 50 for row in rows.values())


def popularity(made: Made) -> None:
    mean, _, low, high, least = made.grids[0].rows["tiny"]
    assert 0 <= (least or 0) <= (low or 0) <= (high or 0) <= 1 and 0 < (mean or 0) < 1
    assert all((best or 0) >= (chance or 0) >= (worst or 0) for best, chance, worst in made.grids[1].rows.values())
    assert max(share for row in made.heat.values() for share in row) == 1 and len(made.heat) == LAYERS


def a_map(made: Made) -> None:
    assert len(made.heat) == EXPERTS and all(rising(row) for row in made.grids[0].rows.values())
    assert all((row[1] or 0) > 25 for row in made.grids[0].rows.values()), "the most used give more than others"


def shares_add_up(made: Made) -> None:
    for row in made.grids[0].rows.values():
        assert sum(share or 0 for share in row) == pytest.approx(100, abs=0.1)
    assert sum(row[0] or 0 for row in made.grids[1].rows.values()) == pytest.approx(100, abs=0.01)


def drops_to_the_mean(made: Made) -> None:
    assert all(rising(row) and 0 < (row[-1] or 0) <= 75 for row in made.grids[0].rows.values())


def signs(made: Made) -> None:
    rows = made.grids[0].rows
    assert rows["sum of |gate|"][:2] == (0, 0) == rows["sum of |gate · up|"][:2]
    assert all(0 < (share or 0) < 100 for share in rows["sum of gate · up"][:2])


def falls_by_rank(made: Made) -> None:
    for row in made.grids[0].rows.values():
        assert rising(tuple(-(score or 0) for score in row)) and sum(score or 0 for score in row) == pytest.approx(1)


def chances_by_rank(made: Made) -> None:
    for row in made.grids[0].rows.values():
        assert sum(share or 0 for share in row) == pytest.approx(100 * TOP_K), "some are used, whatever their rank"


def predictions(made: Made) -> None:
    cosine, experts, recall, precision, cost = made.grids
    assert cosine.columns == ("raw", "gate", "alone", "partial") and list(cosine.rows) == ["to layer 2", "mean"]
    assert all(
        0 <= (share or 0) <= 1 for grid in (experts, recall, precision) for row in grid.rows.values() for share in row
    )
    named = dict(zip(experts.columns, experts.rows["mean"], strict=True))
    assert all((named[f"{name}, K + 1"] or 0) >= (named[name] or 0) for name in ("learned", "partial"))
    assert recall.columns[:2] == precision.columns[:2] == ("gate, true", "partial, true")
    assert all((row[0] or 0) > 0 for row in cost.rows.values()) and (cost.rows["learned"][1] or 0) > 0
    assert "learned" in made.notes[0]


def predicted_shares(made: Made) -> None:
    assert all(0 <= (share or 0) <= 100 for row in made.grids[0].rows.values() for share in row)
    assert sum(share or 0 for share in made.grids[0].rows["mean"]) > 0


def predicted_scores(made: Made) -> None:
    errors, named = made.grids
    assert all(0 < (error or 0) < 1 for error in errors.rows["mean"])
    assert all(0 < (share or 0) <= 1 for share in named.rows["mean"])


def faster_by_share(made: Made) -> None:
    times, gains = made.grids
    assert all((cell or 0) > 0 for row in times.rows.values() for cell in row)
    assert [row[0] for row in gains.rows.values()] == [1, 1] and len(times.rows) == 2


def times(made: Made) -> None:
    assert all((cell or 0) > 0 for grid in made.grids for row in grid.rows.values() for cell in row[:1])


def both_ways(made: Made) -> None:
    rows = made.grids[0].rows
    assert rising(rows["loading"]) and rows["loading"][-1] == rows["the whole expert"][0]
    assert rows["both, one after the other"][3] == pytest.approx((rows["packing"][3] or 0) + (rows["loading"][3] or 0))


def by_tokens(made: Made) -> None:
    times(made)
    cards = [grid for grid in made.grids if "measured" not in grid.title]
    assert cards and all(rising(row) for grid in cards for row in grid.rows.values())


def bandwidth(made: Made) -> None:
    for grid in made.grids:
        etp, soft, gain = grid.rows.values()
        assert all((cell or 0) > 0 for row in (etp, soft) for cell in row)
        assert gain[0] == pytest.approx(100 * ((soft[0] or 0) / (etp[0] or 1) - 1))


def dropping_spares_work(made: Made) -> None:
    rows = made.grids[0].rows
    assert rows["no drop"][0] == 1 and rows["no drop"][2] == 0
    assert all(0 < (row[2] or 0) < 100 and (row[1] or 0) > 0 for name, row in rows.items() if name != "no drop")


def speeds_by_length(made: Made) -> None:
    rows = titled(made, "tokens/s").rows
    assert len(rows) == 8 and all((speed or 0) > 0 for row in rows.values() for speed in row[1:])
    short, long = rows["16 in, 64 out"], rows["16 in, 256 out"]
    assert all((b or 0) > (a or 0) for a, b in zip(short, long, strict=True) if a), "prompts weigh less"
    gains = titled(made, "times as fast as, average").rows["floe-chat"]
    assert (gains[0] or 0) > (gains[1] or 0) > (gains[3] or 0)


def speeds_by_memory(made: Made) -> None:
    rows = made.grids[0].rows
    assert rising(rows["mixtral-offloading"]) and rising(rows["Fiddler"]) and len(set(rows["Mixtral-GPU"])) == 1
    assert (rows["floe-chat"][-1] or 0) > (rows["floe-chat"][0] or 0)


def pairs_of_lengths(made: Made) -> None:
    gains, *each = made.grids
    assert all((gain or 0) > 1 for row in gains.rows.values() for gain in row) and len(gains.rows) == len(each) == 2
    assert all(len(grid.rows) == 24 for grid in each)


def longer_answers_gain_more(made: Made) -> None:
    over, means = made.grids
    assert rising(over.rows["over offloading, prompt 64"])
    assert all((mean or 0) > 1 for row in means.rows.values() for mean in row)


def each_part_helps(made: Made) -> None:
    (row,) = made.grids[0].rows.values()
    assert row[0] == 1 and (row[1] or 0) > 1 and (row[3] or 0) > (row[1] or 0)


def less_is_slower_and_better(made: Made) -> None:
    rows = made.grids[0].rows
    assert (rows["quantization"][0] or 0) < (rows["CORM"][0] or 0) < (rows["offloading"][0] or 0)
    assert (rows["quantization"][1] or 0) > (rows["offloading"][1] or 0) < (rows["CORM"][1] or 0)


def times_add_up(made: Made) -> None:
    for token, loading, computing, overlap in made.grids[0].rows.values():
        assert (loading or 0) + (computing or 0) - (overlap or 0) == pytest.approx(token, rel=0.02)


def a_share_of_the_token(made: Made) -> None:
    ((token, predictor, share),) = made.grids[0].rows.values()
    assert share == pytest.approx(100 * (predictor or 0) / (token or 1)) and 0 < (share or 0) < 50


def engines_of_both_settings(made: Made) -> None:
    rows = made.grids[0].rows
    assert rows["DeepSpeed, on demand"] == tuple(max(column) for column in zip(*rows.values(), strict=True))  # pyright: ignore[reportArgumentType]
    assert all((time or 0) > 0 for row in rows.values() for time in row)


def shares_found(made: Made) -> None:
    rows = made.grids[0].rows
    assert all(0 <= (share or 0) <= 100 for row in rows.values() for share in row)
    assert (rows["importance-driven"][0] or 0) > (rows["static, the most popular"][0] or 0)


def prompts_stream(made: Made) -> None:
    rows = made.grids[0].rows
    assert (rows["floe-chat"][0] or 0) < (rows["layer by layer"][0] or 0)


def substitution_spares_low_scores(made: Made) -> None:
    for grid in made.grids:
        assert 0 < (grid.rows["+ER"][1] or 0) < (grid.rows["+CE"][1] or 0)
        assert all((count or 0) > 0 for row in grid.rows.values() for count in row)


def steps_gain(made: Made) -> None:
    times, hits = (grid.rows for grid in made.grids)
    assert list(times) == list(STEPS) == list(hits)
    for setting in range(2):
        assert (times["+BA"][setting] or 0) < (times["+CE"][setting] or 0)
        assert (hits["+ER"][setting] or 0) > (hits["+CE"][setting] or 0)


def prefetching_keeps_the_link_busy(made: Made) -> None:
    rows = made.grids[0].rows
    assert all((rows["+Pre, link"][at] or 0) >= (rows["+ER, link"][at] or 0) > 0 for at in range(2))


def the_cpu_takes_a_share(made: Made) -> None:
    rows = made.grids[0].rows
    assert rows["+Pre, CPU"] == (0, 0) and all((time or 0) > 0 for time in rows["+BA, CPU"])
    assert all((rows["+BA, link"][at] or 0) < (rows["+Pre, link"][at] or 0) for at in range(2))


def balance_spares_the_busiest(made: Made) -> None:
    rows = made.grids[0].rows
    assert list(rows) == ["1T", "2T", "2T, load-aware"]
    assert all(20 < (row[1] or 0) < 30 and (row[2] or 0) >= 1 and (row[3] or 0) > 0 for row in rows.values())
    assert (rows["2T, load-aware"][2] or 0) < (rows["2T"][2] or 0), "loads come closer"


CHECKS: dict[str, Callable[[Made], None]] = {
    **dict.fromkeys(("floe-t5", "floe-t6", "floe-t7", "floe-t8", "floe-f3", "floe-f9"), loses_more),
    **dict.fromkeys(("floe-t3", "floe-f10"), more_bits_are_better),
    "corm-t2": loses_with_corm,
    "corm-f10": loses_by_theta,
    "dualsparse-t1": finer_experts_give_the_same,
    "dualsparse-t2": drops_as_many,
    "dualsparse-f7": drops_more,
    "dualsparse-f11": balance_spares_the_busiest,
    "importance-t3": replaces_more,
    "floe-f2": shares_of_a_normal,
    "floe-f11": peaks_after_silu,
    "fiddler-t2": shares_by_threshold,
    "fiddler-f4": popularity,
    "corm-f2": fewer_by_theta,
    "dualsparse-f1": a_map,
    "dualsparse-f6": shares_add_up,
    "dualsparse-f12": drops_to_the_mean,
    "dualsparse-f13": signs,
    "importance-f4": falls_by_rank,
    "importance-f11": chances_by_rank,
    "floe-f4": predictions,
    "corm-f5": predicted_shares,
    "importance-f10": predicted_scores,
    "importance-f18": predicted_shares,
    "floe-t1": faster_by_share,
    "floe-f7": times,
    "corm-f9": both_ways,
    "fiddler-f3": by_tokens,
    "importance-f6": times,
    "importance-f8": by_tokens,
    "dualsparse-f9": bandwidth,
    "dualsparse-f10": dropping_spares_work,
    "floe-f6": speeds_by_length,
    "floe-f8": speeds_by_memory,
    "fiddler-f2": pairs_of_lengths,
    "corm-f7": longer_answers_gain_more,
    "corm-f8": each_part_helps,
    "corm-t1": less_is_slower_and_better,
    "corm-t3": times_add_up,
    "corm-t4": a_share_of_the_token,
    "importance-f12": engines_of_both_settings,
    "importance-f13": shares_found,
    "importance-f14": prompts_stream,
    "importance-f15": substitution_spares_low_scores,
    "importance-f16": steps_gain,
    "importance-f17": prefetching_keeps_the_link_busy,
    "importance-f19": the_cpu_takes_a_share,
}


# Figure 10 and table 8 of FloE have the code of its other tables and figures of quality.
SLOW = {"dualsparse-f9", "dualsparse-t2", "floe-f3", "floe-f8", "floe-f9", "floe-t5", "floe-t6", "floe-t7", "floe-t8"}
CASES = [
    pytest.param(name, marks=pytest.mark.thorough) if name in SLOW else name
    for name in {maker: name for name, maker in MAKERS.items()}.values()
]


@pytest.mark.parametrize("name", CASES)
def test_made(name: str, study: Study, with_source: Study) -> None:
    made = make(name, with_source if name in NEEDS_SOURCE else study)
    figures = [value for grid in made.grids for row in grid.rows.values() for value in row if value is not None]
    assert figures and all(map(math.isfinite, figures)) and made.here
    assert all(0 <= share <= 1 for row in made.heat.values() for share in row)
    CHECKS[name](made)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deepseek_v2", "gemma4_text", "lfm2_moe", "gpt_oss"])
def test_other_families_give_figures_or_a_reason(tmp_path: Path, family: str) -> None:
    make_pack(families.make(family, tmp_path / "source"), tmp_path / "pack", PackSpec())
    study = study_of(tmp_path / "pack")
    for name in ("floe-f4", "corm-f5", "importance-f13", "dualsparse-f12"):
        try:
            made = make(name, study)
        except UsageError as error:
            assert error.cause, name
        else:
            assert all(0 <= (share or 0) <= 100 for row in made.grids[0].rows.values() for share in row), name


@pytest.mark.thorough
def test_prompts_are_the_texts_tokens_and_do_not_repeat(study: Study) -> None:
    own, short = (scene(study, "mixtral-8x7b", "rtx3090-24gb", prompt=length) for length in (300, 16))
    assert len(own.prompt.index) == 300 and len(own.trace.index) == len(short.trace.index) == len(short.prompt.index)
    for name in ("index", "weights", "values", "ahead", "scores", "heard"):
        assert np.array_equal(getattr(own.trace, name), getattr(own.prompt, name)[: len(own.trace.index)])


def test_every_entry_is_made_or_says_why_not() -> None:
    assert {one.id for one in entries().values() if not one.why_not} == set(MAKERS) == set(CHECKS)
    with pytest.raises(UsageError, match="floe-t8"):
        entry("floe-t88")
    with pytest.raises(UsageError, match="dense model"):
        entry("floe-t2")


def test_a_source_takes_the_packs_place(study: Study, with_source: Study) -> None:
    """The pack's gates have 4 bits, which are nearly the source's."""
    packed, source = (make("fiddler-t2", one) for one in (study, with_source))
    for layer, row in source.grids[0].rows.items():
        assert row == pytest.approx(packed.grids[0].rows[layer], abs=5) and row != packed.grids[0].rows[layer]
    assert "source" in source.here and "rounded" in packed.here
    few = titled(make("floe-t8", with_source), "KL, nats").rows["up"]
    assert 0 < (few[0] or 0) < 1e-3 < (few[3] or 0)
    assert make("floe-f4", with_source).notes[-1] == "--source has no effect on this table."


def test_a_table_that_needs_the_source_says_so(study: Study) -> None:
    with pytest.raises(UsageError, match="--source"):
        make("dualsparse-t1", study)


def test_neurons_are_counted_as_the_kernels_find_them(study: Study) -> None:
    generator = torch.Generator().manual_seed(3)
    true, guess = torch.randn(2, 30, 64, generator=generator)
    chosen, named = (torch.rand(30, EXPERTS, generator=generator).topk(TOP_K).indices for _ in range(2))
    layer = study.loaded.packed.layer(1)
    limits = threshold_at(layer.thresholds, 0.6)

    def found(hidden: torch.Tensor, experts: torch.Tensor) -> set[tuple[int, int, int]]:
        tokens, flat = torch.arange(30).repeat_interleave(TOP_K), experts.flatten()
        active = kernels.signal_gemv(hidden, layer.signal, Calls(tokens, flat, torch.ones(len(flat))), limits[flat])
        calls = torch.arange(len(flat)).repeat_interleave(active.offsets.diff())
        return set(zip(tokens[calls].tolist(), flat[calls].tolist(), active.neurons.tolist(), strict=True))

    wanted, predicted = found(true, chosen), found(guess, named)
    then = predictors.Seen(true, true, true, chosen, chosen)
    recall, precision = predictors.neurons(study.loaded.packed, 1, then, guess, named, 0.6)
    assert (recall, precision) == pytest.approx(
        (len(wanted & predicted) / len(wanted), len(wanted & predicted) / len(predicted)), abs=2e-3
    )


def test_a_pack_in_its_sources_place_gives_its_own_logits(study: Study) -> None:
    windows, passages = torch.randint(3, 250, (2, 2, 40), generator=torch.Generator().manual_seed(2))
    source = PackSource(study.loaded)
    with torch.inference_mode():
        plain, sparse = compute(
            source, [Candidate(), Candidate(rule=Rule(theta=0.3))], passages, windows, 20, lambda _step: None, ()
        )
        expected = torch.stack([pack_logits(study.loaded, NO_SPARSITY, row[None], 20) for row in windows])
    assert relative_rms(plain.logits(), expected) <= 1e-3
    assert relative_rms(sparse.logits(), expected) > 1e-2 and sparse.taken.active < plain.taken.active
