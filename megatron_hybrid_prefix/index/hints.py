"""`Hints`: what the caller of a request knows of the future. `Pins`: prefixes that callers want kept, bounded for each tenant.

A pinned state goes when no other may go, so a pin takes no memory from running requests. A pin is known by the keys of its prefix: it may come
before its state, and outlive it. No clock is read here: time is what requests say, so all ranks decide alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

TENANT_SHARE = 1 / 4
"""Most of the memory that one tenant's pins take."""
ALL_SHARE = 1 / 2
"""Most of it that all pins take. Beyond it the tenant that has most gives way."""
MOST_PINS = 512
MOST_REQUESTS = 4096
"""A pin for uses ends after so many requests of its tenant, whether they used it or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """How long a prompt, or its beginning, is to be kept.

    Attributes:
        tokens: Length of that beginning; None: all of the prompt.
        uses: Prompts with this beginning that are still to come. Gives way to later pins of its tenant.
        requests: Kept while so many requests of the tenant come.
        seconds: Kept for so long.
    """

    tokens: int | None = None
    uses: int = 0
    requests: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What the caller of a request knows of the future.

    Attributes:
        session: Id of its session, among those of its salt; None: it has none.
        ends_session: That is over once the request is released.
        pins: What is to be kept of its prompt.
        tenant: Whose share of the memory they take.
        now_s: The time, by one clock for all requests; None: not said.
    """

    session: str | None = None
    ends_session: bool = False
    pins: tuple[Pin, ...] = ()
    tenant: str | None = None
    now_s: float | None = None


NO_HINTS = Hints()


class Tenant:
    """Who has pins: these, by the keys of their last blocks, said longest ago first; uses of each block; and its requests since."""

    __slots__ = ("blocks", "pins", "requests")

    def __init__(self) -> None:
        self.pins: dict[bytes, Pinned] = {}
        self.blocks = Counter[bytes]()
        self.requests = 0


class Pinned:
    """A pinned prefix: its keys, whose it is, until when; and whether its state would have been evicted."""

    __slots__ = ("keys", "spared", "tenant", "until_request", "until_s", "uses", "uses_until")

    def __init__(self, keys: Sequence[bytes], tenant: Tenant) -> None:
        self.keys, self.tenant, self.spared = keys, tenant, False
        self.uses = self.uses_until = self.until_request = 0
        self.until_s = -math.inf


class Pins:
    """The pinned prefixes.

    Args:
        blocks: KV blocks that the memory holds.
        state_blocks: Blocks whose bytes a state takes.

    Attributes:
        kept: They, by the key of their last block.
    """

    def __init__(self, blocks: int, state_blocks: float) -> None:
        self._blocks, self._state_blocks = blocks, state_blocks
        self.kept: dict[bytes, Pinned] = {}
        self._tenants: dict[str | None, Tenant] = {}
        self._now_s = -math.inf

    def came(self, now_s: float | None, keys: Sequence[bytes] = (), tenant: str | None = None) -> None:
        """A request says the time (None: it does not); with keys, it counts. Pins that are over go."""
        self._now_s = max(self._now_s, -math.inf if now_s is None else now_s)
        if keys and (own := self._tenants.get(tenant)) is not None:
            own.requests += 1
        for key in keys:
            if (kept := self.kept.get(key)) is not None and kept.uses:
                kept.uses -= 1
        for kept in [*self.kept.values()]:
            if not self._is_firm(kept) and (not kept.uses or kept.tenant.requests >= kept.uses_until):
                self._drop(kept)
        self._tenants = {name: each for name, each in self._tenants.items() if each.pins}

    def put(self, keys: Sequence[bytes], tenant: str | None, pin: Pin) -> bool:
        """Pins the prefix with these keys. Returns whether there is room; if not, nothing changes."""
        kept = self.kept.get(keys[-1])
        if kept is None:
            own = self._tenants.setdefault(tenant, Tenant())
            if not self._make_room(keys, own):
                return False
            kept = Pinned(keys, own)
        else:
            self._drop(kept)  # said again: the last one now
        self._add(kept)
        requests = kept.tenant.requests
        if pin.uses:
            kept.uses, kept.uses_until = max(kept.uses, pin.uses), requests + MOST_REQUESTS
        if pin.requests:
            kept.until_request = max(kept.until_request, requests + pin.requests)
        if pin.seconds:
            kept.until_s = max(kept.until_s, self._now_s + pin.seconds)
        return True

    def clear(self) -> None:
        """All prefixes are gone."""
        self.kept.clear()
        self._tenants.clear()
        self._now_s = -math.inf

    def _is_firm(self, kept: Pinned) -> bool:
        """Whether the pin waits for requests or seconds, not for uses alone."""
        return kept.tenant.requests < kept.until_request or self._now_s < kept.until_s

    def _size(self, tenant: Tenant) -> float:
        """Blocks that the tenant's pins take."""
        return len(tenant.blocks) + self._state_blocks * len(tenant.pins)

    def _add(self, kept: Pinned) -> None:
        self.kept[kept.keys[-1]] = kept.tenant.pins[kept.keys[-1]] = kept
        kept.tenant.blocks.update(kept.keys)

    def _drop(self, kept: Pinned) -> None:
        del self.kept[kept.keys[-1]], kept.tenant.pins[kept.keys[-1]]
        blocks = kept.tenant.blocks
        for key in kept.keys:
            if blocks[key] > 1:
                blocks[key] -= 1
            else:
                del blocks[key]

    def _make_room(self, keys: Sequence[bytes], own: Tenant) -> bool:
        before, gone = [(tenant, dict(tenant.pins)) for tenant in self._tenants.values()], list[Pinned]()
        while True:
            sizes = {tenant: self._size(tenant) for tenant in self._tenants.values()}
            sizes[own] += sum(key not in own.blocks for key in keys) + self._state_blocks
            if sizes[own] > TENANT_SHARE * self._blocks:
                giver = own
            elif sum(sizes.values()) > ALL_SHARE * self._blocks or len(self.kept) >= MOST_PINS:
                giver = max(sizes, key=lambda tenant: sizes[tenant])
            else:
                return True
            victims = (kept for kept in giver.pins.values() if giver is not own or not self._is_firm(kept))
            victim = next(victims, None)
            if victim is None:
                for kept in gone:
                    self._add(kept)
                for tenant, pins in before:
                    tenant.pins = pins
                return False
            self._drop(victim)
            gone.append(victim)
