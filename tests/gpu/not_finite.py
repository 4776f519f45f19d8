"""One bad embedding among good requests, on this machine's GPU: earlier tokens keep their bits, and others their answers.

    python -m tests.gpu.launch not_finite.py PRESET

The token's embedding is NaN, infinite or 1e38 in a prompt; then NaN where it is sampled. Sampled and greedy rows, both schedulings.
"""

from __future__ import annotations

import random

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from tests.gpu.measure import BLOCK_TOKENS, FirstTokens, engine_fields, graph_fields, started
from tests.gpu.models import built
from tests.harness.engine_helpers import cache_gb_for, greedy, run_to_end

BAD = 66
TOKENS = 3 * BLOCK_TOKENS + 70
PLACES = (0, 63, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 100, TOKENS - 2)
VALUES = (float("nan"), float("inf"), 1e38)


def earlier_bits(engine, weight, prompt):
    """Logits of all tokens before each place are equal bit by bit, with a good embedding there and with a bad one."""
    controller, tokens, found = engine.controller, FirstTokens(), []
    launched = controller.forward_launched
    controller.forward_launched = lambda: (found.append(controller.step_logits[0, :TOKENS].clone()), launched())
    failed = []
    for place in PLACES:
        asked = [*prompt[:place], BAD, *prompt[place + 1 :]]
        good = weight[BAD].clone()
        for value in (None, *VALUES):
            if value is not None:
                weight[BAD] = value
            engine.invalidate()  # the cache has what a good embedding gave
            request = tokens.send(engine, asked, count=1)[1]
            failed.append(request.failed())
            rows, found[:] = found[0], []
            if value is None:
                right = rows
                assert right.isfinite().all() and not request.failed()
            else:
                if (
                    engine.controller.inference_wrapped_model.model.config.num_moe_experts
                ):  # how many rows an expert gets differs
                    torch.testing.assert_close(rows[:place], right[:place], rtol=1e-3, atol=1e-3)
                else:
                    assert torch.equal(rows[:place], right[:place]), (place, value)
                assert value == 1e38 or request.failed(), (place, value)
        weight[BAD] = good
    del controller.forward_launched
    print(f"{len(PLACES)} places: earlier rows are equal bit by bit; failed {sum(failed)} of {len(failed)}", flush=True)


def among_others(engine, weight, prompt, mode):
    """One of six requests has a bad token; then the greedy answer of one reaches one."""
    good, finished, numbers = weight[BAD].clone(), {}, iter(range(1000, 2000))
    prompts = [[*prompt, number + 1] for number in range(6)]

    def ask(prompts, count=12, **fields):
        asked = [next(numbers) for _ in prompts]
        for number, each in zip(asked, prompts, strict=True):
            engine.add_request(number, each, greedy(count, **fields))
        run_to_end(engine, finished)
        return [finished[number] for number in asked]

    right = ask(prompts)
    for fields in ({}, {"top_k": 0, "temperature": 1.0}, {"top_k": 0, "top_p": 0.9}):
        weight[BAD] = float("nan")
        spoilt = [[*prompt[:-9], BAD, *prompt[-8:], 1], *prompts[1:]]
        answers = ask(spoilt, **fields)
        weight[BAD] = good
        assert [each.failed() for each in answers] == [True, *[False] * 5]
        assert all(len(each.generated_tokens) == 12 for each in answers[1:])
        assert all(torch.tensor(each.generated_log_probs).isfinite().all() for each in answers[1:])
        if not fields:
            off = [
                abs(a.generated_log_probs[0] - b.generated_log_probs[0])
                for a, b in zip(answers[1:], right[1:], strict=True)
            ]
            assert max(off) < 0.25, off
    token = right[0].generated_tokens[4]
    kept = weight[token].clone()
    weight[token] = float("nan")
    (answer,) = ask(prompts[:1])
    weight[token] = kept
    assert answer.failed() or token not in answer.generated_tokens[:-1]
    (after,) = ask(prompts[:1])
    assert not after.failed() and len(after.generated_tokens) == 12
    engine.context.check_integrity()
    print(f"{mode}: one of six failed, each time; {engine.context.prefix_stats().fallbacks}", flush=True)


def main(args):
    model = built(args.preset)
    weight, dice = model.embedding.word_embeddings.weight.data, random.Random(0)
    prompt = [
        dice.choice([token for token in range(model.hybrid_config.vocab_size) if token != BAD]) for _ in range(TOKENS)
    ]
    fields = engine_fields(model, TOKENS, prompts=12, requests=8)
    sizes = {"block_tokens": BLOCK_TOKENS, "max_requests": fields["max_requests"]}
    prefix = HybridPrefixConfig(cache_gb=cache_gb_for(model, 80, states=24, **sizes), check_weights=False)
    earlier_bits(build_engine(model, prefix, **fields, materialize_only_last_token_logits=False), weight, prompt)
    for mode in ("legacy", "async"):
        made, graphs = graph_fields(model.hybrid_config.dtype == "bfloat16")
        model = built(args.preset, **made)  # graphs are those of one engine
        engine = build_engine(model, prefix, **fields, **graphs, async_sched_mode=mode)
        among_others(engine, model.embedding.word_embeddings.weight.data, prompt, mode)


if __name__ == "__main__":
    with started(__doc__, "preset") as arguments:
        main(arguments)
