"""The random programs of bench, and the same for Hypothesis, which shrinks them."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from hypothesis import strategies as st

from bench.random_programs import NASTY, damage, with_blocks, with_positions, with_random_numbers, with_second, write_program
from epigen.dtypes import OPERANDS, DType

__all__ = ["NASTY", "damage", "programs", "write_program"]


def programs(
    most: int = 20, tame: bool = False, reductions: bool = True, casts: Iterable[DType] = OPERANDS, second: bool = False, positions: bool = False,
    drawn: bool = False, blocks: bool = False,
) -> st.SearchStrategy[str]:  # fmt: skip
    """Well-typed programs for Hypothesis; parameters as for `write_program`. second: most of them with a second product.
    positions: numbers of rows and columns in place of some inputs. drawn: random numbers. blocks: some inputs have one value for several of an index, in
    operands that are computed too."""
    casts = tuple(casts)

    def write(random: Random) -> str:
        text = write_program(random, most, tame, reductions, casts, operands=blocks)
        text = with_blocks(random, text) if blocks else text
        text = with_second(random, text) if second else text
        text = with_positions(random, text) if positions else text
        return with_random_numbers(random, text) if drawn else text

    return st.randoms(use_true_random=False).map(write)
