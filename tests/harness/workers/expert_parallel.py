"""Answers of a model with experts in one layout, as JSON. Usage: ``torchrun expert_parallel.py OUT.json CHECKPOINT TP EP ETP``.

Each data-parallel rank serves requests of its own, and takes part in the others' forwards when it has none.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset, load_checkpoint, save_checkpoint
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import described, greedy, random_tokens, run_to_end
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.launch import DEVICE, write_findings
from tests.harness.workers.prefix_parallel import damage_sources, drawn_on_cpu

BLOCK_TOKENS = 64
NEW_TOKENS = 3
BUFFER_GB = 0.02  # room for all requests; an engine fills it with zeros, and each check goes through all of its blocks
MODES = ("legacy", "async")
# A gate, several experts a token, a width of their own, a shared expert with its gate: as Qwen3-Next, and smaller.
SHARED = {
    "activation": "swiglu",
    "num_moe_experts": 16,
    "moe_router_topk": 5,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 96,
    "moe_shared_expert_gate": True,
}
LATENT = get_preset("tiny-moe", **SHARED | {"num_query_groups": 2, "moe_latent_size": 32})
# (tp, ep, etp): dimensions. With the second one both ranks have the same key/value head. With the last ones experts are whole.
LAYOUTS = {
    (1, 2, 1): get_preset("tiny-moe"),
    (2, 1, 2): get_preset("tiny-qwen3-next", layer_pattern="GE*E", num_query_groups=1),
    (2, 2, 2): LATENT,
    (2, 1, 1): get_preset("tiny-moe"),
    (2, 2, 1): LATENT,
    (2, 4, 1): LATENT,
}


def ranks_of_layout(tp, ep, etp):
    """How many ranks a layout needs."""
    return max(tp, ep * etp)


def build(layout, platform, seed=0):
    """This rank's shard of a layout's model, in float32 as `prefix_parallel.build` says."""
    return drawn_on_cpu(
        build_hybrid_model(LAYOUTS[layout], seed=seed, platform=platform, transformer_impl="local"), seed
    )


def prompts(rank):
    """Prompts of one data-parallel rank, with a prefix per rank. Rank 1 has fewer, and is idle at the end."""
    prefix = random_tokens(3 * BLOCK_TOKENS, seed=rank)
    tails = (1, 2, 60, 130, 3) if rank == 0 else (2, 70)
    return [prefix + random_tokens(own, seed=10 * rank + own) for own in tails]


def herd(rank):
    """Prompts of rank 0 that arrive at once, with a long new prefix."""
    prefix = random_tokens(5 * BLOCK_TOKENS, seed=77)
    return [prefix + random_tokens(9 + number, seed=80 + number) for number in range(3)] if rank == 0 else []


def answers(model, rank, mode, prefix, ranks=1, damaged=False, only_first=False, **fields):
    """What the requests of a data-parallel rank say, sent one by one (``only_first``: no others), then all at once, then a herd.

    ``ranks`` is the world's size, ``fields`` are further ones of `build_engine`.
    """
    engine = build_engine(
        model,
        prefix,
        max_sequence_length=512,
        max_requests=8,
        block_size_tokens=BLOCK_TOKENS,
        async_sched_mode=mode,
        buffer_size_gb=BUFFER_GB,
        **fields,
    )
    if damaged:
        damage_sources(engine.context)
    finished: dict = {}
    idle_forwards = 0
    parts = [[[prompt] for prompt in prompts(rank)], [prompts(rank)], [herd(rank)]]
    for batches in parts[:1] if only_first else parts:
        for batch in batches:
            for prompt in batch:
                engine.add_request(len(finished) + len(engine.requests), prompt, greedy(NEW_TOKENS))
            while engine.has_unfinished_requests():
                together(True, ranks)
                run_to_end(engine, finished, steps=1)
                if prefix is not None:
                    engine.context.check_integrity()
        while together(False, ranks):
            engine.controller.dummy_forward()
            idle_forwards += 1
            if prefix is not None:
                engine.context.check_integrity()
    return {
        "answers": described(finished),
        "idle_forwards": idle_forwards,
        "slots_used": 0 if prefix is None else engine.context.prefix_stats().slots_used,
    }


def together(working, ranks):
    """Whether any rank has work; every rank asks before each of its forwards."""
    if ranks == 1:
        return working
    flag = torch.tensor([int(working)], device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def mutants(model, rank, ranks, tp, ep, etp):
    """Answers with something wrong: the states of the last rank alone, the sum of experts, the exchange of rows.

    Only those to requests that are sent one by one.
    """
    # Imports megatron: before the platform, torch.compile would import all of inductor.
    from megatron_hybrid_prefix.models import experts

    cache = HybridPrefixConfig(mamba_gb=0.002)
    last = dist.get_rank() == ranks - 1
    found = {"states": answers(model, rank, "legacy", cache, ranks, damaged=last, only_first=True)}
    for name, applies, owner, attribute, wrong in (
        ("sum", tp > 1, experts.moe, "reduce_from_tensor_model_parallel_region", lambda sums, group: sums),
        ("exchange", ep > 1, experts.ExpertDispatcher, "combine_preprocess", lambda self, hidden_states: hidden_states),
        ("share", etp < tp, experts.ExpertDispatcher, "_own", lambda self, tokens: tokens),
    ):
        if applies:
            right = getattr(owner, attribute)
            setattr(owner, attribute, wrong)
            found[name] = answers(model, rank, "legacy", cache, ranks, only_first=True)
            setattr(owner, attribute, right)
    return found


def unequal(model, right):
    """Names of parameters that differ."""
    pairs = zip(model.named_parameters(), right.named_parameters(), strict=True)
    return [name for (name, value), (_, reference) in pairs if not torch.equal(value, reference)]


def noticed(model):
    """Whether the last rank's new weights are noticed by all when they resume; cached tokens of a prompt before and after."""
    prefix = HybridPrefixConfig(mamba_gb=0.002, keep_on_resume=True)
    engine = build_engine(
        model, prefix, max_sequence_length=512, max_requests=8, block_size_tokens=BLOCK_TOKENS, buffer_size_gb=BUFFER_GB
    )
    finished: dict = {}
    for refit in (False, False, True):
        engine.suspend()
        if refit and dist.get_rank() == dist.get_world_size() - 1:
            next(p for name, p in model.named_parameters() if name.endswith("linear_fc1_weight")).data.add_(0.1)
        engine.resume()
        engine.add_request(len(finished), random_tokens(2 * BLOCK_TOKENS + 3, seed=5), greedy(NEW_TOKENS))
        run_to_end(engine, finished)
    return [finished[number].num_cached_tokens for number in sorted(finished)]


def refusal(**layout):
    """What a layout that these processes cannot have is answered with."""
    try:
        ensure_platform(device=DEVICE, timeout_s=COLLECTIVE_HANG_S[DEVICE], **layout)
    except ValueError as error:
        return str(error)
    return "nothing"


def main(out, checkpoint, *layout):
    tp, ep, etp = layout
    found = {"refusal": refusal(tp=2 * tp, ep=2 * ep, etp=2 * tp if etp > 1 else 1)}
    platform = ensure_platform(tp=tp, ep=ep, etp=etp, device=DEVICE, timeout_s=COLLECTIVE_HANG_S[DEVICE])
    ranks, rank = dist.get_world_size(), dist.get_rank() // tp
    model = build(layout, platform)
    found["platform"] = platform.describe()
    cache = HybridPrefixConfig(mamba_gb=0.002)
    found["off"] = answers(model, rank, "legacy", None, ranks=ranks)
    for mode in MODES:
        found[mode] = answers(model, rank, mode, cache, ranks=ranks)
    found["mutants"] = mutants(model, rank, ranks, tp, ep, etp)
    found["local_experts"] = sum(len(p) for name, p in model.named_parameters() if name.endswith("linear_fc1_weight"))
    other = build(layout, platform, seed=1)
    load_checkpoint(other, checkpoint)  # saved by one rank
    found["unequal"] = unequal(other, model)
    save_checkpoint(model, checkpoint + "-again")
    found["noticed"] = noticed(model)
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
