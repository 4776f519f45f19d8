"""`NoCache`: what the engine takes for its context where that has no prefix cache."""

from __future__ import annotations

from typing import Any


class NoCache:
    """Answers the engine's questions about the cache; methods as in `HybridPrefixContext`."""

    loads_wait = False

    def prefix_request(self, req: Any) -> None:
        """No keys are made."""

    def forget_request(self, request_id: int) -> None:
        """Nothing waits for the request."""

    def failed_loads(self) -> set[int]:
        """None, as none began."""
        return set()

    def fail_forward(self) -> None:
        """Nothing was reserved."""

    def invalidate(self) -> None:
        """Nothing is cached."""
