"""`Moves` and `HostMoves`: when KV and states move, on the device and between tiers, and what happens if a transfer fails.

The cache queues copies (`cache.take_copies`). They are launched, in their order, before anything can overwrite what they read:

- KV blocks that move in shared memory are copied on the model's stream, and pages are cleared there.
- Transfers to the host and back run on separate streams (``tiers/arena.py``). A forward waits for the loads that it uses.
  Afterwards all ranks agree on which loads were right.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.mcore.ranks.agreement import max_over_model_ranks, min_over_model_ranks, place_in_model
from megatron_hybrid_prefix.mcore.state.fingerprint import Fingerprint
from megatron_hybrid_prefix.policy.base import SharesMemory
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from megatron_hybrid_prefix.tiers.arena import HostArena
from megatron_hybrid_prefix.tiers.base import SharedTier, TierBehind
from megatron_hybrid_prefix.tiers.file import FileTier
from megatron_hybrid_prefix.tiers.mooncake import MooncakeTier
from megatron_hybrid_prefix.tiers.pinned import choose_page_bytes
from megatron_hybrid_prefix.tiers.registry import make_tier, tier_name
from megatron_hybrid_prefix.tiers.shared import FolderSettings, MooncakeSettings, SharedSettings
from megatron_hybrid_prefix.tiers.units import HOST, BlockMove, BlockTransfer, EntryKind, PageClear, stores_first

if TYPE_CHECKING:
    from megatron_hybrid_prefix.cache import HybridPrefixCache
    from megatron_hybrid_prefix.config import HybridPrefixConfig
    from megatron_hybrid_prefix.index.requests import Load, StepPlan
    from megatron_hybrid_prefix.metrics import PrefixStats
    from megatron_hybrid_prefix.pool.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

# While other requests run, a request waits one round per this many bytes of its load: about the transfer of one step.
BYTES_A_ROUND = 256 * 2**20

SHARED = "shared"  # name of the shared tier


class Fetch(IntEnum):
    """Whether what a load needs has arrived on the host from the tier behind. Ranks agree on the highest value."""

    ARRIVED = 0
    COMING = 1
    MISSING = 2
    LATE = 3


class Moves:
    """Copies of a cache without a host tier.

    Args:
        memory: Returns the memory; None while megatron has freed it.
    """

    _cache: HybridPrefixCache

    def __init__(self, memory: Callable[[], SharedMemory | None]) -> None:
        self._memory = memory

    def serve(self, cache: HybridPrefixCache) -> None:
        """Use this cache."""
        self._cache = cache

    def launch(self, *, send: bool = True) -> None:
        """Launch the queued copies. Call it before anything writes to a slot or block.

        Args:
            send: False: leave the copies to the host to `forward_launched`.
        """
        copies = self._cache.take_copies()
        memory = self._memory()
        if copies and memory is not None and memory.layout is not None:
            layout = memory.layout
            copies = stores_first(copies, layout.page_blocks, layout.page_states, memory.first_page_slot)
        for kind, group in groupby(copies, key=type):
            if kind is BlockTransfer:
                self._transfer([copy for copy in group if isinstance(copy, BlockTransfer)], send=send)
                continue
            assert memory is not None
            if kind is BlockMove:
                memory.move_blocks([copy for copy in group if isinstance(copy, BlockMove)])
            else:
                memory.clear_pages([copy.page for copy in group if isinstance(copy, PageClear)])

    def forward_launched(self) -> None:
        """Launch what need not precede a forward: copies to the host that `launch` left, and what its publication queued."""

    def wait_for_loads(self, plans: Iterable[StepPlan]) -> None:
        """Make the next forward run after the loads that it uses. What does not use them can be launched before."""

    def finish(self) -> None:
        """Finish all copies: the device buffers are about to be freed."""
        self.launch()

    def _transfer(self, units: list[BlockTransfer], *, send: bool) -> None:
        raise AssertionError("a transfer is queued, but there is no host tier")


class HostMoves(Moves):
    """The host tier of one context.

    Args:
        tensors: Returns the device tensors by kind, each (layers, KV blocks or slots, *shape).
        memory: See Moves.
        prefix: Settings of the cache, with ``host_gb`` above 0.
        groups: Megatron's process groups.
        block_tokens: Tokens per KV block.
        components: Description of a state, for the name of shared entries.

    Raises:
        ValueError: The shared tier cannot be used.

    Attributes:
        arena: The host memory and its transfers; None if the memory could not be allocated.
        cache_fields: Arguments for the cache. ``host_pages`` is 0 if the memory could not be allocated.
        sends_later: Whether `forward_launched` is called. The engine sets it if its controller does that.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[EntryKind, Sequence[torch.Tensor]]],
        memory: Callable[[], SharedMemory | None],
        prefix: HybridPrefixConfig,
        groups: Any,
        *,
        block_tokens: int,
        components: object = None,
    ) -> None:
        super().__init__(memory)
        self.sends_later = False
        self._groups = groups
        own_bytes = {
            kind: sum(tensor[:, 0].numel() * tensor.element_size() for tensor in of_kind)
            for kind, of_kind in tensors().items()
        }
        # Pipeline stages differ in their layers. All use the largest entry size, so that they decide alike.
        entry_bytes = {kind: max_over_model_ranks(size, self._groups) for kind, size in own_bytes.items()}
        page_bytes = choose_page_bytes(entry_bytes.values())
        pages_of = {kind: max(1, ceil_div(size, page_bytes)) for kind, size in entry_bytes.items()}
        pages = min_over_model_ranks(int(prefix.host_gb * 2**30) // page_bytes, self._groups) or 0
        self.arena: HostArena | None = None
        setting = prefix.tier_behind_host
        self._behind: TierBehind | None = None
        if setting is not None:
            self._behind = TierBehind(tier_name(setting), make_tier(setting), self._agree)
        self._shared: FileTier | MooncakeTier | None = None
        if prefix.shared is not None:
            settings = SharedSettings.parse(prefix.shared)
            self._shared = self._open_shared(settings, prefix, tensors(), block_tokens, components)
            self._behind = TierBehind(SHARED, self._shared, self._agree)
        try:
            self.arena = HostArena(
                tensors,
                pages=pages,
                page_bytes=page_bytes,
                pages_of=pages_of,
                device=tensors()[EntryKind.KV][0].device,
                behind=None if self._behind is None else self._behind.tier,
            )
        except (RuntimeError, MemoryError) as error:
            logger.warning("no host tier: cannot allocate %g GiB of pinned memory: %s", prefix.host_gb, error)
        if pages < sum(pages_of.values()):
            logger.warning("host_gb=%g has no room for a state and a KV block: there is no host tier", prefix.host_gb)
            pages = 0
        if not min_over_model_ranks(int(self.arena is not None), self._groups):
            self.close()
            pages = 0
        self._page_bytes = page_bytes
        self.cache_fields: dict[str, Any] = {
            "host_pages": pages,
            "host_kv_pages": pages_of[EntryKind.KV],
            "host_state_pages": pages_of[EntryKind.STATE],
        }
        if self._behind is not None and pages:
            self.cache_fields["behind"] = self._behind
        if self._shared is not None:
            self.cache_fields |= {"secret": self._secret, "adapter_secret": os.urandom(16)}
        # For each load that the model has not waited for: the rounds that its request still waits.
        self._launched: dict[int, int] = {}
        self._fetching: dict[int, float] = {}  # by load: until when its request waits for the tier behind (monotonic)

    def _agree(self, depth_blocks: int) -> int:
        return min_over_model_ranks(depth_blocks, self._groups) or 0

    # -- the shared tier -----------------------------------------------------------------------------------------------

    def _open_shared(
        self,
        settings: SharedSettings,
        prefix: HybridPrefixConfig,
        tensors: Mapping[EntryKind, Sequence[torch.Tensor]],
        block_tokens: int,
        components: object,
    ) -> FileTier | MooncakeTier:
        bytes_of = {kind: sum(each[:, 0].nbytes for each in of_kind) for kind, of_kind in tensors.items()}

        def make_ranking() -> Any:
            policy = make_eviction_policy(prefix.eviction_policy)
            if isinstance(policy, SharesMemory):  # files of both kinds share the budget
                policy.share_memory(state_blocks=max(1, bytes_of[EntryKind.STATE] // max(1, bytes_of[EntryKind.KV])))
            return policy

        tier: FileTier | MooncakeTier
        problem = ""
        try:
            self._secret = settings.secret()
            if isinstance(settings, MooncakeSettings):
                tier = MooncakeTier(settings, block_tokens=block_tokens)
            else:
                assert isinstance(settings, FolderSettings)
                tier = FileTier(
                    settings,
                    block_tokens=block_tokens,
                    make_ranking=make_ranking,
                    reason=CheckpointReason.TAIL,
                )
        except (ValueError, OSError) as error:
            problem = str(error) if isinstance(error, ValueError) else f"shared: cannot use {prefix.shared}: {error}"
        if max_over_model_ranks(int(bool(problem)), self._groups):
            raise ValueError(problem or "shared: another rank cannot use it")
        self._weights_name = settings.weights
        shapes = {
            kind.name: [
                (tensor.shape[0], *tensor.shape[2:], str(tensor.dtype), tensor.device.type) for tensor in of_kind
            ]
            for kind, of_kind in tensors.items()
        }
        self._layout = repr((block_tokens, components, sorted(shapes.items()), place_in_model(self._groups)))
        return tier

    def name_entries(self, model: Any) -> None:
        """Use the entries of this model's weights in the shared tier, if there is one.

        Args:
            model: This rank's part of the model. Its weights are read now, and again after they were invalidated.
        """
        if self._shared is not None and "behind" in self.cache_fields:
            self._shared.name_entries(Fingerprint(model, self._layout, weights=self._weights_name))

    def drain(self, seconds: float) -> bool:
        """Wait until everything launched so far is in the shared tier, at most this long. Returns whether it is."""
        return self.arena is None or self.arena.drain(seconds)

    def close(self) -> None:
        """Free the memory."""
        if self._shared is not None:
            self._shared.close()
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    # -- moves ---------------------------------------------------------------------------------------------------------

    def launch(self, *, send: bool = True) -> None:
        """See Moves. The model's later launches run after stores have read their entries.

        They also run after cancelled loads, whose blocks and slots may be reused.
        """
        if self.arena is None:
            super().launch(send=send)
            return
        self.arena.wait_for_stores()  # of what publication queued
        self._wait_for_cancelled()  # a block may move to where such a load writes
        send = send or not self.sends_later
        super().launch(send=send)
        if send:
            self.arena.send()
        self._wait_for_cancelled()

    def forward_launched(self) -> None:
        """See Moves."""
        if self.arena is None or not self.sends_later:
            return
        self.arena.send()
        units = [copy for copy in self._cache.take_copies(published=True) if isinstance(copy, BlockTransfer)]
        # Beside sampling, whose token somebody waits for.
        self.arena.carry_out(self._with_rows(units), send=False, beside=True)
        self.arena.send()

    def _transfer(self, units: list[BlockTransfer], *, send: bool) -> None:
        assert self.arena is not None
        self.arena.carry_out(self._with_rows(units), send=send)
        self.arena.wait_for_stores()

    def _with_rows(self, units: list[BlockTransfer]) -> list[BlockTransfer]:
        """The transfers; states on the device are named by their rows (`SharedMemory.row`), not by their slots."""
        memory = self._memory()
        assert memory is not None
        return [
            unit._replace(device_id=memory.row(unit.device_id))
            if unit.device_id is not None and unit.tag.kind == EntryKind.STATE
            else unit
            for unit in units
        ]

    def _wait_for_cancelled(self) -> None:
        assert self.arena is not None
        for load_id in [load_id for load_id in self._fetching if load_id not in self._cache.loads.running]:
            del self._fetching[load_id]
            self.arena.drop_put_off(load_id)
        for load_id in [load_id for load_id in self._launched if load_id not in self._cache.loads.running]:
            self._wait_for(load_id)
            self.arena.forget(load_id)

    def wait_for_loads(self, plans: Iterable[StepPlan]) -> None:
        """See Moves. The CPU waits for entries that still come from the tier behind. A collective, if there are any."""
        if self._launched or self._fetching:
            for plan in plans:
                if plan.load_id in self._fetching:
                    self.fetch(plan.request_id, plan.load_id, wait=True)
                if plan.load_id in self._launched:
                    self._wait_for(plan.load_id)

    def start_load(self, request_id: int, match: Any) -> None:
        """Launch the load that was prepared for the request. It is put off if its entries come from the tier behind."""
        self.launch(send=False)
        assert self.arena is not None
        if self.arena.is_put_off(match.load_id):
            assert self._behind is not None and isinstance(self._behind.tier, SharedTier)
            self._fetching[match.load_id] = time.monotonic() + self._behind.tier.wait_s
        else:
            self._count_rounds(request_id, match.load_id)

    def _count_rounds(self, request_id: int, load_id: int) -> None:
        load_bytes = self._load(load_id).pages * self._page_bytes
        self._launched[load_id] = ceil_div(load_bytes, BYTES_A_ROUND)

    def fetch(self, request_id: int, load_id: int, *, wait: bool) -> Fetch:
        """Whether the entries of a load have arrived from the tier behind. Launches the load if they have.

        A collective, if the load waits for entries: time passes differently on each rank, so they agree on what it means.

        Args:
            request_id: A request with a load. If it is admitted, a load that did not arrive is one of `failed`.
            load_id: Its load.
            wait: Wait for the entries, until they have arrived or are late.
        """
        late_s = self._fetching.get(load_id)
        if late_s is None:
            return Fetch.ARRIVED
        assert self.arena is not None
        arrived = self.arena.fetched(load_id, max(0.0, late_s - time.monotonic()) if wait else 0.0)
        if arrived is None:
            own = Fetch.LATE if time.monotonic() >= late_s else Fetch.COMING
        else:
            own = Fetch.ARRIVED if arrived else Fetch.MISSING
        agreed = Fetch(max_over_model_ranks(int(own), self._groups))
        if agreed == Fetch.COMING:
            return agreed
        del self._fetching[load_id]
        if agreed == Fetch.ARRIVED:
            self._cache.loads.end_fetch(request_id, None)
            self.arena.run_put_off(load_id)
            self._count_rounds(request_id, load_id)
        else:
            self.arena.drop_put_off(load_id, zero=self._load(load_id).admitted)
            self._cache.loads.end_fetch(request_id, f"tier_load_{agreed.name.lower()}")
        return agreed

    def not_fetched(self, load_id: int) -> bool:
        """Whether an admitted request needs this load, and its entries did not arrive from the tier behind."""
        live = self._cache.loads.running.get(load_id)
        return live is not None and live.load is not None and live.load.not_fetched is not None

    def _load(self, load_id: int) -> Load:
        load = self._cache.loads.running[load_id].load
        assert load is not None
        return load

    def waits(self, load_id: int) -> bool:
        """Whether the request of a load waits one more round; counts the round."""
        left = self._launched.get(load_id, 0)
        if left > 0:
            self._launched[load_id] = left - 1
        return left > 0

    def _wait_for(self, load_id: int) -> None:
        assert self.arena is not None
        self.arena.wait_for_load(load_id)
        del self._launched[load_id]

    def failed(self, plans: Iterable[StepPlan]) -> set[int]:
        """Requests of the last forward whose loads failed verification on any rank, or did not arrive.

        A collective: all ranks call it and get the same set.
        """
        loads = [(plan.request_id, plan.load_id) for plan in plans if plan.load_id is not None]
        if not loads:
            return set()
        assert self.arena is not None
        flags = [int(self.arena.has_failed(load_id)) for _, load_id in loads]
        flags = max_over_model_ranks(flags, self._groups)
        wrong = {request_id for (request_id, _), flag in zip(loads, flags, strict=True) if flag}
        missing = {request_id for request_id, load_id in loads if self.not_fetched(load_id)}
        for request_id in sorted(wrong - missing):
            logger.error("the load of request %d failed verification: the request is recomputed", request_id)
        return wrong | missing

    def finish(self) -> None:
        """See Moves."""
        self.launch()
        if self.arena is not None:
            self.arena.finish()

    def count(self, stats: PrefixStats) -> None:
        """Add this rank's transfers to the statistics."""
        if self.arena is not None:
            host = stats.tiers[HOST]
            host.bytes_budget = self.arena.memory.numel()
            host.bytes_stored, host.bytes_loaded = self.arena.bytes_stored, self.arena.bytes_loaded
            times = [each.queue.seconds() for each in (self.arena.stores, self.arena.loads)]
            host.seconds, host.seconds_waited = (sum(part) for part in zip(*times, strict=True))
            if self._behind is not None and self._behind.name in stats.tiers:
                moved, behind = self.arena.behind_stats, stats.tiers[self._behind.name]
                behind.full, behind.bytes_stored, behind.bytes_loaded = (
                    moved.full,
                    moved.bytes_stored,
                    moved.bytes_loaded,
                )
                behind.seconds, behind.seconds_waited = moved.seconds, moved.seconds_waited
                if self._shared is not None:
                    self._shared.describe(behind)

    def report(self) -> str:
        """Size of the host tier, and the tier behind it, in one line."""
        fields = self.cache_fields
        behind = f"; behind it: {self._behind.name}" if self._behind is not None and "behind" in fields else ""
        return (
            f"host tier: {fields['host_pages']} pages of {self._page_bytes / 2**20:.3f} MiB, {fields['host_kv_pages']} for a "
            f"KV block, {fields['host_state_pages']} for a state{behind}"
        )
