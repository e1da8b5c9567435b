"""The random programs of bench, and the same for Hypothesis, which shrinks them."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from bench.random_programs import NASTY, damage, write_program
from epigen.dtypes import OPERANDS, DType

__all__ = ["NASTY", "damage", "programs", "write_program"]


def programs(most: int = 20, tame: bool = False, reductions: bool = True, casts: Iterable[DType] = OPERANDS) -> st.SearchStrategy[str]:
    """Well-typed programs for Hypothesis; parameters as for `write_program`."""
    casts = tuple(casts)
    return st.randoms(use_true_random=False).map(lambda random: write_program(random, most, tame, reductions, casts))
