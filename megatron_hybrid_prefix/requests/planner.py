"""`StepPlanner`: plans which states a forward writes to which slots, and publishes them afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid_prefix.policy.boundaries import Boundary, CheckpointReason, boundaries_in_span, with_boundary
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.requests.book import LiveRequest, PlannedCheckpoint, StepPlan
from megatron_hybrid_prefix.requests.matcher import Match
from megatron_hybrid_prefix.tiers.device import DeviceTier

# Decode states kept per running request. The next turn of a chat mostly resumes from the latest one, or from the one
# before if the end of the answer comes back changed.
_DECODED_STATES = 2


class StepPlanner:
    """Reserves slots for the states that a forward writes, and settles plans.

    Args:
        device: The cached blocks and states.

    Attributes:
        writing: Keys whose state a forward in flight writes.
    """

    def __init__(self, device: DeviceTier) -> None:
        self._device, self._stats = device, device.stats
        self._block_tokens = device.settings.block_tokens
        self.writing: set[bytes] = set()

    def boundaries(self, match: Match, breakpoints: Sequence[int]) -> tuple[Boundary, ...]:
        """Boundaries of the prompt that get a checkpoint, ascending. Empty if there are no slots."""
        if not self._device.slots.most_cached:
            return ()
        settings = self._device.settings
        return settings.boundary_rule(
            prompt_tokens=match.chain.tokens,
            block_tokens=self._block_tokens,
            resume_tokens=match.resume_tokens,
            kv_depth_blocks=max(match.kv_depth_blocks, match.seen_blocks),
            min_computed_tokens=settings.min_computed_tokens,
            breakpoints=breakpoints,
            interval_tokens=settings.retention_interval_tokens,
        )

    def plan(self, live: LiveRequest, start_tokens: int, end_tokens: int) -> StepPlan:
        """See `HybridPrefixCache.plan`."""
        if start_tokens != live.planned_tokens or end_tokens <= start_tokens:
            raise ValueError(
                f"request {live.request_id}: span [{start_tokens}, {end_tokens}), next is {live.planned_tokens}"
            )
        source = live.pinned_slot if live.load is None else live.load.slot
        plan = StepPlan(
            request_id=live.request_id,
            start_tokens=start_tokens,
            end_tokens=end_tokens,
            source_slot=source if not live.plans else None,
            checkpoints=self._reserve(live, start_tokens, end_tokens) if live.write else (),
            load=None if live.plans else live.load,
        )
        live.planned_tokens = end_tokens
        live.plans.append(plan)
        return plan

    def settle(self, live: LiveRequest, plan: StepPlan, *, kept: bool) -> None:
        """Ends the plan: publishes its states if ``kept``, else frees their slots."""
        if live.write:  # without write the weights changed, and another forward may write this key
            self.writing.difference_update(self._keys(live, plan.checkpoints))
        for checkpoint in plan.checkpoints:
            depth_blocks = checkpoint.position_tokens // self._block_tokens
            node = live.path[depth_blocks - 1] if kept and depth_blocks <= len(live.path) else None
            if node is not None and node.slot == NO_SLOT:
                self._device.publish(node, checkpoint.slot, checkpoint.reason, live.session)
                live.written.append(node)
            else:
                self._device.slots.abandon(checkpoint.slot)
        live.plans.remove(plan)
        if not live.plans:
            live.planned_tokens = live.computed_tokens

    def register(self, live: LiveRequest) -> None:
        """Makes the full blocks that the request has computed matchable."""
        full_blocks = min(live.computed_tokens // self._block_tokens, len(live.chain.keys), len(live.block_ids))
        self._device.register(live.path, live.chain, live.block_ids, full_blocks)

    def stop_writing(self, live: LiveRequest) -> None:
        """Stops caching what the request computes."""
        if live.write:
            for plan in live.plans:
                self.writing.difference_update(self._keys(live, plan.checkpoints))
            live.write = False

    def request_checkpoint(self, live: LiveRequest, position_tokens: int) -> bool:
        """See `HybridPrefixCache.request_checkpoint`."""
        last_tokens = live.prompt_tokens // self._block_tokens * self._block_tokens
        if not live.write or not self._device.slots.most_cached:
            return False
        if not live.planned_tokens < position_tokens <= last_tokens:
            return False
        live.boundaries = with_boundary(live.boundaries, Boundary(position_tokens, CheckpointReason.JUNCTION))
        return True

    def checkpoint_decoded(self, live: LiveRequest, position_tokens: int) -> int | None:
        """See `HybridPrefixCache.checkpoint_decoded`."""
        device = self._device
        depth_blocks = position_tokens // self._block_tokens
        if not live.write or not self._device.slots.most_cached or depth_blocks > len(live.path):
            return None
        node = live.path[depth_blocks - 1]
        if node.slot != NO_SLOT:
            if node.reason == CheckpointReason.INTERVAL:
                device.confirm(node, CheckpointReason.DECODE)
            return None
        if len(live.decoded) >= _DECODED_STATES:
            device.drop_decoded(*live.decoded.pop(0))
        slot = device.take_slot()
        if slot is None:
            self._stats.checkpoints_skipped += 1
            return None
        device.publish(node, slot, CheckpointReason.DECODE, live.session)
        device.protect(slot)
        live.decoded.append((node, device.bound[node]))
        return slot

    def _reserve(self, live: LiveRequest, start_tokens: int, end_tokens: int) -> tuple[PlannedCheckpoint, ...]:
        """Reserves slots for the boundaries in the span, the most important reason first."""
        device, tree, reached = self._device, self._device.tree, []
        for boundary in boundaries_in_span(live.boundaries, start_tokens, end_tokens):
            key = live.chain.keys[boundary.position_tokens // self._block_tokens - 1]
            node = tree.get(key)
            if key in self.writing:
                continue
            if node is None or node.slot == NO_SLOT or boundary.reason == CheckpointReason.VERIFY:
                reached.append(boundary)
            elif boundary.reason != CheckpointReason.INTERVAL:
                device.confirm(node, boundary.reason)
        taken: list[tuple[Boundary, int]] = []
        for boundary in sorted(reached, key=lambda each: (each.reason == CheckpointReason.INTERVAL, each.reason)):
            guess = boundary.reason == CheckpointReason.INTERVAL
            slot = device.take_guess_slot(live.path) if guess else device.take_slot()
            if slot is not None:
                taken.append((boundary, slot))
            elif guess:
                break
            else:
                self._stats.checkpoints_skipped += 1
        planned = tuple(
            [
                PlannedCheckpoint(position_tokens=position_tokens, slot=slot, reason=reason)
                for (position_tokens, reason), slot in sorted(taken)
            ]
        )
        self.writing.update(self._keys(live, planned))
        return planned

    def _keys(self, live: LiveRequest, checkpoints: Sequence[PlannedCheckpoint]) -> list[bytes]:
        return [live.chain.keys[each.position_tokens // self._block_tokens - 1] for each in checkpoints]
