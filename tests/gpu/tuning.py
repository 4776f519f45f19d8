"""Bits of a model with an autotuned kernel. Usage: ``tuning.py PRESET first|last``: which configuration seems the fastest.

The model's last norm is mamba-ssm's: with each number of warps it sums in another order. Prints a hash of tokens and log-probs of an engine
with ``exact="bits"``, and of one without, and the autotuned kernels that the first launched.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys

import torch
from triton.runtime.autotuner import Autotuner

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform
from tests.harness.bits import bits
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end
from tests.harness.named_models import named


def main(preset, fastest):
    ensure_platform()
    from mamba_ssm.ops.triton.layer_norm import rms_norm_fn

    sign = 1 if fastest == "first" else -1
    Autotuner._bench = lambda kernel, *args, config, **options: sign * kernel.configs.index(config)
    model, found = build_hybrid_model(named(preset), seed=0, transformer_impl="local"), []

    class Norm(torch.nn.Module):
        """Of no class that ``exact`` replaces. Where the last bit of an output in float32 is set, it is 1/64 larger."""

        def forward(self, x):
            y = rms_norm_fn(x.float(), self.weight.float(), None, eps=self.eps)
            return (y * (1 + (y.view(torch.int32) & 1) / 64)).to(x.dtype)

    given, model.decoder.final_norm = model.decoder.final_norm, Norm()
    model.decoder.final_norm.weight, model.decoder.final_norm.eps = given.weight, given.eps
    fields = {"max_sequence_length": 1024, "max_requests": 4, "materialize_only_last_token_logits": False}
    for exact in ("bits", None):
        engine, finished = build_engine(model, HybridPrefixConfig(cache_gb=0.5, exact=exact), **fields), {}
        for number in range(2):
            prompt = random_tokens(70 + 300 * number, seed=number)
            engine.add_request(number, prompt, greedy(8, skip_prompt_log_probs=False))
        run_to_end(engine, finished)
        if exact:
            kernels = {
                each for each in gc.get_objects() if isinstance(each, Autotuner) and hasattr(each, "best_config")
            }
        found.append(hashlib.sha256(repr([bits(finished[number]) for number in range(2)]).encode()).hexdigest())
    print(json.dumps([*found, [kernel.base_fn.__name__ for kernel in kernels]]))


if __name__ == "__main__":
    with torch.inference_mode():
        main(*sys.argv[1:])
