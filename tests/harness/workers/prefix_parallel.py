"""Decisions and answers of the prefix cache in one layout, as JSON. Usage: ``torchrun prefix_parallel.py OUT.json TP PP
PATTERN``.

Every budget is given in slots and blocks of the rank with the largest ones. So all layouts get the same number of both,
and must make the same decisions.
"""

from __future__ import annotations

import sys
from zlib import crc32

import torch.distributed as dist

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.errors import RankDisagreementError
from megatron_hybrid_prefix.mcore.ranks.agreement import min_over_model_ranks
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.models.weights import initialise_weights
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout
from tests.harness.engine_helpers import described, greedy, random_tokens, run_to_end
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.launch import DEVICE, write_findings

BLOCK_TOKENS = 64
ROWS = 4
MODES = ("legacy", "async")
ONE_MODE = {"M*-|M*-M-M-": ("legacy",), "G*-|MG*-": ("async",), "M*-M-|*-": ("legacy",), "*-|M*-M-": ("async",)}
SCENARIOS = ("tails", "chunked", "preempted", "host", "pressed")
SLOTS = {"tails": 40, "chunked": 3, "preempted": 6, "host": 3, "pressed": 3}
FIELDS = {
    "tails": {},
    "chunked": {"enable_chunked_prefill": True, "max_tokens": 256},
    "preempted": {"blocks": 8},
    "host": {"blocks": 12, "host_gb": 0.05},
    "pressed": {"blocks": 5, "host_gb": 0.05},
}


def one_rank(pattern):
    """The same layers in one stage."""
    return pattern.replace("|", "")


def stages(pattern, pp):
    """Layers of each stage."""
    return [one_rank(pattern)] if pp == 1 else pattern.split("|")


def config_of(pattern):
    """Dimensions of the model with this pattern."""
    return get_preset("tiny-gdn" if "G" in pattern else "tiny", layer_pattern=pattern)


def recurrent_layers(stage):
    """How many layers of a stage have states."""
    return stage.count("M") + stage.count("G")


def slot_bytes(config, stage, tp):
    """Bytes of a state: float32, of the recurrent layers of a stage, by the dimensions alone."""
    inner = config.mamba_num_heads * config.mamba_head_dim
    conv = (inner + 2 * config.mamba_num_groups * config.mamba_state_dim) * config.d_conv
    mamba = stage.count("M") * (conv + inner * config.mamba_state_dim)
    inner = config.gdn_num_value_heads * config.gdn_value_head_dim
    conv = (inner + 2 * config.gdn_num_key_heads * config.gdn_key_head_dim) * config.d_conv
    return (mamba + stage.count("G") * (conv + inner * config.gdn_key_head_dim)) // tp * 4


def kv_block_bytes(config, layers, tp):
    """Bytes of a KV block of ``layers`` attention layers in float32."""
    return layers * 2 * BLOCK_TOKENS * config.num_query_groups * config.kv_channels // tp * 4


def sizes_of(pattern, tp, pp):
    """Bytes of a state and of a KV block, of each stage."""
    config = config_of(pattern)
    return [(slot_bytes(config, each, tp), kv_block_bytes(config, each.count("*"), tp)) for each in stages(pattern, pp)]


def cache_gb(sizes, *, blocks, states):
    """``cache_gb`` for so many KV blocks beside so many states, on the rank that needs most."""
    page = page_of(sizes)
    total = blocks + 1 + ceil_div(states, page.page_states) * page.page_blocks
    steps = [max(block, ceil_div(page.page_states * slot, page.page_blocks)) for slot, block in sizes]
    own = [
        slot + total * ceil_div(step, ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for (slot, _), step in zip(sizes, steps, strict=True)
    ]
    return max(own) / 2**30


def page_of(sizes):
    """The page that stages with these sizes (of a state, of a block) agree on."""
    slot, block = max(sizes, key=lambda each: each[0] / each[1])
    return PageLayout.of(state_bytes=slot, block_bytes=block, alignment_bytes=ALIGNMENT_BYTES)


class Session:
    """One engine, with or without the cache. Records the decisions after every step."""

    def __init__(
        self,
        model,
        pattern,
        tp,
        pp,
        *,
        mode,
        slots,
        blocks=200,
        cached=True,
        host_gb=0.0,
        shared=None,
        check_ranks=False,
        coalesce_prefixes=True,
        **fields,
    ):
        sizes = sizes_of(pattern, tp, pp)
        most = max(slot for slot, _ in sizes)
        self.engine = build_engine(
            model,
            HybridPrefixConfig(
                cache_gb=cache_gb(sizes, blocks=blocks, states=slots + ROWS),
                mamba_gb=(slots + 0.5) * most / 2**30,
                host_gb=host_gb,
                shared=shared,
                check_ranks=check_ranks,
                coalesce_prefixes=coalesce_prefixes,
            )
            if cached
            else None,
            max_requests=ROWS,
            max_sequence_length=512,
            block_size_tokens=BLOCK_TOKENS,
            async_sched_mode=mode,
            buffer_size_gb=(ROWS * most + (blocks + 1.5) * max(block for _, block in sizes)) / 2**30,
            **fields,
        )
        self.cached = cached
        self.finished = {}
        self.sent = 0
        self.decisions = []

    def add(self, prompt, new_tokens=4):
        self.engine.add_request(self.sent, prompt, greedy(new_tokens))
        self.sent += 1

    def send(self, *prompts, new_tokens=4):
        for prompt in prompts:
            self.add(prompt, new_tokens)
        self.run()

    def run(self, steps=None):
        while self.engine.has_unfinished_requests() and steps != 0:
            run_to_end(self.engine, self.finished, steps=1)
            if self.cached:
                self.engine.context.check_integrity()
                self.decisions.append(crc32(repr(self.present()).encode()))
            steps = None if steps is None else steps - 1

    def present(self):
        """State that must be equal on all ranks. (Keys are not: each process has a different secret.)"""
        context = self.engine.context
        cache, nodes = context.prefix_cache, list(context.prefix_cache.nodes())
        rows = slice(0, context.total_request_count)
        return {
            "requests": context.request_ids[rows].tolist(),
            "block_tables": context.request_to_kv_block_ids[rows].tolist(),
            "live_slots": [context.states.live.slot(index) for index in context.live_indices[rows].tolist()],
            "waiting": list(self.engine.waiting_request_ids),
            "available_blocks": cache.blocks.available_count,
            "cached_keys": cache.blocks.cached_count,
            "cached": sorted([node.block_id, node.slot, node.depth_blocks] for node in nodes),
            "on_host": sorted([node.host_block, node.host_slot, node.depth_blocks] for node in nodes),
        }

    def found(self):
        """Answers; with the cache, also decisions and the entries of this rank."""
        found = {"answers": described(self.finished)}
        if self.cached:
            context = self.engine.context
            found |= {
                "stats": context.prefix_stats().as_dict(),
                "present": self.present(),
                "decisions": self.decisions,
                "preempted": self.engine.evicted_request_count,
                "slot_bytes": context.state_layout.slot_bytes,
                "layout": [context.layout.total_blocks, context.layout.page_blocks, context.layout.page_states],
                "moved": context.prefix_cache.memory_use().moved_blocks,
            }
        return found


def tails(session):
    """1 to 4 tokens after a restored prefix, alone and in a batch beside decodes; junctions."""
    prefix = random_tokens(3 * BLOCK_TOKENS, seed=1)
    session.send(prefix[: BLOCK_TOKENS + 1])
    session.send(prefix[: 2 * BLOCK_TOKENS])
    for own in (1, 2, 3, 4):
        session.send(prefix[: 2 * BLOCK_TOKENS] + random_tokens(own, seed=10 + own))
    for number in range(6):
        session.add(prefix[: BLOCK_TOKENS * (number % 4)] + random_tokens(1 + 9 * number, seed=20 + number), 3 + number)
        session.run(steps=1 + number % 2)
    session.run()


def chunked(session):
    """Prefills cut by a token budget that has no common divisor with blocks or chunks; three slots."""
    session.engine.context.max_tokens = 101  # the scheduler's budget; the buffers are for 256
    prefixes = [random_tokens(4 * BLOCK_TOKENS, seed=seed) for seed in (2, 3)]
    for number in range(10):
        prefix = prefixes[number % 3 % 2]
        session.add(prefix[: BLOCK_TOKENS * (1 + number % 4)] + random_tokens(1 + number % 4, seed=40 + number))
        session.run(steps=number % 4)
    session.run()
    session.send([*prefixes[0][:-1], 7], prefixes[0][: 2 * BLOCK_TOKENS + 3])


def preempted(session):
    """Few KV blocks: cached blocks are evicted and decodes are preempted. They resume from what is still cached."""
    prompts = [random_tokens(BLOCK_TOKENS + 54 + number, seed=50 + number) for number in range(6)]
    session.send(prompts[0][: BLOCK_TOKENS + 1], prompts[1][: BLOCK_TOKENS + 2])
    session.send(*prompts[:4], new_tokens=12)
    session.send(*([*prompt, number] for number, prompt in enumerate(prompts)), new_tokens=12)


def host(session):
    """Prompts that come back from the host; then two for which the last rank alone has other data."""
    prompts = [random_tokens(3 * BLOCK_TOKENS + 9 + number, seed=60 + number) for number in range(5)]
    session.send(*prompts)
    session.send(*prompts, new_tokens=6)
    session.send(*prompts[2:], new_tokens=6)  # the device has these now
    context = session.engine.context
    if session.cached and dist.get_rank() == dist.get_world_size() - 1:
        tier, arena = context.prefix_cache._store.host, context.host_moves.arena
        arena.finish()  # on a GPU, what is changed could still be on its way
        keys = {key for prompt in prompts[:2] for key in context.prefix_cache.chain(prompt).keys}
        nodes = [node for node in context.prefix_cache.nodes() if node.key in keys]
        entries = [entry for node in nodes for entry in (node.host_slot, node.host_block) if entry in tier.entries]
        for entry in entries:
            arena.pages.memory[tier.entries[entry].pages[0] * arena.pages.page_bytes + 5] ^= 1
    session.send(*prompts[:2], new_tokens=8)


def pressed(session):
    """Prompts that come back from the host, beside decodes that need more blocks than there are."""
    shared = random_tokens(2 * BLOCK_TOKENS, seed=70)
    prompts = [
        (shared if number % 2 else []) + random_tokens(BLOCK_TOKENS + 5 + 9 * number, seed=71 + number)
        for number in range(6)
    ]
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            session.add(prompt, new_tokens=3 + 6 * (number % 3))
            session.run(steps=(number + turn) % 3)
    session.run()


def damage_sources(context):
    """Zeroes every state that a request resumes from, just before the forward that reads it."""
    initialize = context.initialize_attention_state

    def damaging(**kwargs):
        context.shared_memory.zero([plan.source_slot for plan in context.step_plans() if plan.source_slot is not None])
        return initialize(**kwargs)

    context.initialize_attention_state = damaging


def spoilt(model, pattern, tp, pp, mode, *, here):
    """Of two requests that share a prefix one fails: where ``here``, a key of it is NaN. What each gives, and what is cached then."""
    session = Session(model, pattern, tp, pp, mode=mode, slots=8, coalesce_prefixes=False)
    context = session.engine.context
    append = context.append_key_value_cache

    def spoil(layer_number, key, value):
        running = context.request_ids[: context.total_request_count].tolist()
        if 0 in running:
            rows = context.token_to_request_idx[: context.active_token_count] == running.index(0)
            key[rows.nonzero()[BLOCK_TOKENS + 7, 0]] = float("nan")
        append(layer_number, key, value)

    if here:
        context.append_key_value_cache = spoil
    prefix = random_tokens(2 * BLOCK_TOKENS, seed=80)
    session.send([*prefix, 5], [*prefix, 6])
    session.send([*prefix, 6])
    answers = [[request.failed(), list(request.generated_tokens)] for _, request in sorted(session.finished.items())]
    return {"answers": answers, "cached": session.finished[2].num_cached_tokens, "present": session.present()}


def run_scenario(name, model, pattern, tp, pp, mode, *, cached=True, damaged=False):
    """Findings of one scenario."""
    # The last scenarios also compare as the check for users does.
    checked = name in ("preempted", "host", "pressed")
    session = Session(
        model, pattern, tp, pp, mode=mode, slots=SLOTS[name], cached=cached, check_ranks=checked, **FIELDS[name]
    )
    if damaged:
        damage_sources(session.engine.context)
    scenarios = {"tails": tails, "chunked": chunked, "preempted": preempted, "host": host, "pressed": pressed}
    scenarios[name](session)
    return session.found()


def build(pattern, tp, pp, platform):
    """The model with this pattern in this layout, in float32: Transformer Engine's layers would multiply in TF32."""
    config = config_of(one_rank(pattern) if pp == 1 else pattern)
    return drawn_on_cpu(build_hybrid_model(config, seed=0, platform=platform, transformer_impl="local"))


def drawn_on_cpu(model, seed=0):
    """The model with the weights that a CPU draws: GPUs have another generator."""
    if DEVICE == "cuda":
        model.cpu()
        initialise_weights(model, model.hybrid_config, seed)
        model.cuda()
    return model


def layout_findings(pattern, tp, pp, platform):
    """Findings by mode and scenario; and with wrong states on one rank only."""
    model = build(pattern, tp, pp, platform)
    found = {
        mode: {name: run_scenario(name, model, pattern, tp, pp, mode) for name in SCENARIOS}
        for mode in modes_of(pattern)
    }
    # The last tensor-parallel rank of the stage where most layers recur; a stage without any cannot be wrong.
    layers = [recurrent_layers(stage) for stage in stages(pattern, pp)]
    wrong_rank = layers.index(max(layers)) * tp + tp - 1
    found["damaged"] = run_scenario("tails", model, pattern, tp, pp, "legacy", damaged=dist.get_rank() == wrong_rank)
    found["spoilt"] = spoilt(model, pattern, tp, pp, modes_of(pattern)[0], here=dist.get_rank() == 0)
    return found


def modes_of(pattern):
    """Scheduling modes of the scenarios of a pattern: both for one of them, and both with pipeline stages."""
    return ONE_MODE.get(pattern, MODES)


def agreements():
    """What the ranks agree on, given the inputs of ranks 0 to 3; each without and with process groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    said = ([7, 4, 9, 5], [4, 7, 5, 9])
    return [[min_over_model_ranks(values[dist.get_rank()], given) for given in (None, groups)] for values in said]


def disagreement(pattern, tp, pp, platform):
    """The error of every rank when the last rank alone does not read the cache."""
    model = build(pattern, tp, pp, platform)
    session = Session(model, pattern, tp, pp, mode="legacy", slots=8, check_ranks=True)
    prompt = random_tokens(BLOCK_TOKENS + 2, seed=1)
    session.send(prompt)
    params = greedy(4)
    params.add_attributes({"cache_read": dist.get_rank() != dist.get_world_size() - 1})
    session.engine.add_request(session.sent, prompt, params)
    try:
        session.run()
    except RankDisagreementError as error:
        return str(error)
    return "nothing"


def noticed(pattern, tp, pp, platform):
    """Cached tokens of a prompt before and after the last rank alone has new weights, and nobody says so."""
    model = build(pattern, tp, pp, platform)
    session = Session(model, pattern, tp, pp, mode="legacy", slots=8, check_ranks=True)
    for refit in (False, False, True, False):
        if refit and dist.get_rank() == dist.get_world_size() - 1:
            next(model.parameters()).data.add_(0.1)
        session.send(random_tokens(2 * BLOCK_TOKENS + 2, seed=1))
    return [session.finished[number].num_cached_tokens for number in sorted(session.finished)]


def refusal(pattern, tp, pp, platform):
    """This rank's error for live states that only fit on some stages. Called last, because ranks may get out of step."""
    model = build(pattern, tp, pp, platform)
    most, *_ = sorted((slot_bytes(model.hybrid_config, stage, tp) for stage in stages(pattern, pp)), reverse=True)
    try:
        build_engine(model, HybridPrefixConfig(mamba_gb=0.01), max_requests=ROWS, buffer_size_gb=ROWS * most / 2**30)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(out, tp, pp, pattern):
    platform = ensure_platform(tp=tp, pp=pp, device=DEVICE, timeout_s=COLLECTIVE_HANG_S[DEVICE])
    found = {"runs": layout_findings(pattern, tp, pp, platform), "agreements": agreements()}
    found["disagreement"] = disagreement(pattern, tp, pp, platform)
    found["noticed"] = noticed(pattern, tp, pp, platform)
    write_findings(out, found)
    with open(f"{out}.refusal{dist.get_rank()}", "w") as file:
        file.write(refusal(pattern, tp, pp, platform))
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
