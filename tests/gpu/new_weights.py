"""New weights under captured CUDA graphs. Usage: ``new_weights.py PRESET OUT.json``.

An engine answers, its decay rates (``A_log``) change in place, it is told or notices, and it answers again by the same graphs. Compared with a
new engine without graphs that has these weights. Also with what the layers had derived from the old ones put back: graphs read that.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.runner import release_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.graphs import answers_of, count_steps, write
from tests.gpu.models import layers_for
from tests.harness.engine_helpers import cache_gb_for, greedy, random_tokens, run_to_end
from tests.harness.named_models import named

NEW_TOKENS = 24
PROMPTS = (300, 70)  # tokens
SIZES = {"block_tokens": 256, "max_requests": 16}


class Run:
    """A model of its own, and an engine."""

    def __init__(self, preset, *, graphs, mode):
        self.config = named(preset)
        fields = layers_for(self.config) | {"cuda_graph_impl": "local" if graphs else "none"}
        self.model = build_hybrid_model(self.config, seed=0, **fields)
        self.sent = 0
        self.engine = build_engine(
            self.model,
            HybridPrefixConfig(cache_gb=cache_gb_for(self.model, 64, states=32, **SIZES)),
            max_sequence_length=2048,
            max_requests=SIZES["max_requests"],
            async_sched_mode=mode,
            **({"num_cuda_graphs": 8} if graphs else {}),
        )
        self.counts = count_steps(self.engine.context)

    def answers(self):
        """Tokens and log-probs of two requests together, what they reused, and how many decodes replayed graphs."""
        finished, before = {}, dict(self.counts)
        with torch.inference_mode():
            for number, count in enumerate(PROMPTS):
                prompt = random_tokens(count, seed=number, vocabulary=self.config.vocab_size)
                self.engine.add_request(self.sent, prompt, greedy(NEW_TOKENS))
                self.sent += 1
            run_to_end(self.engine, finished)
        return answers_of(finished, {name: count - before[name] for name, count in self.counts.items()})

    def derived(self):
        """What Mamba2 layers derive from their weights: a tensor each."""
        return [module._A_neg_exp_cache for module in self.model.modules() if hasattr(module, "_A_neg_exp_cache")]

    def change(self):
        """Other decay rates, in place."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if name.endswith("A_log"):
                    weight.add_(1.0)


def find(preset):
    fresh = Run(preset, graphs=False, mode="legacy")
    fresh.change()
    found = {"fresh": fresh.answers()}
    for mode in ("legacy", "async"):
        run = Run(preset, graphs=True, mode=mode)
        found[f"{mode}_old"] = run.answers()
        before = [each.clone() for each in run.derived()]
        run.change()
        if mode == "legacy":  # else the engine notices
            run.engine.invalidate()
        found[f"{mode}_new"] = run.answers()
        if before:
            with torch.inference_mode():
                for each, old in zip(run.derived(), before, strict=True):
                    each.copy_(old)
            run.engine.context.invalidate()  # the cache alone
            found[f"{mode}_stale"] = run.answers()
        run.engine.suspend()
        run.engine.resume()
        found[f"{mode}_resumed"] = run.answers()
        release_engine(run.engine)
    return found


if __name__ == "__main__":
    write(find, __doc__)
