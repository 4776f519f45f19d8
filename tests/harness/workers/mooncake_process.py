"""An engine on a Mooncake Store that answers some prompts and ends, as JSON. Usage: ``mooncake_process.py OUT.json URL SEED...``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform
from tests.harness.lifecycle_helpers import EngineHarness, tokens
from tests.harness.limits import HANG_S


def main(out, url, *seeds):
    ensure_platform(device="cpu")
    model = build_hybrid_model("tiny", seed=0)
    served = EngineHarness(model, slots=6, blocks=20, host_gb=0.01, max_requests=2, shared=url)
    answers = []
    for seed in map(int, seeds):
        answer = served.send(tokens(4, 9, seed=seed))
        found = {"tokens": list(map(int, answer.generated_tokens)), "log_probs": list(answer.generated_log_probs)}
        answers.append(found | {"cached": answer.num_cached_tokens})
    assert served.context.host_moves.drain(HANG_S)
    stats = served.context.prefix_stats()
    found = {"answers": answers, "fallbacks": stats.fallbacks, "faults": stats.tiers["shared"].faults}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
