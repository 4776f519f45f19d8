"""Answers of a ``GPTModel`` in one layout, as JSON. Usage: ``torchrun gpt_model.py OUT.json NAME``."""

from __future__ import annotations

import sys

import torch.distributed as dist

from megatron_hybrid_prefix import HybridPrefixConfig, install, uninstall
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.engine.test_install import BLOCK, CONFIG, ENGINE, TOKENS, skipped
from tests.harness.gpt_model import as_gpt_model
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.launch import DEVICE, write_findings
from tests.harness.workers.prefix_parallel import drawn_on_cpu
from tests.harness.workers.qwen3_next import answers

# Sizes, preset, layers. Stages are halves; one has no recurrent layers.
LAYOUTS = {
    "tp2": ({"tp": 2}, "tiny-gdn", "G-*-G-*-"),
    "pp2": ({"pp": 2}, "tiny-gdn", "G-*-|G-*-"),
    "pp2-plain": ({"pp": 2}, "tiny-gdn", "*-*-|G-*-"),
    "ep2": ({"ep": 2}, "tiny-qwen3-next", "GEGEGE*E"),
}


def hybrid_model(name, platform, pp=1):
    """The ``HybridModel``, in float32: Transformer Engine's layers would multiply in TF32."""
    _, preset, pattern = LAYOUTS[name]
    config = get_preset(preset, layer_pattern=pattern if pp > 1 else pattern.replace("|", ""))
    return drawn_on_cpu(build_hybrid_model(config, seed=0, platform=platform, transformer_impl="local"))


def by_install(model):
    """What a script in megatron's words gets: its context, answers to two equal prompts, and blocks that were skipped."""
    install(HybridPrefixConfig(mamba_gb=0.01))
    engine = ENGINE(model, CONFIG(model))
    found = {"context": type(engine.context).__name__, "answers": TOKENS(engine)}
    uninstall()
    return found | {"skipped_blocks": skipped(engine) // BLOCK}


def main(out, name):
    sizes = LAYOUTS[name][0]
    platform = ensure_platform(device=DEVICE, timeout_s=COLLECTIVE_HANG_S[DEVICE], **sizes)
    model = as_gpt_model(hybrid_model(name, platform, sizes.get("pp", 1)))
    found = {"answers": answers(model), "install": by_install(model)}
    found["damaged"] = answers(model, damaged=dist.get_rank() == dist.get_world_size() - 1)
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
