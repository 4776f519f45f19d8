"""Follow one conversation through the cache: what each turn matches, shares, plans, publishes and loads.

It runs `tiny` on the CPU, for three turns (`docs/walkthrough.md` explains what it prints). After the second turn another
conversation arrives, which does not fit on the device as well. So parts of the first conversation are evicted to the host,
and load back in the third turn. Each line is one call of the cache and its answer, in order. At the end of each turn the
answer is compared with that of caching off.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.lab.capacity import sizes_of
from megatron_hybrid_prefix.mcore import build_upstream_engine
from megatron_hybrid_prefix.mcore.runner import run_batch
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform
from megatron_hybrid_prefix.tiers.units import HOST, BlockMove, BlockTransfer, Copy, LoadOver
from megatron_hybrid_prefix.upstream.names import SamplingParams

BLOCK_TOKENS = 64
BLOCKS = 16  # two of them are a page, which holds their KV or five states
MAX_REQUESTS = 2
ANSWER_TOKENS = 80
TURNS = {  # name -> new tokens of the prompt
    "turn 1": 200,  # a system message and a question
    "turn 2": 50,
    "another conversation": 520,
    "turn 3": 50,
}
KINDS = ("KV", "state")  # kinds of entries that move to or from the host
SHOWN = (
    *("prompt_tokens", "computed_prompt_tokens", "reused_tokens_device", "reused_tokens_host"),
    *("checkpoints_published", "evictions", "kv_evictions"),
)


# --- What the cache is asked and answers -----------------------------------------------------------------------------


class Diary:
    """Records the calls of a `HybridPrefixCache` as text. Changes nothing.

    Attributes:
        events: (verb, what happened), in order; `take` empties it.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.events: list[tuple[str, str]] = []
        self._matched = False  # recorded already; a load changes the match
        watched = {
            cache: ("admit", "plan", "publish", "checkpoint_decoded", "grow", "take_copies"),
            cache.loads: ("copy",),
            cache.blocks: ("allocate",),
        }
        for owner, names in watched.items():
            for name in names:
                setattr(owner, name, self._noting(getattr(owner, name), getattr(self, f"_{name}", None)))

    def _noting(self, call: Callable[..., Any], note: Callable[..., None] | None) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if call.__name__ == "admit":
                self._match(args[1])
            stats, held = self.cache.stats(), self._held()
            result = call(*args, **kwargs)
            now = self.cache.stats()
            if (now.evictions, now.kv_evictions) != (stats.evictions, stats.kv_evictions):
                self.say("evict", "from the device: " + _ends(held - self._held()))
            if note is not None:
                note(result, *args)
            return result

        return noting

    def _held(self) -> set[tuple[str, int, bytes]]:
        """Entries on the device: kind, end in tokens, key."""
        nodes = list(self.cache.nodes())
        kv = {("KV", node.depth_blocks * BLOCK_TOKENS, node.key) for node in nodes if node.block_id >= 0}
        return kv | {("state", node.depth_blocks * BLOCK_TOKENS, node.key) for node in nodes if node.slot >= 0}

    def say(self, verb: str, text: str) -> None:
        """Records an event."""
        self.events.append((verb, text))

    def _match(self, match: Any) -> None:
        if self._matched:
            return
        self._matched = True
        text = f"KV of {_count(match.kv_depth_blocks, 'block')} is cached, on the device or the host; on the device "
        text += f"the deepest state is at {match.resume_tokens}" if match.resume_tokens else "there is no state"
        if match.loadable_blocks:
            text += f", with the host at {match.loadable_blocks * BLOCK_TOKENS}"
        self.say("match", text)

    def _copy(self, _: None, load: Any, shared_blocks: int, block_ids: Any) -> None:
        self.say(
            "load",
            f"up to {load.depth_tokens}: the KV of {_count(shared_blocks, 'block')} is still there, that of {len(block_ids)} is "
            f"loaded, and the state into slot {load.slot}",
        )

    def _admit(self, admission: Any, *args: Any) -> None:
        if admission is None:
            self.say("admit", "not yet: too few KV blocks")
            return
        own = len(admission.block_ids) - admission.shared_blocks
        self.say(
            "admit",
            f"shares {_count(admission.shared_blocks, 'KV block')}, gets {own} of its own; {admission.resume_tokens} "
            "tokens are skipped",
        )

    def _plan(self, plan: Any, *args: Any) -> None:
        source = "zero" if plan.source_slot is None else f"the state in slot {plan.source_slot}"
        kept = [f"{one.position_tokens} ({one.reason.name.lower()}, slot {one.slot})" for one in plan.checkpoints]
        self.say(
            "plan",
            f"computes [{plan.start_tokens}, {plan.end_tokens}) from {source}; states to keep: {', '.join(kept) or 'none'}",
        )

    def _publish(self, _: None, plan: Any) -> None:
        full = plan.end_tokens // BLOCK_TOKENS - plan.start_tokens // BLOCK_TOKENS
        self.say(
            "publish",
            f"{_count(full, 'more full block')} and {_count(len(plan.checkpoints), 'state')} can be matched now",
        )

    def _checkpoint_decoded(self, slot: int | None, request_id: int, position_tokens: int) -> None:
        outcome = "is kept already, or cannot be" if slot is None else f"is written to slot {slot}"
        self.say("decode", f"the answer fills the block up to {position_tokens}: its state {outcome}")

    def _take_copies(self, copies: Sequence[Copy]) -> None:
        for verb, group in groupby(copies, key=_verb):
            if verb is not None:
                self.say(verb, _TEXTS[verb](list(group)))

    def take(self) -> list[tuple[str, str]]:
        """The events since the last call."""
        events, self.events, self._matched = self.events, [], False
        return events


def _verb(copy: Copy) -> str | None:
    if isinstance(copy, LoadOver):
        return None
    if isinstance(copy, BlockTransfer):
        return "store" if copy.target == HOST else "fetch"
    return "move" if isinstance(copy, BlockMove) else "clear"


def _moved(transfers: Iterable[Any]) -> str:
    """What transfers move."""
    return _ends({(KINDS[one.tag.kind], one.tag.depth_tokens, one.tag.key) for one in transfers})


_TEXTS: dict[str, Callable[[list[Any]], str]] = {
    "store": lambda transfers: f"to the host: {_moved(transfers)}",
    "fetch": lambda transfers: f"from the host: {_moved(transfers)}",
    "move": lambda moves: f"{_count(len(moves), 'KV block')} to other pages, so that a page can hold a state",
    "clear": lambda pages: f"{_count(len(pages), 'page')} that held a state, for KV",
}


def _ends(parts: Iterable[tuple[str, int, bytes]]) -> str:
    """Blocks and states by their ends."""
    return ", ".join(f"{kind} {end_tokens}" for kind, end_tokens, _ in sorted(parts))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def places(cache: Any, prompt: Sequence[int]) -> list[dict[str, Any]]:
    """Where each block of the prompt and the state at its end are: device, host, both or neither."""
    by_key, host, found = {node.key: node for node in cache.nodes()}, cache._device.host, []
    for at, key in enumerate(cache.chain(prompt).keys, 1):
        node = by_key.get(key)
        kv = node is not None and node.block_id >= 0, node in host.kv
        state = node is not None and node.slot >= 0, node in host.of_states
        found.append({"end_tokens": at * BLOCK_TOKENS, "kv": _place(*kv), "state": _place(*state)})
    return found


def _place(on_device: bool, on_host: bool) -> str:
    return " + ".join(name for name, is_there in (("device", on_device), ("host", on_host)) if is_there) or "-"


# --- The conversation ------------------------------------------------------------------------------------------------


def counts(stats: PrefixStats) -> dict[str, int]:
    """The counters that are shown."""
    host = stats.tiers[HOST]
    return {name: getattr(stats, name) for name in SHOWN} | {
        "stored on the host": host.stores,
        "loaded from the host": host.loads,
    }


def walk(model: Any) -> Iterator[dict[str, Any]]:
    """Runs the turns. Yields for each its name, prompt, events, counters, and where the conversation is afterwards."""
    # One more block is megatron's dummy, and half a one has room for the engine's own state. Each request has rings.
    sizes = sizes_of("tiny")
    rings_bytes = sizes.rings(BLOCK_TOKENS, 0).bytes(MAX_REQUESTS)
    cache_gb = ((BLOCKS + 1.5) * sizes.kv_block_bytes(BLOCK_TOKENS) + rings_bytes) / 2**30
    fields = {"max_requests": MAX_REQUESTS, "max_sequence_length": 1024, "block_size_tokens": BLOCK_TOKENS}
    # "lru" evicts in an order that is easy to follow.
    prefix = HybridPrefixConfig(cache_gb=cache_gb, host_gb=0.01, eviction_policy="lru")
    engine = build_engine(model, prefix, **fields)
    plain = build_upstream_engine(model, buffer_size_gb=cache_gb, **fields)
    sampling = SamplingParams(
        num_tokens_to_generate=ANSWER_TOKENS,
        top_k=1,
        termination_id=-1,
        return_log_probs=True,
        skip_prompt_log_probs=True,
    )
    cache = engine.context.prefix_cache
    diary = Diary(cache)
    rng, vocabulary = random.Random(0), range(model.hybrid_config.vocab_size)
    history: list[int] = []
    before = counts(PrefixStats())
    for name, count in TURNS.items():
        other = name == "another conversation"
        prompt = ([] if other else history) + rng.choices(vocabulary, k=count)
        (result,), (right,) = (run_batch(one, [prompt], [sampling]) for one in (engine, plain))
        engine.context.check_integrity()
        if not other:
            history = prompt + result.generated
        after = counts(engine.context.prefix_stats())
        yield {
            "name": name,
            "prompt_tokens": len(prompt),
            "answer_tokens": len(result.generated),
            "events": diary.take(),
            "counted": {name: count - before[name] for name, count in after.items()},
            "conversation": places(cache, history),
            "same_tokens": result.generated == right.generated,
            "max_log_prob_difference": max(abs(a - b) for a, b in zip(result.log_probs, right.log_probs, strict=True)),
        }
        before = after


# --- Output ----------------------------------------------------------------------------------------------------------


def describe(turn: dict[str, Any]) -> str:
    """A turn as text."""
    blocks, rest = divmod(turn["prompt_tokens"], BLOCK_TOKENS)
    title = f"{turn['name']}: a prompt of {turn['prompt_tokens']} tokens, {blocks} blocks of {BLOCK_TOKENS} and {rest}"
    lines = [f"{title}; answer of {turn['answer_tokens']}"]
    lines += [f"  {verb:8}{text}" for verb, text in turn["events"]]
    counted = ", ".join(f"{key} {value}" for key, value in turn["counted"].items() if value)
    lines.append(f"  {'counted':8}{counted}")
    for part in ("kv", "state"):
        kept = [f"{one['end_tokens']} {one[part]}" for one in turn["conversation"] if one[part] != "-"]
        lines.append(f"  {'where':8}{part} of the conversation: {', '.join(kept) or 'nowhere'}")
    same = "the same tokens" if turn["same_tokens"] else "OTHER TOKENS"
    lines.append(f"  {'check':8}{same} as with caching off, log-probs within {turn['max_log_prob_difference']:.0e}")
    return "\n".join(lines)


def main() -> None:
    """Prints the walk. The process ends with 1 if an answer is not that of caching off."""
    model = build_hybrid_model("tiny", seed=0, platform=ensure_platform(device="cpu"))
    print(f"tiny, a memory of {BLOCKS} KV blocks of {BLOCK_TOKENS} tokens, five states in a page of two; a host tier\n")
    same = []
    for turn in walk(model):
        print(describe(turn), end="\n\n", flush=True)
        same.append(turn["same_tokens"])
    raise SystemExit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
