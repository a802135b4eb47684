"""Statistics against counts made by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jacobi_decoding.stats import DecodeStats, RowStats


def brute_force_stationary(chains: list[tuple[int, list[int]]], text: list[int]) -> int:
    """Positions that some chain had right behind a wrong token, and that every later chain holding them had right."""

    def right(step: int, position: int) -> bool | None:
        start, chain = chains[step]
        if not start <= position < min(start + len(chain), len(text)):
            return None
        return chain[position - start] == text[position]

    count = 0
    for position in range(len(text)):
        for step, (start, _) in enumerate(chains):
            later = [right(s, position) for s in range(step, len(chains))]
            behind_wrong = any(right(step, p) is False for p in range(start, position))
            if right(step, position) and behind_wrong and False not in later:
                count += 1
                break
    return count


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    chains=st.lists(
        st.tuples(st.integers(0, 8), st.lists(st.integers(0, 2), min_size=1, max_size=6)), min_size=0, max_size=6
    ),
)
def test_stationary_tokens(text: list[int], chains: list[tuple[int, list[int]]]) -> None:
    chains = sorted((c for c in chains if c[0] < len(text)), key=lambda chain: chain[0])
    assert RowStats(chains=chains, text=text).stationary_tokens() == brute_force_stationary(chains, text)


def test_iterations_per_block() -> None:
    row = RowStats(accepted=[1, 1, 2, 4, 1, 3])
    assert row.iterations_per_block(4) == [3, 1, 2]
    assert row.iterations_per_block(8) == [4]
    assert row.iterations_per_block(100) == []
    assert RowStats(accepted=[1, 1]).iterations_per_block(1) == [1, 1]


def test_tokens_per_forward_of_nothing_is_one() -> None:
    assert DecodeStats("cpu", "modules", 4, 1, 0).tokens_per_forward == 1.0
