"""Qwen3.5, 3.6 and 3.8: Qwen3-Next's layers, but the projection into Gated DeltaNet is four tensors, part by part as megatron's."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.qwen3_next import Qwen3Next


class Qwen35(Qwen3Next):
    """``Qwen3_5ForCausalLM`` with an MLP in each layer, and the language model of ``Qwen3_5ForConditionalGeneration``."""

    model_type, feed_forward = "qwen3_5_text", "-"

    def mismatch(self, config: HybridModelConfig) -> str | None:
        if config.layer_pattern.count(self.feed_forward) * 2 != config.num_layers:
            return f"a layer {self.feed_forward} after each other one, not layer_pattern={config.layer_pattern!r}"
        return super().mismatch(config)

    def canonical(self, name: str) -> str | None:
        """A model with images has a vision tower, which is left out, and a prefix before the names of its language model."""
        name = name.replace("model.language_model.", "model.", 1)
        return None if name.startswith("model.visual.") else super().canonical(name)

    def in_proj(self, config: HybridModelConfig) -> tuple[dict[str, int], torch.Tensor | None]:
        heads, keys = config.gdn_num_value_heads, config.gdn_num_key_heads * config.gdn_key_head_dim
        values = heads * config.gdn_value_head_dim
        rows = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        return rows, None


class Qwen35Moe(Qwen35):
    """``Qwen3_5MoeForCausalLM`` with experts in each layer, and likewise."""

    model_type, feed_forward = "qwen3_5_moe_text", "E"
