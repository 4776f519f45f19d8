"""Qwen3.5, 3.6 and 3.8: Qwen3-Next's layers. The projection into Gated DeltaNet is four tensors, part by part as in megatron."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.family import register_family
from megatron_hybrid_prefix.models.hf.given import Given
from megatron_hybrid_prefix.models.hf.parts import Parts
from megatron_hybrid_prefix.models.hf.qwen3_next import Qwen3Next


class Qwen35(Qwen3Next):
    """``Qwen3_5ForCausalLM``: an MLP in each layer. Also the language model of ``Qwen3_5ForConditionalGeneration``.

    Attributes:
        unlike: Values of Qwen3-Next's ``config.json`` that this one has not.
    """

    model_types = ("qwen3_5_text", "qwen3_5")
    architecture = "Qwen3_5ForCausalLM"
    kv_heads = 4
    unlike: ClassVar[dict[str, Any]] = {"num_experts": 0}

    def dimensions(self, given: Given) -> HybridModelConfig:
        # Not in transformers' classes; published files have them, and other engines read them.
        given.only("attn_output_gate", True)
        given.only("output_gate_type", "swish", "silu")
        return super().dimensions(Given({**given.data, **self.unlike}, given.name))

    def config_json(self, config: HybridModelConfig) -> dict[str, Any]:
        data = super().config_json(config)
        return {name: value for name, value in data.items() if name not in self.unlike}

    def canonical(self, name: str) -> str | None:
        """A model with images has another prefix, and a vision tower, which is left out."""
        if name.startswith("model.visual."):
            return None
        return super().canonical(name.replace("model.language_model.", "model.", 1))

    def delta_net_parts(self, config: HybridModelConfig) -> Parts:
        hidden, heads = config.hidden_size, config.gdn_num_value_heads
        keys, values = config.gdn_num_key_heads * config.gdn_key_head_dim, heads * config.gdn_value_head_dim
        rows = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        projections = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
        return super().delta_net_parts(config) | {"self_attention.in_proj.weight": (projections, None)}


class Qwen35Moe(Qwen35):
    """``Qwen3_5MoeForCausalLM``: experts in each layer. Also the language model of ``Qwen3_5MoeForConditionalGeneration``."""

    model_types = ("qwen3_5_moe_text", "qwen3_5_moe")
    architecture = "Qwen3_5MoeForCausalLM"
    kv_heads = 2
    unlike: ClassVar[dict[str, Any]] = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}

    def dimensions(self, given: Given) -> HybridModelConfig:
        if not given.whole("num_experts"):
            raise given.error("num_experts is 0: every layer has experts")
        width = {"intermediate_size": given.whole("moe_intermediate_size")}  # of an MLP, which no layer has
        return super().dimensions(Given({**given.data, **width}, given.name))


register_family(Qwen35())
register_family(Qwen35Moe())
