"""The mark of tests that run torch's compiler and what it imports: Triton among others, which then compiles for good in their process."""

from __future__ import annotations

import pytest

APART = pytest.mark.apart("torch's compiler", CUDA_VISIBLE_DEVICES="")
