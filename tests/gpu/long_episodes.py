"""The tail of log-probs over long episodes of agents, by position: caching off, megatron's own cache, and this package's.

    python -m tests.gpu.long_episodes --out out/episodes [--engines off,megatron,ours]     # a GPU: hybrid-4b, 114,688 tokens
    python -m tests.gpu.long_episodes --out out/experts --preset small-nemotron-3 --longest 65536
    python -m tests.gpu.long_episodes --out out/tiny --device cpu                          # float32, 1,024 tokens, a minute
    torchrun --nproc-per-node 2 -m tests.gpu.long_episodes --out out/tiny --device cpu --tp 2

Eight agents share a start and branch. Each sends its history again and again, a tool's answer longer each time, and "samples" a few given
tokens. Their log-probs, as the engine reports them, are compared with those of one plain forward of megatron's classes over the whole
episode, without a cache. Every engine has the same tokens. What it found is kept in ``--out`` and not measured again; `tail.json` there has all of it.
"""

from __future__ import annotations

import gc
import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.bench.forced import forced_answers
from megatron_hybrid_prefix.layers.kinds import invalidate_layers, recurrent_modules
from megatron_hybrid_prefix.mcore.entrypoints.build import build_upstream_engine
from megatron_hybrid_prefix.mcore.runner import release_engine
from tests.gpu.measure import ON_GPU, graph_fields, started
from tests.gpu.models import Source
from tests.harness.drafts import forced_drafts
from tests.harness.engine_helpers import cache_gb_for, greedy, kv_budget, state_bytes
from tests.harness.naive_model import NaiveHybridModel

AGENTS, BINS, ABOVE = 8, 16, (0.01, 0.1, 1.0, 3.0)
LIMIT = 1e-3  # the chance that an engine as right as caching off is called wrong, over all bins
# Fields of an engine (``enable_prefix_caching``: megatron's own) and of `HybridPrefixConfig`; ``every``: only each so many turns, of two agents.
# ``share``: memory for so much of what the agents have in the end, so that those that decode are preempted.
ENGINES: dict[str, dict[str, Any]] = {
    "off": {"every": 10 if ON_GPU else 1},
    "megatron, off": {"every": 10 if ON_GPU else 1},
    "megatron": {"enable_prefix_caching": True, "every": 4 if ON_GPU else 1},
    "megatron, states": {"enable_prefix_caching": True, "prefix_caching_mamba_gb": True, "every": 4 if ON_GPU else 1},
    "ours": {},
    "ours, host": {"host_gb": True},
    "ours, tight": {"host_gb": True, "share": 0.25},
    "ours, bits": {"exact": "bits", "share": 0.25},
    "ours, drafts": {"num_speculative_tokens": 2, "async_sched_mode": "legacy", "share": 0.25},
}


class Form(NamedTuple):
    """Sizes in tokens: the longest context, a block, a step, and what an agent says; and turns."""

    longest: int
    block: int
    chunk: int
    answer: int
    turns: int


class Agent(NamedTuple):
    """An episode: its tokens, and where the prompt and the answer of each turn end."""

    tokens: list[int]
    turns: list[tuple[int, int]]


def agents_of(form: Form, source: Source, seed: int = 0) -> list[Agent]:
    """A group of agents. The first has the longest episode; another begins as an earlier one until one of its turns."""
    dice, found = random.Random(seed), []
    mean = form.longest / form.turns
    for number in range(AGENTS):
        if number:
            before = found[(number - 1) // 2]
            start = before.turns[dice.randrange(1 + len(before.turns) // 4)][0]
            tokens, turns = before.tokens[:start], []
        else:
            tokens, turns = source.tokens(form.longest // 16, seed), []
        longest = form.longest if number == 0 else int(form.longest * dice.uniform(0.5, 1))
        while True:
            tool = round(math.exp(dice.uniform(math.log(mean / 33), math.log(mean * 6.1))))  # 20 to 4,000 of 131,072
            if len(tokens) + tool + form.answer > longest or len(turns) == form.turns:
                break
            both = source.prompt_and_answer(tool, form.answer, dice.randrange(2**31), dice.randrange(2**31))
            turns.append((len(tokens) + tool, len(tokens) + tool + form.answer))
            tokens = tokens + both[0] + both[1]
        found.append(Agent(tokens, turns))
    return found


def blocks_of(agents: list[Agent], block: int) -> int:
    """Blocks of all agents, those that they share once."""
    seen = set()
    for agent in agents:
        key = 0
        for at in range(0, len(agent.tokens), block):
            key = hash((key, *agent.tokens[at : at + block]))
            seen.add(key)
    return len(seen)


# -- log-probs ---------------------------------------------------------------------------------------------------------


def in_float64(model: Any, agents: list[Agent]) -> list[list[float]]:
    """Log-probs of every token of each agent after its first, by a loop over tokens."""
    naive = NaiveHybridModel(model, model.hybrid_config)
    return [
        naive.log_probs(agent.tokens)[:-1].gather(1, torch.tensor(agent.tokens[1:])[:, None])[:, 0].tolist()
        for agent in agents
    ]


@torch.inference_mode()
def in_one_forward(model: Any, agents: list[Agent], form: Form) -> list[list[float]]:
    """The same by megatron's engine, its cache off, in one step of one prompt; a slice of logits at a time."""
    engine = build_upstream_engine(
        model,
        max_sequence_length=form.longest + form.block,
        max_requests=model.config.tensor_model_parallel_size,
        max_tokens=form.longest + form.block,
        block_size_tokens=form.block,
        **kv_budget(model, form.longest // form.block + 8, block_tokens=form.block, max_requests=8),
    )
    found, kept = [], []
    model.decoder.register_forward_hook(lambda module, given, result: kept.append(result))
    for number, agent in enumerate(agents):
        engine.add_request(number, agent.tokens, greedy(1, return_log_probs=False))
        engine.step_modern()
        hidden, tokens = kept[0][: len(agent.tokens) - 1], torch.tensor(agent.tokens[1:], device=kept[0].device)
        slices = zip(hidden.split(1024), tokens.split(1024), strict=True)
        rows = [
            model.output_layer(part, runtime_gather_output=True)[0][:, 0]
            .float()
            .log_softmax(-1)
            .gather(1, own[:, None])
            for part, own in slices
        ]
        found.append(torch.cat(rows)[:, 0].tolist())
        kept.clear()
        print(f"plain forward of {len(agent.tokens):,} tokens", flush=True)
    return found


@contextmanager
def forced(engine: Any, truth: dict[int, list[int]], answers: list[list[int]]) -> Iterator[None]:
    """A context in which requests say what is given; of drafts none, some or all are right."""
    drafts = engine.controller.num_speculative_tokens
    if not drafts:
        with forced_answers(engine, answers):
            yield
        return
    context, sampling = engine.context, engine.controller._sampling
    sample = sampling.sample_speculative

    def sample_and_force(logits: Any, decodes: int, prefills: int, *args: Any, **kwargs: Any) -> Any:
        sampled, wanted = sample(logits, decodes, prefills, *args, **kwargs), []
        rows = slice(context.paused_request_count, context.total_request_count)
        columns = (context.request_ids, context.request_kv_length_offsets, context.request_query_lengths)
        for row, (number, first, count) in enumerate(zip(*(each[rows].tolist() for each in columns), strict=True)):
            next_tokens = (truth[number] + [0] * count)[first + 1 : first + 1 + count]
            wanted += next_tokens if row < decodes else next_tokens[-1:]
        sampled[: len(wanted)] = torch.tensor(wanted, device=sampled.device)
        return sampled

    sampling.sample_speculative = sample_and_force
    with forced_drafts(engine, truth, lambda number, position: (7 * number + position) % (drafts + 1)):
        yield


def built(name: str, model: Any, agents: list[Agent], form: Form) -> Any:
    """An engine of `ENGINES`. Memory of ours is tight: for less than two thirds of what the agents have in the end."""
    own = {field: value for field, value in ENGINES[name].items() if field != "every"}
    drafts = own.get("num_speculative_tokens", 0)
    sizes = {"block_tokens": form.block, "max_requests": AGENTS, "speculative_tokens": drafts}
    roomy, all_blocks = AGENTS * (form.longest // form.block + 2), blocks_of(agents, form.block)
    fields = {
        "max_sequence_length": form.longest + form.block,
        "max_requests": AGENTS,
        "max_tokens": form.chunk,
        "block_size_tokens": form.block,
        "enable_chunked_prefill": True,
    }
    if not name.startswith("ours"):
        if own.get("prefix_caching_mamba_gb"):
            own["prefix_caching_mamba_gb"] = all_blocks * state_bytes(model) / 2**30
        build = build_engine if name == "off" else build_upstream_engine
        return build(model, **fields, **own, **kv_budget(model, roomy, **sizes))
    tight = max(int(all_blocks * own.pop("share", 5 / 8)), form.longest // form.block + AGENTS)
    memory = {"cache_gb": cache_gb_for(model, tight, states=AGENTS, **sizes)}
    if own.get("host_gb"):
        own["host_gb"] = cache_gb_for(model, 2 * all_blocks, states=8 * AGENTS, **sizes)
    memory |= {field: own.pop(field) for field in HybridPrefixConfig.__dataclass_fields__ if field in own}
    return build_engine(model, HybridPrefixConfig(**memory), **fields, **own)


@torch.inference_mode()
def play(engine: Any, agents: list[Agent], every: int = 1, seed: int = 0) -> list[tuple[int, int, list[float]]]:
    """Runs the agents' turns: agent, turn and log-probs of the answer. A tool takes some steps, so that turns overlap or do not.

    With ``every``, each so many turns, of two agents.
    """
    dice, clock, found = random.Random(seed), 0, []
    truth: dict[int, list[int]] = {}
    answers: list[list[int]] = []
    running: dict[int, tuple[int, int]] = {}
    due = {number: 0 for number in range(AGENTS if every == 1 else 2)}
    turn_of = dict.fromkeys(due, 0)
    with forced(engine, truth, answers):
        while due or running:
            if not running:
                clock = max(clock, min(due.values()))
            for number in [number for number, at in due.items() if at <= clock]:
                del due[number]
                prompt_end, answer_end = agents[number].turns[turn_of[number]]
                request, tokens = len(answers), agents[number].tokens[:answer_end]
                truth[request], running[request] = tokens, (number, turn_of[number])
                answers.append(tokens[prompt_end:])
                engine.add_request(request, tokens[:prompt_end], greedy(answer_end - prompt_end))
            for record in engine.step_modern()["finished_request_records"]:
                request = record.merge()
                number, turn = running.pop(request.request_id)
                assert list(request.generated_tokens) == answers[request.request_id], "the answer is not the given one"
                found.append((number, turn, list(request.generated_log_probs)))
                truth[request.request_id] = []
                turn_of[number] += every
                if turn_of[number] < len(agents[number].turns):
                    due[number] = clock + dice.choice((0, 1, 2, 4, 8, 16))
            clock += 1
    return found


# -- the tail ----------------------------------------------------------------------------------------------------------


def tail_of(
    found: list[tuple[int, int, list[float]]], agents: list[Agent], right: list[list[float]], longest: int
) -> dict[str, Any]:
    """Of each bin of positions, and of each of turns: tokens, those above each of `ABOVE` nats, and the largest difference."""
    most_turns = max(len(agent.turns) for agent in agents)
    bins = {
        by: [{"tokens": 0, "above": [0] * len(ABOVE), "largest": 0.0} for _ in range(BINS)]
        for by in ("position", "turn")
    }
    for number, turn, log_probs in found:
        prompt_end, answer_end = agents[number].turns[turn]
        for at, own in zip(range(prompt_end, answer_end), log_probs, strict=True):
            off = abs(own - right[number][at - 1])
            off = off if math.isfinite(off) else 1e9
            for by, place, places in (("position", at, longest), ("turn", turn, most_turns)):
                one = bins[by][min(place * BINS // places, BINS - 1)]
                one["tokens"] += 1
                one["above"] = [count + (off > nats) for count, nats in zip(one["above"], ABOVE, strict=True)]
                one["largest"] = max(one["largest"], off)
    return bins


def worse(own: dict[str, Any], off: dict[str, Any]) -> list[str]:
    """Bins of positions in which a share is above that of caching off by more than chance: one-sided, `LIMIT` over all bins."""
    found = []
    for number, (one, other) in enumerate(zip(own["position"], off["position"], strict=True)):
        for nats, count, others in zip(ABOVE, one["above"], other["above"], strict=True):
            if not count or not other["tokens"]:
                continue
            share, wrong = one["tokens"] / (one["tokens"] + other["tokens"]), count + others
            # Of so many wrong tokens at least so many in this engine, if both have the same share.
            ways = [math.lgamma(wrong + 1) - math.lgamma(k + 1) - math.lgamma(wrong - k + 1) for k in range(wrong + 1)]
            each = (ways[k] + k * math.log(share) + (wrong - k) * math.log1p(-share) for k in range(count, wrong + 1))
            chance = sum(map(math.exp, each))
            if chance < LIMIT / BINS / len(ABOVE):
                found.append(
                    f"bin {number}: {count} of {one['tokens']} above {nats} nats, off {others} of {other['tokens']}"
                )
    return found


def table(tails: dict[str, Any]) -> str:
    """Shares by engine, and of those above 1 nat by position."""
    lines = [
        f"{'':18}{'tokens':>8}"
        + "".join(f"{'> ' + str(nats):>10}" for nats in ABOVE)
        + "   largest  exp(it)   above 1 nat by position, %"
    ]
    for name, bins in tails.items():
        every = bins["position"]
        tokens = sum(one["tokens"] for one in every)
        shares = [sum(one["above"][number] for one in every) / tokens for number in range(len(ABOVE))]
        by_place = " ".join(f"{100 * one['above'][2] / one['tokens']:.2g}" if one["tokens"] else "-" for one in every)
        largest = max(one["largest"] for one in every)
        lines.append(
            f"{name:18}{tokens:8}"
            + "".join(f"{share:10.2%}" for share in shares)
            + f"{largest:10.2e}{math.exp(min(largest, 700)):9.1e}   {by_place}"
        )
    return "\n".join(lines)


def source_of(preset: str, hf: str | None, form: Form) -> Source:
    """A preset is made to remember for long, and computes in chunks that fit into blocks, as megatron's cache with states needs."""
    source = Source(preset, hf)
    if hf is None:
        fields = {"max_sequence_length": form.longest + form.block, "long_memory": True}
        source.config = replace(source.config, chunk_size=min(source.config.chunk_size, form.block), **fields)
    return source


def model_of(source: Source, **fields: Any) -> Any:
    """The model; random weights as trained ones: logits far apart, and states that remember for as long as an episode."""
    model = source.build(**fields)
    if source.folder is None:
        model.output_layer.weight.data.mul_(4)
        for _, layer in recurrent_modules(model):
            layer.A_log.data.sub_(math.log(max(1.0, source.config.max_sequence_length / 4096)))
        invalidate_layers(model)
    return model


def main(args: Any) -> None:
    form = Form(args.longest, args.block, args.chunk, args.answer, args.turns)
    source = source_of(args.preset, args.hf, form)
    agents = agents_of(form, source)
    print(f"{form}; {[(len(agent.tokens), len(agent.turns)) for agent in agents]}", flush=True)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    right = kept(out / "right.json", lambda: in_one_forward(model_of(source), agents, form))
    tails = {}
    for name in args.engines.split("; "):

        def measured(name: str = name) -> dict[str, Any]:
            gc.collect()
            began_s = time.perf_counter()
            model = model_of(source, **(graph_fields(True)[0] if name in ("ours", "ours, host") else {}))
            engine = built(name, model, agents, form)
            found = play(engine, agents, ENGINES[name].get("every", 1))
            stats = getattr(engine.context, "prefix_stats", dict)()
            print(f"{name}: {len(found)} turns, {time.perf_counter() - began_s:.0f} s; {stats}"[:1500], flush=True)
            release_engine(engine)
            return tail_of(found, agents, right, form.longest)

        tails[name] = kept(out / f"{name.replace(', ', '-')}.json", measured)
    print(table(tails))
    for name, tail in tails.items():
        print("\n".join(f"{name}: worse in {line}" for line in worse(tail, tails["off"])) if "off" in tails else "")
    about = {
        "platform": args.platform.describe(),
        "model": source.name,
        "form": form._asdict(),
        "above": ABOVE,
        "tails": tails,
    }
    (out / "tail.json").write_text(json.dumps(about, indent=1))


def kept(path: Path, make: Any) -> Any:
    """What ``make`` returns, or returned in an earlier run."""
    if not path.exists():
        path.write_text(json.dumps(make()))
    return json.loads(path.read_text())


# Longer ones have more than 2**31 values in what a Mamba2 layer projects, which mamba-ssm's kernels do not address: the plain forward has all.
SIZES = (
    {"preset": "hybrid-4b", "longest": 114688, "block": 256, "chunk": 16384}
    if ON_GPU
    else {"preset": "tiny", "longest": 1024, "block": 16, "chunk": 128}
)

if __name__ == "__main__":
    with started(
        __doc__,
        out="out/episodes",
        engines="off; megatron; ours; ours, host",
        tp=1,
        ep=1,
        hf=None,
        answer=8,
        turns=200,
        **SIZES,
        sizes=lambda args: {"tp": args.tp, "ep": args.ep},
    ) as arguments:
        main(arguments)
