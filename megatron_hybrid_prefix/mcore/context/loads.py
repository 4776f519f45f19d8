"""`RequestLoads`: loads waiting requests back from the host, and swaps preempted requests out to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.mcore.context.request import RequestBook
from megatron_hybrid_prefix.mcore.state.moves import Fetch, HostMoves

if TYPE_CHECKING:
    from megatron_hybrid_prefix.upstream.context import ContextSeam
    from megatron_hybrid_prefix.upstream.names import DynamicInferenceRequest


class RequestLoads:
    """See the module.

    Args:
        context: The context.
        cache: Its cache, which decides.
        moves: Runs the transfers.
        requests: Its requests.
        note: Logs a decision that must be the same on all ranks; gets a function that returns it in words.
    """

    def __init__(
        self,
        context: ContextSeam,
        cache: HybridPrefixCache,
        moves: HostMoves,
        requests: RequestBook,
        note: Callable[[Callable[[], str]], None],
    ) -> None:
        self._context, self._cache, self._moves, self._requests, self._note = context, cache, moves, requests, note
        self._failed: set[int] | None = None  # requests of the last forward; None until `failed` is called

    def load_back(self, req: DynamicInferenceRequest, others_run: bool, *, others_start: bool = False) -> bool:
        """Begin to load the KV and state that a waiting request can resume from, if the host has more than the device.

        Args:
            req: A request that is not admitted yet.
            others_run: Whether the next step runs other requests; the load then overlaps with it.
            others_start: Whether this round admits other requests, so that nobody needs to wait for the tier behind.

        Returns:
            True: postpone admission by one round. False: admit now; the forward waits for the copy on the GPU stream,
            and the CPU, before it launches the forward, for what is still being read from the tier behind.
        """
        cache, known = self._cache, self._requests.of(req, self._cache)
        match = known.match(cache, req.remaining_prompt_length)
        begins = match.load_id is None
        if begins:
            if known.gave_up_fetch:
                return False
            if others_run and cache.loads.loads_elsewhere(match):
                return True
            loading = cache.loads.begin_load_back(
                req.request_id, match, write=known.write, reserved_blocks=self._context.total_request_count
            )
            if loading is None:
                return False
            match = known.last = loading
            known.take_scores(match.resume_tokens)
            self._moves.start_load(req.request_id, match)
            self._note(
                lambda: (
                    f"request {req.request_id} loads up to {loading.resume_tokens} into KV blocks "
                    f"{loading.block_ids}, slot {loading.source_slot}"
                )
            )
        assert match.load_id is not None
        alone = not (others_run or others_start)
        if alone and begins:
            return False
        fetched = self._moves.fetch(req.request_id, match.load_id, wait=False)
        if fetched == Fetch.COMING:
            return not alone
        if fetched != Fetch.ARRIVED:
            self._note(lambda: f"request {req.request_id} does not wait for its load: {fetched.name}")
            known.last, known.gave_up_fetch = None, True
            return False
        return others_run and self._moves.waits(match.load_id)

    def forget(self, request_id: int) -> None:
        """Drop what a request without a row holds on the device and on the host: it ended."""
        live = self._cache.live.get(request_id)
        if live is not None and live.is_loading:
            self._cache.release(request_id)
        self._cache.loads.drop_swapped_out(request_id)

    def failed(self) -> set[int]:
        """Requests of the last forward whose loads failed verification, or did not arrive; the same set on all ranks.

        All ranks call it after each forward, before one with loads is published. The requests must be recomputed.
        """
        if self._failed is None:
            self._failed = self._moves.failed(self._requests.plans())
            for known in self._requests.in_step() if self._failed else ():
                load_id = None if known.plan is None else known.plan.load_id
                if load_id is not None and self._moves.not_fetched(load_id):
                    known.last, known.gave_up_fetch = None, True
        return self._failed

    def take_failed(self) -> set[int]:
        """Return `failed` and reset it: the forward is about to be published."""
        failed, self._failed = self.failed(), None
        return failed

    def forget_step(self) -> None:
        """Forget `failed`: the forward is not published."""
        self._failed = None

    def swap_out(self, request_id: int, computed_tokens: int, live_slot: int) -> None:
        """Swap a preempted request out to the host if there is room. Call `HostMoves.launch` afterwards."""
        self._cache.loads.swap_out(request_id, computed_tokens, live_slot)
