"""Integer arithmetic."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """``dividend / divisor``, rounded up."""
    return -(-dividend // divisor)


def round_up(number: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``number``."""
    return ceil_div(number, multiple) * multiple
