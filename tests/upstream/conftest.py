"""Shared by the tests of what is checked about megatron-core."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.upstream import check, version


@pytest.fixture(autouse=True)
def fresh(platform):
    """A function that forgets what was checked; also called before and after each test."""

    def forget() -> None:
        check._checked.clear()
        version.check_version.cache_clear()

    forget()
    yield forget
    forget()
