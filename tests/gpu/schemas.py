"""Tokens a second of answers without a schema, of one schema of ten fields, and of as many different ones, in turns, in one process::

    python -m tests.gpu.schemas [--preset hybrid-4b] [--rows 32] [--tokens 256] [--rounds 7]

The first round warms up, and compiles. ``--preset tiny --device cpu --rows 4 --tokens 20 --rounds 2`` tries the script.
"""

from __future__ import annotations

import random
import statistics
import time

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.sampling import SamplingOptions
from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer
from tests.gpu.measure import engine_fields, graph_fields, report, started, synchronize
from tests.harness.engine_helpers import greedy, run_to_end
from tests.harness.grammar_walks import record


class Words(ByteTokenizer):
    """Tokens above 257 are made-up words, half of them after a blank."""

    def token_bytes(self, token, before=None):
        letters = bytes(97 + token // 26**at % 26 for at in range(4))
        return super().token_bytes(token) if token < 258 else b" " * (token % 2) + letters


def schema(number):
    """Records of ten fields, more than an answer has."""
    kinds = {"type": "string"}, {"type": "integer"}, {"enum": ["one", "two"]}, {"type": ["boolean", "null"]}
    fields = record({f"field_{number}_{at}": kinds[at % 4] for at in range(10)}, 10)
    return {"json": {"type": "array", "items": fields, "minItems": 500}}


@torch.inference_mode()
def tokens_per_s(engine, dice, wanted, tokens):
    for number, each in enumerate(wanted):
        params = greedy(tokens, termination_id=257, return_log_probs=False)
        vars(params).update(SamplingOptions(structured_outputs=each).as_fields())
        engine.add_request(number, [dice.randrange(258) for _ in range(16)], params)
    synchronize()
    start_s, finished = time.perf_counter(), {}
    run_to_end(engine, finished)
    return sum(len(request.generated_tokens) for request in finished.values()) / (time.perf_counter() - start_s)


def main(args) -> None:
    of_model, of_engine = graph_fields(True)
    model, dice = build_hybrid_model(args.preset, seed=0, **of_model), random.Random(0)
    fields = engine_fields(model, args.tokens + 64, prompts=2 * args.rows, requests=args.rows) | of_engine
    engine = build_engine(model, HybridPrefixConfig(), tokenizer=Words(model.hybrid_config.vocab_size), **fields)
    wanted = {"none": [None], "one": [schema(0)], "different": list(map(schema, range(args.rows)))}
    found = {name: [] for name in wanted}
    for _ in range(args.rounds):
        for name in dice.sample([*wanted], len(wanted)):
            each = wanted[name] * (args.rows // len(wanted[name]))
            found[name].append(tokens_per_s(engine, random.Random(0), each, args.tokens))
    medians = {name: statistics.median(values[1:]) for name, values in found.items()}
    report(args, medians | {f"{name} of none": medians[name] / medians["none"] for name in wanted})


if __name__ == "__main__":
    with started(__doc__, preset="hybrid-4b", rows=32, tokens=256, rounds=7) as arguments:
        main(arguments)
