"""What all tests of the server in this process share. They need the extra "serve", and openai."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.harness.limits import HANG_S

NEEDS = ("openai", "prometheus_client", "starlette", "tokenizers", "transformers", "uvicorn")
collect_ignore_glob = [] if all(map(find_spec, NEEDS)) else ["test_*.py"]


@pytest.fixture(scope="package", autouse=True)
def figures_of_now() -> Iterator[None]:
    """``/metrics`` shows the engine's figures of now, however long its thread takes to tell them, and none of before."""
    from megatron_hybrid_prefix.serve import app

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "_SNAPSHOT_S", HANG_S)
        yield


@pytest.fixture(scope="package")
def server(tiny: Any) -> Iterator[Any]:
    """A server of `tiny` for all tests that need nothing else of it."""
    from tests.serve.test_serve import BODY_BYTES, running

    with running(tiny, body_bytes=BODY_BYTES, read_s=HANG_S) as server:
        yield server


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A salt per test, so that tests on one server do not hit each other's prefixes."""
    return {"cache_salt": request.node.name}
