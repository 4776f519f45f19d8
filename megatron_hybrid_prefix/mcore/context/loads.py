"""`RequestLoads`: loads waiting requests back from the host, and swaps preempted requests out to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.mcore.context.request import KnownRequests
from megatron_hybrid_prefix.mcore.state.moves import HostMoves
from megatron_hybrid_prefix.tiers.units import LoadState

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
    """

    def __init__(
        self,
        context: ContextSeam,
        cache: HybridPrefixCache,
        moves: HostMoves,
        requests: KnownRequests,
    ) -> None:
        self._context, self._cache, self._moves, self._requests = context, cache, moves, requests

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
        begins = match.load is None
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
            assert match.load is not None
            self._moves.start_load(match.load)
            self._context.decisions.note(
                lambda: (
                    f"request {req.request_id} loads up to {loading.resume_tokens} into KV blocks "
                    f"{loading.block_ids}, slot {loading.source_slot}"
                )
            )
        load = match.load
        assert load is not None
        alone = not (others_run or others_start)
        if alone and begins:
            return False
        if load.state is LoadState.FETCHING:
            state = self._moves.fetch(load, wait=False)
            if state is LoadState.FETCHING:
                return not alone
            if state is not LoadState.COPYING:
                self._context.decisions.note(lambda: f"request {req.request_id} does not wait for its load: {state}")
                known.last, known.gave_up_fetch = None, True
                return False
        if not others_run or not load.rounds:
            return False
        load.rounds -= 1
        return True

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
        failed = self._moves.failed(self._requests.plans())
        for known in self._requests.in_step() if failed else ():
            load = None if known.plan is None else known.plan.load
            if load is not None and load.state in (LoadState.MISSING, LoadState.LATE):
                known.last, known.gave_up_fetch = None, True
        return failed

    def swap_out(self, request_id: int, computed_tokens: int, live_slot: int) -> None:
        """Swap a preempted request out to the host if there is room. Call `HostMoves.launch` afterwards."""
        self._cache.loads.swap_out(request_id, computed_tokens, live_slot)
