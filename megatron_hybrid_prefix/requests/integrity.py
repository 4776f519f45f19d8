"""`check_integrity`: checks every invariant of the cache, the slow and obvious way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.tree import NO_BLOCK
from megatron_hybrid_prefix.pool.slots import NO_SLOT, SlotState
from megatron_hybrid_prefix.requests.book import LiveRequest, Load, LoadSource, RequestBook
from megatron_hybrid_prefix.tiers.device import DeviceTier


def check_integrity(
    device: DeviceTier, book: RequestBook, *, unattached: Collection[int], writing: Collection[bytes]
) -> None:
    """Checks all invariants.

    Args:
        device: The cached blocks and states, there and below.
        book: All requests.
        unattached: Allocated blocks that no request is attached to.
        writing: Keys whose state a forward in flight writes.

    Raises:
        CacheCorruptionError: An invariant does not hold. The message says which.
    """
    requests, block_tokens = book.everyone(), device.settings.block_tokens
    device.blocks.check()
    device.slots.check()
    device.check()
    _check_tree(device)
    for live in requests:
        _check_request(device, live)
    held, holders = (
        device.blocks.held(),
        Counter([*unattached, *(each for live in requests for each in live.block_ids)]),
    )
    for block_id in held.keys() | holders.keys():
        counted, has = held.get(block_id, 0), holders[block_id]
        _expect(counted == has, "block {} counts {} holders, has {}", block_id, counted, has)
    _check_slots(device, requests)
    planned = [
        live.chain.keys[checkpoint.position_tokens // block_tokens - 1]
        for live in requests
        if live.write
        for plan in live.plans
        for checkpoint in plan.checkpoints
    ]
    _expect(sorted(planned) == sorted(writing), "the keys being written differ from the plans in flight")
    _expect(all(live.plans for live in book.ending), "a released request has no plan in flight, and is still listed")
    users: list[LoadSource | Load] = [*book.swapped_out.values(), *book.loads()]
    pinned = Counter(entry for each in users for entry in each.pinned)
    device.host.check(pinned, [entry for each in users for entry in each.private])


def _expect(holds: bool, what: str, *named: object) -> None:
    """Raises unless ``holds``. ``named`` fill the braces of ``what``: writing out a node takes longer than checking it."""
    if not holds:
        raise CacheCorruptionError(what.format(*named) if named else what)


def _check_tree(device: DeviceTier) -> None:
    tree, blocks, host = device.tree, device.blocks, device.host
    refs = Counter([*(node.parent for node in tree), *host.kv, *host.of_states])
    for node in tree:
        _expect(tree.get(node.key) is node, "{} is not found by its key", node)
        _expect(node.refs == refs[node], "{} counts {} references, has {}", node, node.refs, refs[node])
        has_state = node.slot != NO_SLOT or node in host.of_states
        _expect(has_state == (node.reason is not None), "{}: reason {}", node, node.reason)
        parent = node.parent
        if node.block_id == NO_BLOCK:
            _expect(node.slot == NO_SLOT, "{} has a state but no KV on the device", node)
            _expect(node.refs > 0, "{} is empty and a leaf, but in the tree", node)
        else:
            owner = blocks.node(node.block_id)
            _expect(owner is node, "{}: its block belongs to {}", node, owner)
            _expect(parent is None or parent.block_id != NO_BLOCK, "{} is on the device, its parent is not", node)
        _expect(node.depth_blocks == (parent.depth_blocks if parent else 0) + 1, "{} under {}", node, parent)
        if parent is not None:
            _expect(tree.get(parent.key) is parent, "{}: its parent is not in the tree", node)
            held = node.block_id != NO_BLOCK and blocks.ref_count(node.block_id) > 0
            _expect(not held or blocks.ref_count(parent.block_id) > 0, "{} is held, its parent is not", node)
    keyed = sum(blocks.node(block_id) is not None for block_id in range(blocks.total_blocks))
    on_device = sum(node.block_id != NO_BLOCK for node in tree)
    _expect(keyed == on_device == blocks.keyed_blocks, f"{keyed} keyed blocks, {on_device} nodes on the device")


def _check_request(device: DeviceTier, live: LiveRequest) -> None:
    tree, blocks, block_tokens = device.tree, device.blocks, device.settings.block_tokens
    name = f"request {live.request_id}"
    _expect(len(set(live.block_ids)) == len(live.block_ids), f"{name} holds a block twice")
    _expect(len(live.path) <= min(len(live.block_ids), len(live.chain.keys)), f"{name}: path longer than its blocks")
    _expect(
        len(live.path) * block_tokens <= max(live.computed_tokens, live.stored_tokens),
        f"{name} registered blocks that it has not computed",
    )
    _expect(not live.write or live.chain.epoch == tree.epoch, f"{name} may write under other weights")
    _expect(live.computed_tokens <= live.planned_tokens, f"{name}: computed more than planned")
    if live.pinned_slot is not None and live.path:  # an empty path: the weights changed
        depth = live.computed_tokens // block_tokens
        source = live.path[depth - 1] if depth <= len(live.path) else None
        has_it = source is not None and source.slot == live.pinned_slot
        _expect(has_it, "{}: its source {} was evicted from {}", name, live.pinned_slot, source)
    for index, node in enumerate(live.path):
        _expect(tree.get(node.key) is node, "{}: {} on its path is not in the tree", name, node)
        _expect(node.key == live.chain.keys[index], "{}: {} does not have the key of its tokens", name, node)
        own = live.block_ids[index]
        is_its = node.block_id == own or blocks.is_duplicate(node, own)
        _expect(is_its, "{}: block {} is not the block of {}", name, own, node)


def _check_slots(device: DeviceTier, requests: Sequence[LiveRequest]) -> None:
    slots, states = device.slots, [node for node in device.tree if node.slot != NO_SLOT]
    published = sorted(node.slot for node in states)
    _expect(published == slots.slots_in(SlotState.PUBLISHED), "the published slots differ from those of the tree")
    _expect(
        Counter([*device.blocks.eviction, *device.blocks.guesses]) == Counter(states),
        "the guesses and the states of the eviction policy differ from those of the tree",
    )
    plans = [plan for live in requests for plan in live.plans]
    reserved = [checkpoint.slot for plan in plans for checkpoint in plan.checkpoints]
    reserved += [live.load.slot for live in requests if live.load is not None]
    _expect(
        sorted(reserved) == slots.slots_in(SlotState.RESERVED),
        "the reserved slots differ from those of plans and loads",
    )
    own = [live.live_slot for live in requests if live.live_slot is not None]
    _expect(sorted(own) == slots.slots_in(SlotState.LIVE), "the live slots differ from those of the requests")
    pins = Counter(live.pinned_slot for live in requests if live.pinned_slot is not None)
    pins.update(device.protected)
    for slot in range(slots.first_slot, slots.first_slot + slots.total_slots):
        has = slots.pins(slot)
        _expect(has == pins[slot], "slot {} has {} pins, should have {}", slot, has, pins[slot])
