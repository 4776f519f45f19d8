"""Plays scenarios on ranks. Usage: ``torchrun scenario.py OUT.json PLAY.json`` (`launch.run_play` writes the second).

A play is data::

    {"sizes": {"tp": 2}, "model": {"name": "tiny"}, "parts": {name: part, ...}}

``sizes`` are arguments of `ensure_platform`, ``model`` those of `build`; without them there is none. A part is a list, a function
of `FUNCTIONS` or "module:function" and its arguments after the model, or a session: ``engine`` has fields of `EngineHarness`, ``events`` a list of methods of `Session` and their
arguments; by data-parallel rank, if it is a dictionary. An event is of one rank only if its name begins so: "last: damage",
or "first", "rest" (all but the last) or "rank 2". OUT.json gets what each rank found, by part. Tests play parts in their own
process, too, where one rank is the reference.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from megatron_hybrid_prefix import HybridPrefixConfig, installed
from megatron_hybrid_prefix.lab.capacity import sizes_of_config
from megatron_hybrid_prefix.models import build_hybrid_model, load_checkpoint, save_checkpoint
from megatron_hybrid_prefix.models.weights import initialise_weights
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.transfers.behind import BehindCopies
from tests.harness.engine_helpers import described, unequal
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S, wait_until
from tests.harness.named_models import named
from tests.harness.workers.launch import DEVICE, write_findings

ROWS = 4  # requests at a time, of `memory_for`


# -- models and memory -------------------------------------------------------------------------------------------------


def build(name: str = "tiny", *, kind: str = "hybrid", seed: int = 0, platform: Any = None, **changes: Any) -> Any:
    """This rank's shard of a model, in float32: Transformer Engine's layers would multiply in TF32.

    ``kind`` may be "gpt", or "inference": of stand-ins for inference-optimized layers. ``changes`` are of the preset.
    """
    if kind == "inference":
        from tests.harness import inference_layers  # imports megatron

        return inference_layers.build(platform)
    model = build_hybrid_model(
        named(name, **changes), seed=seed, platform=platform, transformer_impl="local", cuda_graph_impl="none"
    )
    if DEVICE == "cuda":  # GPUs draw other numbers
        model.cpu()
        initialise_weights(model, model.hybrid_config, seed)
        model.cuda()
    if kind == "gpt":
        from tests.harness.gpt_model import as_gpt_model

        return as_gpt_model(model)
    return model


def sizes_of(config: Any, tp: int) -> list[tuple[int, int]]:
    """Bytes of a state and of a KV block in float32, of each stage of a pattern, by the dimensions alone."""
    c, sizes = config, []
    for stage in c.layer_pattern.split("|"):
        inner = c.mamba_num_heads * c.mamba_head_dim
        keys, n = c.mamba_num_groups * c.mamba_state_dim, c.gdp_num_householder
        conv = (n * (inner + keys) + keys if n else inner + 2 * keys) * c.d_conv
        state = stage.count("M") * (conv + inner * c.mamba_state_dim)
        inner = c.gdn_num_value_heads * c.gdn_value_head_dim
        conv = (inner + 2 * c.gdn_num_key_heads * c.gdn_key_head_dim) * c.d_conv
        state += stage.count("G") * (conv + inner * c.gdn_key_head_dim)
        block = stage.count("*") * 2 * BLOCK * c.num_query_groups * c.kv_channels
        sizes.append((state // tp * 4, block // tp * 4))
    return sizes


def page_of(sizes: list[tuple[int, int]]) -> PageLayout:
    """The page that stages with these sizes agree on."""
    state, block = max(sizes, key=lambda each: each[0] / each[1])
    return PageLayout.of(state_bytes=state, block_bytes=block, alignment_bytes=ALIGNMENT_BYTES)


def memory_for(config: Any, tp: int, *, slots: int, blocks: int = 200) -> dict[str, Any]:
    """Fields of an engine: so many of both on the rank that needs most. So all layouts have as many, and must decide alike."""
    sizes = sizes_of(config, tp)
    page, most = page_of(sizes), max(state for state, _ in sizes)
    total = blocks + 1 + ceil_div(slots + ROWS, page.page_states) * page.page_blocks
    steps = [max(block, ceil_div(page.page_states * state, page.page_blocks)) for state, block in sizes]
    rings = []
    for stage, (state, _) in zip(config.layer_pattern.split("|"), sizes, strict=True):
        own = replace(config, layer_pattern=stage, dtype="float32") if state else None
        rings.append(sizes_of_config("", own, tp=tp).rings(BLOCK, 0).bytes(ROWS, ALIGNMENT_BYTES) if own else 0)
    own = [
        state + ring + total * ceil_div(step, ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for (state, _), ring, step in zip(sizes, rings, steps, strict=True)
    ]
    return {
        "cache_gb": max(own) / 2**30,
        "mamba_gb": (slots + 0.5) * most / 2**30,
        "buffer_size_gb": (ROWS * most + (blocks + 1.5) * max(block for _, block in sizes)) / 2**30,
        "max_requests": ROWS,
        "max_sequence_length": 512,
        "retention_interval_tokens": None,
    }


# -- sessions ----------------------------------------------------------------------------------------------------------


def together(working: bool) -> bool:
    """Whether any rank has work; every rank asks before each of its forwards."""
    if dist.get_world_size() == 1:
        return working
    flag = torch.tensor([int(working)], device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def mutants() -> dict[str, tuple[Any, str, Callable[..., Any]]]:
    """By name: what is replaced, and by what: the sum of experts, the exchange of rows, a rank's share of them."""
    from megatron_hybrid_prefix.models import experts  # before the platform, torch.compile would import all of inductor

    return {
        "sum": (experts.moe, "reduce_from_tensor_model_parallel_region", lambda sums, group: sums),
        "exchange": (experts.ExpertDispatcher, "combine_preprocess", lambda self, hidden_states: hidden_states),
        "share": (experts.ExpertDispatcher, "_own", lambda self, tokens: tokens),
    }


class Session(EngineHarness):
    """An engine, the decisions after every step, and events: its methods, whose arguments are plain values."""

    def __init__(self, model: Any, **fields: Any) -> None:
        super().__init__(model, **fields)
        self.decisions: list[int] = []
        self.idle_forwards, self.lockstep, self.refused = 0, False, 0
        self.faults = ExitStack()  # undone at the end

    def play(self, events: list[Any]) -> None:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        here = {"", f"rank {rank}", "first" * (rank == 0), "last" * (rank == last), "rest" * (rank < last)}
        with self.faults:
            for name, *arguments in events:
                where, _, what = name.rpartition(": ")
                if where in here:
                    getattr(self, what)(*arguments)

    def check_integrity(self) -> None:
        """After each step."""
        super().check_integrity()
        if self.caching:
            self.decisions.append(crc32(repr(self.present()).encode()))

    def run(self) -> None:
        self.go(-1)

    def present(self) -> dict[str, Any]:
        """State that must be equal on all ranks. (Keys are not: each process has a different secret.)"""
        context, cache = self.context, self.cache
        rows, nodes = slice(0, context.total_request_count), list(cache.nodes())
        return {
            "requests": context.request_ids[rows].tolist(),
            "block_tables": context.request_to_kv_block_ids[rows].tolist(),
            "live_slots": [context.states.live.slot(index) for index in context.live_indices[rows].tolist()],
            "waiting": list(self.engine.waiting_request_ids),
            "available_blocks": cache.blocks.available_count,
            "cached_keys": cache.memory_use().keyed_blocks,
            "cached": sorted([node.block_id, node.slot, node.depth_blocks] for node in nodes),
            "on_host": sorted([*entry.pages, entry.tag.depth_tokens] for entry in cache._device.host.entries()),
        }

    def found(self) -> dict[str, Any]:
        """Answers; with the cache, also decisions and the entries of this rank."""
        found = {"answers": described(self.finished), "idle_forwards": self.idle_forwards, "refused": self.refused}
        if not self.caching:
            return found
        context = self.context
        return found | {
            "stats": context.prefix_stats().as_dict(),
            "present": self.present(),
            "decisions": self.decisions,
            "preempted": self.engine.evicted_request_count,
            "slot_bytes": context.state_layout.slot_bytes,
            "layout": [context.layout.total_blocks, context.layout.page_blocks, context.layout.page_states],
            "moved": context.prefix_cache.memory_use().moved_blocks,
            "kept": len(getattr(self.tier, "entries", ())),
        }

    @property
    def tier(self) -> Any:
        """The tier behind the host, if there is one."""
        return getattr(self.cache._device.host.behind, "tier", None)

    # Events.

    def ask(self, prompt: list[int], count: int = 4, options: dict[str, Any] | None = None) -> None:
        self.add(prompt, count, **(options or {}))

    def go(self, steps: int) -> None:
        """So many steps, or (-1) to the end."""
        while self.engine.has_unfinished_requests() and steps:
            if self.lockstep:
                together(True)
            self.step()
            steps -= 1

    def sends(self, prompts: list[list[int]], count: int = 4) -> None:
        """Together, to the end."""
        for prompt in prompts:
            self.add(prompt, count)
        self.run()

    def serve_others(self) -> None:
        """Takes part in the others' forwards until none has work."""
        while together(False):
            self.engine.controller.dummy_forward()
            self.idle_forwards += 1
            self.check_integrity()

    def in_lockstep(self) -> None:
        """From now on; data-parallel ranks have requests of their own."""
        self.lockstep = dist.get_world_size() > 1

    def budget(self, tokens: int) -> None:
        """The scheduler's, of a step; the buffers stay."""
        self.context.max_tokens = tokens

    def suspend(self) -> None:
        self.engine.suspend()

    def resume(self) -> None:
        self.engine.resume()

    def new_weights(self, ending: str = "") -> None:
        """Others in the first parameter whose name ends so; nobody says so."""
        next(p for name, p in self.model.named_parameters() if name.endswith(ending)).data.add_(0.1)

    def mend(self) -> None:
        """Ends `slow` and mutants."""
        self.faults.close()

    def drain(self) -> None:
        assert not self.caching or self.context.host_moves.drain(HANG_S)

    def waits(self, seconds: float) -> None:
        """How long a request waits for the tier behind."""
        self.tier.wait_s = seconds

    def kill(self, path: str, dies: bool) -> None:
        """This process, once its id is written; or not."""
        Path(f"{path}.rank{dist.get_rank()}").write_text(str(os.getpid()))
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def mutant(self, name: str) -> None:
        self.faults.enter_context(pytest.MonkeyPatch.context()).setattr(*mutants()[name])

    def damage(self) -> None:
        """Zeroes every state that a request resumes from, just before the forward that reads it."""
        context, initialize = self.context, self.context.initialize_attention_state

        def damaging(**kwargs: Any) -> Any:
            context.shared_memory.zero([p.source_slot for p in context._step.plans() if p.source_slot is not None])
            return initialize(**kwargs)

        context.initialize_attention_state = damaging

    def spoil_key(self, request: int) -> None:
        """A key of a request is NaN."""
        context, append = self.context, self.context.append_key_value_cache

        def spoil(layer_number: int, key: torch.Tensor, value: torch.Tensor) -> None:
            running = context.request_ids[: context.total_request_count].tolist()
            if request in running:
                rows = context.token_to_request_idx[: context.active_token_count] == running.index(request)
                key[rows.nonzero()[BLOCK + 7 : BLOCK + 8, 0]] = float(
                    "nan"
                )  # its decode may be launched before it has failed
            append(layer_number, key, value)

        context.append_key_value_cache = spoil

    def spoil_host(self, prompts: list[list[int]]) -> None:
        """Flips a bit of each entry that the host has of these."""
        if not self.caching:
            return
        tier, mover = self.cache._device.host, self.context.host_moves
        mover.drain_queues()  # on a GPU, what is changed could still be on its way
        keys = {key for prompt in prompts for key in self.cache.chain(prompt).keys}
        for entry in [entry for entry in tier.entries() if entry.tag.key in keys]:
            mover.pages.memory[entry.pages[0] * mover.pages.page_bytes + 5] ^= 1

    def slow(self) -> None:
        """No read comes back in time. A request that waits gives up once that is known, however slow the machine is."""
        self.faults.enter_context(_slow(self.tier))

    def lose_states(self, folder: str) -> None:
        """Those in a folder, or (folder: "") in a Mooncake Store between the question and the read."""
        for path in Path(folder, "v1", self.tier.folder.wanted.hex()).rglob("state-*") if folder else ():
            path.unlink()
        if not folder:
            client, call = self.tier._client, self.tier._client.call

            def without(method: str, *arguments: Any) -> Any:
                if method == "batch_get_into_multi_buffers" and "/state/" in arguments[0][0]:
                    call("remove", arguments[0][0], True)
                return call(method, *arguments)

            client.call = without

    def refuse_every_third(self) -> None:
        """Of the entries that are offered to the tier behind."""
        put, offered, tier = self.tier.put, iter(range(10**9)), self.tier

        def puts(namespace: bytes, entry: Any) -> bool:
            refuses = next(offered) % 3 == 0
            self.refused += refuses
            return not refuses and put(namespace, entry)

        tier.put = puts

    def random_faults(self, late_s: float) -> None:
        """The tier behind loses entries, refuses some, has wrong bytes, raises, or takes too long; on each rank others."""
        rng, put, get = random.Random(f"faults of rank {dist.get_rank()}"), self.tier.put, self.tier.get

        def gets(namespace: bytes, tag: Any, buffers: Any) -> int | None:
            fault = rng.random()
            if fault < 0.01:
                time.sleep(2 * late_s)
            elif fault < 0.03:
                raise OSError("a cable was pulled")
            elif fault < 0.05:
                return None
            checksum = get(namespace, tag, buffers)
            return checksum if fault < 0.95 or checksum is None else checksum ^ 1

        self.tier.get = gets
        self.tier.put = lambda namespace, entry: rng.random() < 0.9 and put(namespace, entry)


@contextmanager
def _slow(tier: Any) -> Iterator[None]:
    over, get, fetched = threading.Event(), tier.get, BehindCopies.fetched

    def get_late(*arguments: Any) -> Any:
        with tier._reading():
            assert over.wait(HANG_S)
        return get(*arguments)

    def fetched_late(moves: Any, load: Any, wait_s: float = 0.0) -> Any:
        if wait_s:
            wait_until(tier._is_stuck, "the read takes longer than a request waits")
        return fetched(moves, load, wait_s)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tier, "get", get_late)
        patched.setattr(BehindCopies, "fetched", fetched_late)
        yield
    over.set()


def play(model: Any, engine: dict[str, Any], events: Any, *, raises: bool = False, rank: int = 0) -> dict[str, Any]:
    """Findings of a session; ``raises``: or the error; ``rank`` is the data-parallel one."""
    try:
        session = Session(model, **engine)
        session.play(events[str(rank)] if isinstance(events, dict) else events)
    except Exception as error:
        if not raises:
            raise
        return {"error": f"{type(error).__name__}: {error}"}
    return session.found()


# -- what is no session ------------------------------------------------------------------------------------------------


def agreed(model: Any) -> list[list[int]]:
    """What the ranks agree on, given the inputs of ranks 0 to 3; each without and with process groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_hybrid_prefix.mcore.ranks.agreement import min_over_model_ranks

    groups = ProcessGroupCollection.use_mpu_process_groups()
    said = ([7, 4, 9, 5], [4, 7, 5, 9])
    return [[min_over_model_ranks(values[dist.get_rank()], given) for given in (None, groups)] for values in said]


def shard(model: Any) -> dict[str, Any]:
    """What this rank has of the model."""
    values = dict(model.named_parameters())
    experts = sum(len(value) for name, value in values.items() if name.endswith("linear_fc1_weight"))
    found = {"parameters": sum(value.numel() for value in values.values()), "local_experts": experts}
    return found | {"sequence_parallel": model.config.sequence_parallel}


def checkpoint(model: Any, folder: str, like: dict[str, Any]) -> list[str]:
    """What a model with other weights differs in from this one after it has loaded a checkpoint; this one is saved beside it."""
    other = build(**like, seed=1)
    load_checkpoint(other, folder)
    save_checkpoint(model, folder + "-again")
    return unequal(other, model)


def script(model: Any, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a script in megatron's words gets: its answers to two equal prompts, and blocks that were skipped."""
    from tests.engine.test_install import CONFIG, ENGINE, TOKENS, skipped

    with installed(HybridPrefixConfig(mamba_gb=0.01)):
        model = model if changes is None else build_hybrid_model(named(**changes), seed=0)
        config = CONFIG(model)
        engine, state = ENGINE(model, config), config.mamba_inference_state_config
        answers = TOKENS(engine)
    found = {"context": type(engine.context).__name__, "answers": answers, "skipped_blocks": skipped(engine) // BLOCK}
    return found | {"described": None if state is None else type(state).__name__}


def bits(model: Any, requests: int, counts: list[int]) -> dict[str, Any]:
    """Requests whose bits differ from those alone; and where sums over ranks depend on the size of a message.

    Every rank of a model runs the same random requests: batches, and with them the messages between ranks, differ in size from those
    of a request alone. Expert-parallel ranks have others each. For a control, sums over ranks or of a token's experts depend on rows.
    """
    from megatron.core import parallel_state

    from megatron_hybrid_prefix.layers import invariant
    from megatron_hybrid_prefix.models import experts
    from tests.harness.bits import BitsTraffic, by_rows

    in_order, found, alone = invariant.sum_over_ranks, {}, None
    ep, rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_data_parallel_rank()
    module = invariant if ep == 1 else experts

    def sum_by_rows(x: torch.Tensor, group: Any) -> torch.Tensor:
        return in_order(x, group) if dist.get_world_size(group) == ep == 1 else by_rows(in_order(x, group))

    def to_the_end(harness: EngineHarness, function: Callable[..., Any], *given: Any) -> Any:
        """Of a function that steps; other ranks take part in each forward."""
        if ep == 1:
            return function(*given)
        engine, step = harness.engine, harness.engine.step_modern
        engine.step_modern = lambda: (engine.has_unfinished_requests() and together(True), step())[1]
        returned = function(*given)
        while together(False):
            engine.controller.dummy_forward()
        engine.step_modern = step
        return returned

    for name, sums in (("differing", in_order), ("differing_by_rows", sum_by_rows)):
        own = {"blocks": None, "host_gb": 0.0, "check_ranks": alone is None, "counts": counts}
        traffic = BitsTraffic(model, rank, requests, **own | ({"async_sched_mode": "async"} if ep > 1 else {}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "sum_over_ranks", sums)
            to_the_end(traffic.harness, traffic.run)
        alone = alone or traffic.alone()
        found[name] = to_the_end(alone._harness, traffic.differing, alone)
    return found | {"finished": len(traffic.harness.finished)}


FUNCTIONS = {function.__name__: function for function in (agreed, shard, checkpoint, script, bits)}


def main(out: str, path: str) -> None:
    given = json.loads(Path(path).read_text())
    device = given.get("device", DEVICE)
    limits = {"device": device, "timeout_s": COLLECTIVE_HANG_S[device]}
    found: dict[str, Any] = {}
    if "refused" in given:  # sizes that these processes cannot have
        with pytest.raises(ValueError) as refusal:
            ensure_platform(**given["refused"], **limits)
        found["refusal"] = str(refusal.value)
    platform = ensure_platform(**given["sizes"], **limits) if "sizes" in given else None
    if given.get("model", {}).get("kind") == "inference":
        from tests.harness.inference_layers import put_stand_ins

        put_stand_ins(setattr)
    if given.get("mooncake"):  # each rank has its namespace, so it can have a store, too
        from tests.harness.fake_mooncake import FakeCluster, use_fake_mooncake

        use_fake_mooncake(pytest.MonkeyPatch(), FakeCluster())
    model = build(**given["model"], platform=platform) if "model" in given else None
    for name, part in given["parts"].items():
        if isinstance(part, dict):
            found[name] = play(model, **part, rank=dist.get_rank() // given["sizes"].get("tp", 1))
        else:
            module, _, function = part[0].rpartition(":")
            of = getattr(importlib.import_module(module), function) if module else FUNCTIONS[function]
            found[name] = of(model, *part[1:])
        dist.barrier()
    write_findings(out, found | {"platform": platform and platform.describe()})
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
