"""Bamba: layers of Mamba2 or attention, each with a gated MLP after it. One layer of Hugging Face is two of megatron's."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.mapping import Family, Rule, made_of
from megatron_hybrid_prefix.models.hf.nemotron_h import NORMS, attention_parts, mamba_parts


class Bamba(Family):
    """``BambaForCausalLM``. As in Nemotron-H, the epsilon of the gated norm in megatron's mixer is 1e-5."""

    model_type = "bamba"

    def mismatch(self, config: HybridModelConfig) -> str | None:
        pattern = config.layer_pattern.replace("|", "")
        if set(pattern[::2]) - set("M*") or set(pattern[1::2]) - {"-"} or len(pattern) % 2:
            return f"a layer M or *, then one -, and so on, not layer_pattern={config.layer_pattern!r}"
        if config.activation != "swiglu" or config.rotary_base is None:
            return f"swiglu and rotary_base, not {config.activation!r} and rotary_base={config.rotary_base}"
        if config.attention_output_gate or config.qk_norm or config.float32_norms:
            return "neither attention_output_gate nor qk_norm nor float32_norms"
        return None

    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        hidden, vocabulary = (config.hidden_size,), (config.vocab_size, config.hidden_size)
        yield made_of("embedding.word_embeddings.weight", {"model.embed_tokens.weight": vocabulary})
        pattern = config.layer_pattern.replace("|", "")
        parts = {"M": ("mamba.", mamba_parts(config)), "*": ("self_attn.", attention_parts(config))}
        for number, symbol in enumerate(pattern[::2]):
            theirs = f"model.layers.{number}."
            ours = f"decoder.layers.{2 * number}."
            for target in NORMS[symbol]:
                yield made_of(ours + target, {f"{theirs}input_layernorm.weight": hidden})
            prefix, mixer = parts[symbol]
            for target, (sources, order) in mixer.items():
                yield made_of(ours + target, {theirs + prefix + name: shape for name, shape in sources.items()}, order)
            ours = f"decoder.layers.{2 * number + 1}."
            for target in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
                yield made_of(ours + target, {f"{theirs}pre_ff_layernorm.weight": hidden})
            width = config.ffn_hidden_size
            gate_and_up = {f"{theirs}feed_forward.{part}_proj.weight": (width, *hidden) for part in ("gate", "up")}
            yield made_of(f"{ours}mlp.linear_fc1.weight", gate_and_up)
            yield made_of(f"{ours}mlp.linear_fc2.weight", {f"{theirs}feed_forward.down_proj.weight": (*hidden, width)})
        yield made_of("decoder.final_norm.weight", {"model.final_layernorm.weight": hidden})
        yield made_of("output_layer.weight", {"lm_head.weight": vocabulary})
