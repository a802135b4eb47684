"""Noise ratios, schedules over blocks and over the run, and the state that a target picks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jacobi_training.noise import SCHEDULES, NoiseSchedule, Target, noise_ratio, pick_state

RNG = random.Random(0)  # where it must not matter


def ratios_wanted(blocks: int, progress: float = 0.0, phase: int = 0, **options: Any) -> list[float | None]:
    return [t.ratio for t in NoiseSchedule(**options).targets(blocks, progress, random.Random(0), phase)]


@pytest.mark.parametrize(
    ("state", "ratio"),
    [([7, 0, 0, 0, 0], 1.0), ([7, 1, 0, 3, 4], 0.75), ([7, 1, 2, 3, 0], 0.25), ([7, 1, 2, 3, 4], 0.0)],
)
def test_ratio_counts_the_guesses_behind_the_first_difference(state: list[int], ratio: float) -> None:
    assert noise_ratio(state, [7, 1, 2, 3, 4]) == ratio


def test_ratio_without_guesses() -> None:
    assert noise_ratio([7], [7]) == 0.0


def test_linear_rises_inside_every_window() -> None:
    assert ratios_wanted(7, window=3) == [0, 0.5, 1, 0, 0.5, 1, 0]
    assert ratios_wanted(3, window=3, low=0.2, high=0.6) == pytest.approx([0.2, 0.4, 0.6])


def test_reverse_falls() -> None:
    assert ratios_wanted(4, kind="reverse", window=3) == [1, 0.5, 0, 1]


def test_a_phase_shifts_the_windows() -> None:
    assert ratios_wanted(4, phase=2, window=3) == [1, 0, 0.5, 1]
    assert ratios_wanted(4, phase=1, kind="reverse", window=3) == [0.5, 0, 1, 0.5]
    assert [t.back for t in NoiseSchedule("cyclic", 3).targets(2, 0.0, RNG, 2)] == [(2, 3), (3, 3)]


@pytest.mark.parametrize("kind", ["linear", "reverse", "cyclic"])
def test_phases_take_turns_and_start_anywhere(kind: str) -> None:
    schedule = NoiseSchedule(kind, window=4)
    phases = [[schedule.phase(epoch, random.Random(sample)) for epoch in range(4)] for sample in range(40)]
    assert all(sorted(turns) == [0, 1, 2, 3] for turns in phases)
    assert {turns[0] for turns in phases} == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["random", "any"])
def test_schedules_without_places_have_no_phase(kind: str) -> None:
    assert {NoiseSchedule(kind).phase(epoch, random.Random(epoch)) for epoch in range(9)} == {0}


@pytest.mark.parametrize("kind", ["linear", "reverse"])
def test_window_of_one_block_has_the_noisiest_level(kind: str) -> None:
    assert ratios_wanted(3, kind=kind, window=1, high=0.8) == [0.8] * 3


def test_random_is_seeded_and_within_the_range() -> None:
    schedule = NoiseSchedule("random", low=0.3, high=0.7)
    drawn = [t.ratio for t in schedule.targets(200, 0.0, random.Random(5))]
    assert drawn == [t.ratio for t in schedule.targets(200, 0.0, random.Random(5))]
    assert drawn != [t.ratio for t in schedule.targets(200, 0.0, random.Random(6))]
    assert 0.3 <= min(drawn) < 0.35  # type: ignore[operator]
    assert 0.65 < max(drawn) <= 0.7  # type: ignore[operator]


@pytest.mark.parametrize(
    ("ceiling", "expected"),
    [("constant", [0.9, 0.9, 0.9, 0.9]), ("rising", [0.3, 0.6, 0.9, 0.9]), ("falling", [0.9, 0.6, 0.3, 0.3])],
)
def test_ceiling_moves_over_a_share_of_the_run(ceiling: str, expected: list[float]) -> None:
    schedule = NoiseSchedule(high=0.9, ceiling=ceiling, ceiling_low=0.3, ceiling_share=0.5)
    assert [schedule.ceiling_at(p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(expected)
    assert [t.high for t in schedule.targets(1, 0.25, RNG)] == [pytest.approx(expected[1])]


@pytest.mark.parametrize("kind", ["linear", "reverse", "random"])
def test_no_schedule_wants_more_than_the_ceiling(kind: str) -> None:
    options: dict[str, Any] = {"kind": kind, "ceiling": "rising", "ceiling_low": 0.25, "ceiling_share": 1.0}
    assert max(ratios_wanted(40, 0.0, **options)) <= 0.25  # type: ignore[type-var]
    assert max(ratios_wanted(40, 1.0, **options)) > 0.9  # type: ignore[operator, type-var]


@given(st.lists(st.sampled_from([i / 16 for i in range(1, 17)]), unique=True), st.floats(0, 1))
def test_the_nearest_state_is_picked(noisy: list[float], wanted: float) -> None:
    ratios = [*sorted(noisy, reverse=True), 0.0]
    picked = pick_state(ratios, Target(0, 1, ratio=wanted), RNG)
    assert abs(ratios[picked] - wanted) <= min(abs(r - wanted) for r in ratios) + 1e-9


def test_of_two_equally_near_states_the_noisier_is_picked() -> None:
    assert pick_state([1.0, 0.5, 0.25, 0.0], Target(0, 1, ratio=0.75), RNG) == 0
    assert pick_state([0.8, 0.6, 0.0], Target(0, 1, ratio=0.7), RNG) == 0  # 0.8 - 0.7 and 0.7 - 0.6 differ in floats


@given(st.integers(1, 12), st.integers(0, 30), st.integers(1, 9))
def test_cyclic_counts_states_from_the_end_as_the_released_code_does(states: int, j: int, window: int) -> None:
    ratios = [1 - s / max(states - 1, 1) for s in range(states)]
    (target,) = NoiseSchedule("cyclic", window).targets(j + 1, 0.0, RNG)[j:]
    picked = pick_state(ratios, target, RNG)
    if states == 1:
        assert picked == 0
    else:
        cycle = min(window + 1, states) - 1
        assert picked == states - (2 + j % cycle)


def test_any_takes_every_state_before_the_fixed_point() -> None:
    (target,) = NoiseSchedule("any").targets(1, 0.0, RNG)
    ratios = [1.0, 0.6, 0.2, 0.0]
    assert {pick_state(ratios, target, random.Random(i)) for i in range(40)} == {0, 1, 2}
    assert pick_state([0.0], target, RNG) == 0


@pytest.mark.parametrize("kind", ["cyclic", "any"])
def test_range_of_schedules_without_a_ratio(kind: str) -> None:
    ratios = [1.0, 0.6, 0.4, 0.0]
    targets = NoiseSchedule(kind, low=0.3, high=0.7).targets(8, 0.0, RNG)
    assert {pick_state(ratios, target, random.Random(j)) for j, target in enumerate(targets)} == {1, 2}
    # No state within the range: the nearest one.
    assert pick_state([1.0, 0.1, 0.0], targets[0], RNG) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "steep"}, f"schedule must be one of {', '.join(SCHEDULES)}, got 'steep'"),
        ({"ceiling": "up"}, "ceiling must be one of constant, rising, falling, got 'up'"),
        ({"window": 0}, "window must be at least 1 block, got 0"),
        ({"low": 0.8, "high": 0.2}, "min_ratio <= max_ratio <= 1, got 0.8 and 0.2"),
        ({"high": 1.5}, "max_ratio <= 1, got 0 and 1.5"),
        (
            {"ceiling": "rising", "ceiling_low": 0.9, "high": 0.5},
            "ceiling_low must lie between .* 0 and .* 0.5, got 0.9",
        ),
        ({"ceiling_share": 0.0}, "ceiling_share must be above 0 and at most 1, got 0"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseSchedule(**options)
