"""What all tests of the server in this process share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.limits import HANG_S


@pytest.fixture(scope="package", autouse=True)
def figures_of_now() -> Iterator[None]:
    """``/metrics`` shows the engine's figures of now, however long its thread takes to tell them, and none of before."""
    try:
        from megatron_hybrid_prefix.serve import app
    except ImportError:  # without the extra "serve"; a few tests need nothing of it
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "_SNAPSHOT_S", HANG_S)
        yield


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A salt per test, so that tests on one server do not hit each other's prefixes."""
    return {"cache_salt": request.node.name}
