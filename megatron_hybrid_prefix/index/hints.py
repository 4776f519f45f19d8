"""`Hints`: what the caller of a request knows of the future. `Pins`: the prefixes that such callers want kept, bounded for each tenant.

A pinned state goes when no other may go, so a pin never refuses a request its memory. Keys stand for prefixes here: a pin may come before
its state, and after it. No clock is read: time is what requests say, so all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TENANT_SHARE = 1 / 4
"""Most of the memory that one tenant's pins take."""
ALL_SHARE = 1 / 2
"""Most of it that all pins take. Beyond it the tenant that has most gives way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What a caller says of a prompt, or of its beginning. One of the last three is above 0.

    Attributes:
        tokens: Up to where it counts; None: all of the prompt.
        uses: So many prompts that begin so are still to come. Gives way to later pins of its tenant.
        requests: Kept while the tenant's next requests, so many, come.
        seconds: Kept for so long.
    """

    tokens: int | None = None
    uses: int = 0
    requests: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What a request says of others.

    Attributes:
        session: Id of its session, among those of its salt; None: it has none.
        ends_session: That is over once the request is released.
        pins: What it wants kept of its prompt.
        tenant: Whose pins these are.
        now_s: The time, by one clock for all requests; None: not said.
    """

    session: str | None = None
    ends_session: bool = False
    pins: tuple[Pin, ...] = ()
    tenant: str | None = None
    now_s: float | None = None


NO_HINTS = Hints()


class _Tenant:
    """Its requests so far, since it has pins."""

    __slots__ = ("requests",)

    def __init__(self) -> None:
        self.requests = 0


class _Kept:
    """A pinned prefix: its keys, whose it is, and until when."""

    __slots__ = ("keys", "tenant", "until_request", "until_s", "uses")

    def __init__(self, keys: Sequence[bytes], tenant: _Tenant) -> None:
        self.keys, self.tenant = keys, tenant
        self.uses = self.until_request = 0
        self.until_s = -math.inf


class Pins:
    """The pinned prefixes.

    Args:
        blocks: KV blocks that the memory holds.
        state_blocks: Blocks whose bytes a state takes.

    Attributes:
        kept: By the key of their last block, pinned longest ago first.
    """

    def __init__(self, blocks: int, state_blocks: float) -> None:
        self._blocks, self._state_blocks = blocks, state_blocks
        self.kept: dict[bytes, _Kept] = {}
        self._tenants: dict[str | None, _Tenant] = {}
        self._now_s = -math.inf

    def came(self, keys: Sequence[bytes], tenant: str | None, now_s: float | None) -> None:
        """A request with these keys is admitted, at this time of the only clock; None: it says none. Pins that are over go."""
        self._now_s = max(self._now_s, -math.inf if now_s is None else now_s)
        if (own := self._tenants.get(tenant)) is not None:
            own.requests += 1
        for key in keys:
            if (kept := self.kept.get(key)) is not None and kept.uses:
                kept.uses -= 1
        for key in [key for key, kept in self.kept.items() if not kept.uses and not self._waits(kept)]:
            del self.kept[key]

    def put(self, keys: Sequence[bytes], tenant: str | None, pin: Pin) -> bool:
        """Pins the prefix with these keys. Returns whether the tenant's share has room; if not, nothing changes for it."""
        own = self._tenants.setdefault(tenant, _Tenant())
        kept = self.kept.get(keys[-1])
        if kept is None:
            if not self._make_room(keys, own):
                return False
            kept = self.kept[keys[-1]] = _Kept(keys, own)
        kept.uses = max(kept.uses, pin.uses)
        if pin.requests:
            kept.until_request = max(kept.until_request, own.requests + pin.requests)
        if pin.seconds:
            kept.until_s = max(kept.until_s, self._now_s + pin.seconds)
        return True

    def room_for(self, keys: Sequence[bytes], tenant: str | None) -> tuple[float, float]:
        """Blocks that a pin of these keys takes beside those that do not give way to it, and those that the tenant's pins may take."""
        own = self._tenants.get(tenant)
        stay = [kept for kept in self.kept.values() if kept.tenant is own and self._waits(kept)]
        return self._size(stay, keys), TENANT_SHARE * self._blocks

    def clear(self) -> None:
        """All prefixes are gone."""
        self.kept.clear()
        self._tenants.clear()

    def _waits(self, kept: _Kept) -> bool:
        """Whether the pin waits for requests or seconds."""
        return kept.tenant.requests < kept.until_request or self._now_s < kept.until_s

    def _size(self, pins: Iterable[_Kept], keys: Sequence[bytes] = ()) -> float:
        """Blocks of pins of one tenant, and of one more with these keys."""
        paths = {kept.keys[-1]: kept.keys for kept in pins} | ({keys[-1]: keys} if keys else {})
        return len(set[bytes]().union(*paths.values())) + self._state_blocks * len(paths)

    def _make_room(self, keys: Sequence[bytes], own: _Tenant) -> bool:
        of: dict[_Tenant, list[_Kept]] = {own: []}
        for kept in self.kept.values():
            of.setdefault(kept.tenant, []).append(kept)
        gone: list[_Kept] = []
        while (needed := self._size(of[own], keys)) > TENANT_SHARE * self._blocks:
            oldest = next((each for each in of[own] if not self._waits(each)), None)
            if oldest is None:
                return False
            of[own].remove(oldest)
            gone.append(oldest)
        sizes = {tenant: self._size(pins) for tenant, pins in of.items()} | {own: needed}
        while sum(sizes.values()) > ALL_SHARE * self._blocks:
            most = max(sizes, key=lambda tenant: sizes[tenant])
            if most is own:
                return False
            gone.append(of[most].pop(0))
            sizes[most] = self._size(of[most])
        for kept in gone:
            del self.kept[kept.keys[-1]]
        return True
