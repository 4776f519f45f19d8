"""`NoCache`: stands in for the engine's context if that has no prefix cache."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn


class NoCache:
    """Has the methods of `HybridPrefixContext` that the engine calls for the cache."""

    loads_wait = False
    scored = None
    is_exact = False

    def prefix_request(self, req: Any) -> Any:
        """None: there are no keys."""

    def continue_request(self, old: Any, new: Any) -> None:
        """Nothing is counted."""

    def explain(self, tokens: Any, params: Any) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(
            "this engine has no prefix cache to explain: build it with build_engine(model, HybridPrefixConfig(...))"
        )

    def forget_request(self, request_id: int) -> None:
        """Nothing to drop."""

    def failed_loads(self) -> set[int]:
        """Empty: there are no loads."""
        return set()

    def withdraw(self, request_ids: Collection[int]) -> set[int]:
        """Empty: nobody resumed from anything."""
        return set()

    def fail_step(self) -> None:
        """Nothing to free."""

    def log_dropped(self, why: str) -> None:
        """Nothing is dropped."""

    def invalidate(self) -> None:
        """Nothing to drop."""
