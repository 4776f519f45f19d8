"""Qwen3.5, 3.6 and 3.8: Qwen3-Next's layers. The projection into Gated DeltaNet is four tensors, part by part as in megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.family import register_family
from megatron_hybrid_prefix.models.hf.given import Given
from megatron_hybrid_prefix.models.hf.mapping import Rule, made_of
from megatron_hybrid_prefix.models.hf.qwen3_next import Qwen3Next


class Qwen35(Qwen3Next):
    """``Qwen3_5ForCausalLM``: an MLP in each layer. Also the language model of ``Qwen3_5ForConditionalGeneration``.

    Attributes:
        absent: Names of Qwen3-Next's ``config.json`` that transformers' class has not: it reads none of them.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5")
    architecture = "Qwen3_5ForCausalLM"
    kv_heads: ClassVar[int | None] = 4
    absent: ClassVar[frozenset[str]] = frozenset(
        {
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
            *("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"),
        }
    )

    def dimensions(self, given: Given) -> HybridModelConfig:
        # Not in transformers' classes; published files have them, and other engines read them.
        given.only("attn_output_gate", True)
        given.only("output_gate_type", "swish", "silu")
        return super().dimensions(Given({**self._present(given.data), **self._instead(given)}, given.name))

    def _instead(self, given: Given) -> dict[str, Any]:
        """What Qwen3-Next's file says of the same model by absent names."""
        return {"num_experts": 0}

    def config_json(self, config: HybridModelConfig) -> dict[str, Any]:
        return self._present(super().config_json(config))

    def _present(self, data: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in data.items() if name not in self.absent}

    def canonical(self, name: str) -> str | None:
        """A model with images has another prefix, and a vision tower, which is left out."""
        if name.startswith("model.visual."):
            return None
        return super().canonical(name.replace("model.language_model.", "model.", 1))

    def in_proj(self, config: HybridModelConfig, keys: int, values: int) -> Rule:
        heads = config.gdn_num_value_heads
        rows = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        sources = {f"{name}.weight": (count, config.hidden_size) for name, count in rows.items()}
        return made_of("self_attention.in_proj.weight", sources)


class Qwen35Moe(Qwen35):
    """``Qwen3_5MoeForCausalLM``: experts in each layer. Also the language model of ``Qwen3_5MoeForConditionalGeneration``."""

    model_types = ("qwen3_5_moe_text", "qwen3_5_moe")
    architecture = "Qwen3_5MoeForCausalLM"
    kv_heads = 2
    absent = frozenset({"intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"})

    def _instead(self, given: Given) -> dict[str, Any]:
        if not given.whole("num_experts"):
            raise given.error("num_experts is 0: every layer has experts")
        return {"intermediate_size": given.whole("moe_intermediate_size")}  # of an MLP, which no layer has


register_family(Qwen35())
register_family(Qwen35Moe())
