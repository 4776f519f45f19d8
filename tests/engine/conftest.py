"""Both memories for tests that ask for them: ``@pytest.mark.usefixtures("memory")``."""

from __future__ import annotations

import pytest

from tests.harness.lifecycle_helpers import EngineHarness


@pytest.fixture(params=["split", pytest.param("one memory", marks=pytest.mark.slow)])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`EngineHarness` has memory of its own for checkpoints; or KV and states share one, with as much room."""
    monkeypatch.setattr(EngineHarness, "one_memory", request.param == "one memory")
