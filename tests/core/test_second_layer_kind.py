"""A layer kind that the package does not know works with its pool, slots and cache unchanged.

A tiny engine runs a tiny model. Requests run interleaved, resume from checkpoint slots, write planned states straight
to their slots, fail now and then, and lose cached entries under pressure. All memory is NaN before it is written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.pool.layout import SlotLayout
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory
from megatron_hybrid_prefix.pool.slots import SlotPool
from tests.core.delta_rule import HIDDEN, LAYOUT, RECURRENT_LAYERS, VOCABULARY, DeltaHybrid

BLOCK = 4
NEW_TOKENS = 6
MUTANTS = ("key_window", "memory")


class TinyEngine:
    """Admits, resumes, runs chunk by chunk, publishes, decodes, releases.

    Args:
        kv_blocks: KV blocks.
        rows: Live slots.
        checkpoint_slots: Checkpoint slots.
        copies: True: a request first copies its source into its live slot. False: it reads the source in place.
        mutant: Component that is zeroed at every resume.
    """

    def __init__(
        self, *, kv_blocks: int, rows: int, checkpoint_slots: int, copies: bool = False, mutant: str | None = None
    ) -> None:
        self.model = DeltaHybrid()
        self.cache = HybridPrefixCache(
            CacheSettings(
                block_tokens=BLOCK,
                kv_blocks=kv_blocks,
                state_slots=checkpoint_slots,
                first_state_slot=rows,
                live_states=False,
                eviction_policy="lru",
            )
        )
        self.pool = SharedMemory(SlotLayout((LAYOUT,)), own_slots=rows + checkpoint_slots, device="cpu")
        for tensor in self.pool.states.values():
            tensor.fill_(float("nan"))
        self.kv = torch.full((kv_blocks, BLOCK, 2, HIDDEN), float("nan"), dtype=torch.float64)
        self.rows = SlotPool(rows)
        self.copies, self.mutant = copies, mutant
        self.content: dict[int, tuple[int, ...]] = {}  # of a checkpoint slot: the tokens that its state is of
        self.resumed: dict[int, int] = {}  # by request, tokens skipped
        self.waits = 0

    def state(self, slot: int) -> list[list[torch.Tensor]]:
        """Clones of [key_window, memory] of each layer."""
        tensors = self.pool.states
        return [
            [tensors["key_window"][i, slot].clone(), tensors["memory"][i, slot].clone()] for i in range(LAYOUT.layers)
        ]

    def write(self, states: list[list[torch.Tensor]], slot: int) -> None:
        """Writes a state straight to its target slot."""
        for i, (key_window, memory) in enumerate(states):
            self.pool.states["key_window"][i, slot] = key_window
            self.pool.states["memory"][i, slot] = memory

    def forward(self, request_id: int, token: int, position: int, states: list[list[torch.Tensor]]) -> torch.Tensor:
        """Runs one token. Its KV goes to the request's last block."""
        table = list(tuple(self.cache.live[request_id].block_ids))
        context = self.kv[table].flatten(0, 1)[: position + 1]
        context[-1] = float("nan")
        logits = self.model.step(token, context, states)
        self.kv[table[position // BLOCK], position % BLOCK] = context[-1]
        return logits

    def run(self, request_id: int, prompt: list[int], salt: str, chunk: int, fails: list[bool]) -> Iterator[Any]:
        """Runs the steps of one request. Its value: the tokens, and the logits after each computed token, by position.

        ``fails`` is popped from the end: whether a prefill step fails after it has written everything.
        """
        admission = row = None
        while admission is None:
            match = self.cache.match(self.cache.chain(prompt, salt=salt))
            row = self.rows.reserve() if row is None else row
            admission = None if row is None else self.cache.admit(request_id, match)
            if admission is None:
                self.waits += 1
                yield
        position, logits = admission.resume_tokens, {}
        self.resumed[request_id] = position
        while position < len(prompt):
            end = min(position + chunk, len(prompt))
            plan = self.cache.plan(request_id, position, end)
            source = row if plan.source_slot is None else plan.source_slot
            if position == 0:
                self.pool.zero([row])
            if source != row:
                if self.mutant is not None:
                    self.pool.states[self.mutant][:, source] = 0
                if self.copies:
                    self.pool.copy([source], [row])
                    assert all(torch.equal(t[:, source], t[:, row]) for t in self.pool.states.values())
                    source = row
            yield  # others run between plan and forward: what is pinned and reserved must stay
            states, written = self.state(source), {c.position_tokens: c.slot for c in plan.checkpoints}
            for offset in range(position, end):
                logits[offset] = self.forward(request_id, prompt[offset], offset, states)
                if offset + 1 in written:
                    self.write(states, written[offset + 1])
            self.write(states, row)
            if fails and fails.pop():
                self.cache.abandon(plan)
                self.cache.release(request_id)
                self.rows.abandon(row)
                yield
                return (yield from self.run(request_id, prompt, salt, chunk, fails))
            self.cache.publish(plan)
            self.content |= {slot: tuple(prompt[:at]) for at, slot in written.items()}
            position = end
            yield
        tokens = list(prompt)
        while len(tokens) < len(prompt) + NEW_TOKENS:
            tokens.append(int(logits[len(tokens) - 1].argmax()))
            self.cache.append(request_id, tokens[-1:])
            while self.cache.grow(request_id, len(tokens)) is None:
                self.waits += 1
                yield
            states = self.state(row)
            logits[len(tokens) - 1] = self.forward(request_id, tokens[-1], len(tokens) - 1, states)
            self.write(states, row)
            yield
        self.cache.release(request_id)
        self.rows.abandon(row)
        return tokens, logits


class Oracle:
    """The results of an uninterrupted run."""

    def __init__(self) -> None:
        self.model = DeltaHybrid()
        self._states: dict[tuple[int, ...], list[list[torch.Tensor]]] = {}

    def check(self, tokens: list[int], logits: dict[int, torch.Tensor]) -> None:
        """Checks the logits of the computed positions, and that generated tokens are the greedy ones."""
        whole = self.model.whole(tokens)
        for position, row in logits.items():
            torch.testing.assert_close(row, whole[position], rtol=0, atol=1e-6)

    def state(self, tokens: tuple[int, ...]) -> list[list[torch.Tensor]]:
        """The states after ``tokens``, computed one by one from the start."""
        if tokens not in self._states:
            zeros = [[torch.zeros(c.shape, dtype=getattr(torch, c.dtype)) for c in LAYOUT.components]]
            states = [list(layer) for layer in zeros * RECURRENT_LAYERS]
            kv = torch.full((len(tokens), 2, HIDDEN), float("nan"), dtype=torch.float64)
            for position, token in enumerate(tokens):
                self.model.step(token, kv[: position + 1], states)
            self._states[tokens] = states
        return self._states[tokens]

    def check_slots(self, engine: TinyEngine) -> None:
        """Checks that every published state is bit-equal to the state of its tokens."""
        for slot in sorted(node.slot for node in [node for node in engine.cache.nodes() if node.slot >= 0]):
            for layer, right in zip(engine.state(slot), self.state(engine.content[slot]), strict=True):
                for tensor, expected in zip(layer, right, strict=True):
                    assert torch.equal(tensor, expected)


def prompts(chance: random.Random, count: int) -> list[tuple[str, list[int]]]:
    """Salts and prompts: shared prefixes of two families, tails of any length, and the same prompt again."""
    families = [[chance.randrange(VOCABULARY) for _ in range(24)] for _ in range(2)]
    found: list[tuple[str, list[int]]] = []
    for _ in range(count):
        if found and chance.random() < 0.2:
            found.append(chance.choice(found))
            continue
        shared = chance.choice(families)[: BLOCK * chance.randrange(7)]
        tail = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 6))]
        found.append((chance.choice("aab"), shared + tail))
    return found


def serve(engine: TinyEngine, oracle: Oracle, seed: int, count: int = 32, *, check_slots: bool = True) -> list[Any]:
    """Runs requests interleaved at random; returns each one's tokens and logits."""
    chance = random.Random(seed)
    waiting = list(enumerate(prompts(chance, count)))
    running: dict[int, Iterator[Any]] = {}
    done: dict[int, Any] = {}
    while waiting or running:
        if waiting and (not running or chance.random() < 0.3):
            request_id, (salt, prompt) = waiting.pop(0)
            fails = [chance.random() < 0.5 for _ in range(chance.randrange(3))]
            running[request_id] = engine.run(request_id, prompt, salt, chance.choice([1, 3, BLOCK, 7, 64]), fails)
        request_id = chance.choice(list(running))
        try:
            next(running[request_id])
        except StopIteration as end:
            done[request_id] = end.value
            del running[request_id]
        engine.cache.check_integrity()
        engine.rows.check()
        if check_slots:
            oracle.check_slots(engine)
    assert [i for i, live in engine.cache.live.items() if not live.is_loading] == [] and engine.rows.used_slots == 0
    return [done[request_id] for request_id in sorted(done)]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.mark.parametrize("copies", [False, True], ids=["reads_the_source", "copies_the_source"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupted_runs_equal_an_uninterrupted_one(oracle, seed, copies):
    engine = TinyEngine(kv_blocks=30, rows=3, checkpoint_slots=4, copies=copies)
    for tokens, logits in serve(engine, oracle, seed):
        oracle.check(tokens, logits)
        assert tokens[-NEW_TOKENS:] == [
            int(logits[i].argmax()) for i in range(len(tokens) - NEW_TOKENS - 1, len(tokens) - 1)
        ]
    stats = engine.cache.stats()
    assert stats.reused_tokens > 50 and stats.evictions > 10 and stats.kv_evictions > 10
    assert stats.fallbacks["forward_failed"] > 5 and engine.waits > 5


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_state_is_noticed(oracle, mutant):
    engine = TinyEngine(kv_blocks=30, rows=3, checkpoint_slots=4, mutant=mutant)
    answers = serve(engine, oracle, 0, check_slots=False)
    for request_id, (tokens, logits) in enumerate(answers):
        if engine.resumed[request_id]:
            with pytest.raises(AssertionError):
                oracle.check(tokens, logits)
        else:
            oracle.check(tokens, logits)
    assert sum(map(bool, engine.resumed.values())) > 5


def test_without_slots_nothing_is_kept_and_answers_are_the_same(oracle):
    engine = TinyEngine(kv_blocks=30, rows=2, checkpoint_slots=0)
    for tokens, logits in serve(engine, oracle, 1, count=8):
        oracle.check(tokens, logits)
    assert not any(engine.resumed.values())


def test_both_forms_of_the_naive_layer_agree(oracle):
    """Token by token, and the whole sequence in one expression."""
    tokens = [(7 * i + i * i) % VOCABULARY for i in range(40)]
    states = [[torch.zeros(c.shape, dtype=getattr(torch, c.dtype)) for c in LAYOUT.components] for _ in range(2)]
    kv = torch.full((len(tokens), 2, HIDDEN), float("nan"), dtype=torch.float64)
    rows = [oracle.model.step(token, kv[: i + 1], states) for i, token in enumerate(tokens)]
    torch.testing.assert_close(torch.stack(rows), oracle.model.whole(tokens), rtol=0, atol=1e-9)
