"""Random numbers that are computed of where they stand: Philox4x32-10, a hash of a counter by a key.

Nothing is drawn in turn, so that an element has the same number whatever computes it, and has it again in a backward. Of tensors of int64, by their own
methods: the reference calls these functions, and files that stand alone have their text. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011, whose known answers the tests hold.
"""

from __future__ import annotations

from typing import Any


def random_numbers(seed: Any, rows: Any, columns: Any, product: int) -> Any:
    """A number in [0, 1) for each element, of 24 bits: float64 [M, N].

    seed: a tensor of one element. rows: their numbers, [M]. columns: from 0 on, [N]. product: its number in a batch.
    """
    seed = seed.reshape(())
    # four columns have a counter, by bits 0 and 3 of their numbers a word of it each: n, n + 1, n + 8 and n + 9, which a thread has of what tensor cores multiply
    counter, word = (columns >> 4 << 2) | (columns >> 1 & 3), (columns & 1) | (columns >> 2 & 2)
    counters = columns[: -(-len(columns) // 16) * 4]
    words = philox((counters, rows[:, None] & 0xFFFFFFFF, product, 0), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return (sum(words[i][:, counter] * (word == i) for i in range(4)) >> 8).double() * 2.0**-24


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """The four random words of a counter: 32 bits each, as those of the counter and the key."""

    def multiply(x: Any, by: int) -> tuple[Any, Any]:
        """The high and the low word of a product: int64 does not hold it, and so by halves."""
        low, high = (x & 0xFFFF) * by, (x >> 16) * by
        middle = high + (low >> 16)
        return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)

    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        (high0, low0), (high2, low2) = multiply(c0, 0xD2511F53), multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3
