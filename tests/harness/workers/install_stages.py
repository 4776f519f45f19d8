"""A script in megatron's words over two pipeline stages, with `install`. Usage: ``torchrun install_stages.py OUT.json PATTERN``."""

from __future__ import annotations

import sys

from megatron_hybrid_prefix import HybridPrefixConfig, install, uninstall
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.engine.test_install import BLOCK, CONFIG, ENGINE, TOKENS, skipped
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.launch import write_findings


def answers(pattern, platform):
    """What a stage was told, its class of context, answers to two equal prompts, and blocks that were skipped."""
    preset = "tiny-gdn" if "G" in pattern else "tiny"
    model = build_hybrid_model(get_preset(preset, layer_pattern=pattern), seed=0, platform=platform)
    config = CONFIG(model)
    state = config.mamba_inference_state_config
    engine = ENGINE(model, config)
    return {
        "described": None if state is None else type(state).__name__,
        "context": type(engine.context).__name__,
        "answers": TOKENS(engine),
        "skipped_blocks": skipped(engine) // BLOCK,
    }


def main(out, pattern):
    platform = ensure_platform(tp=1, pp=2, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    install(HybridPrefixConfig(mamba_gb=0.01))
    found = {pattern: answers(pattern, platform), "*-|*-": answers("*-|*-", platform)}
    uninstall()
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
