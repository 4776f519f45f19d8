"""Bamba: layers of Mamba2 or attention, each with a gated MLP after it. One layer of Hugging Face is two of megatron's."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.mapping import Family, Rule, Source
from megatron_hybrid_prefix.models.hf.nemotron_h import attention_parts, mamba_parts

# Megatron's names of a layer's first norm: with local layers, and where Transformer Engine fuses it.
_NORMS = {
    "M": ("norm.weight", "mixer.in_proj.layer_norm_weight"),
    "*": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
}


class Bamba(Family):
    """``BambaForCausalLM``. As in Nemotron-H, the epsilon of the gated norm in megatron's mixer is 1e-5."""

    model_type = "bamba"

    def mismatch(self, config: HybridModelConfig) -> str | None:
        """See Family."""
        pattern = config.layer_pattern.replace("|", "")
        if set(pattern[::2]) - set("M*") or set(pattern[1::2]) - {"-"} or len(pattern) % 2:
            return f"a layer M or *, then one -, and so on, not layer_pattern={config.layer_pattern!r}"
        if config.activation != "swiglu" or config.rotary_base is None:
            return f"swiglu and rotary_base, not {config.activation!r} and rotary_base={config.rotary_base}"
        if config.attention_output_gate or config.qk_norm or config.float32_norms:
            return "neither attention_output_gate nor qk_norm nor float32_norms"
        return None

    def canonical(self, name: str) -> str | None:
        """See Family."""
        return name

    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        """See Family."""
        hidden, vocabulary = (config.hidden_size,), (config.vocab_size, config.hidden_size)
        yield _copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocabulary)
        pattern = config.layer_pattern.replace("|", "")
        parts = {"M": ("mamba.", mamba_parts(config)), "*": ("self_attn.", attention_parts(config))}
        for number, symbol in enumerate(pattern[::2]):
            theirs = f"model.layers.{number}."
            ours = f"decoder.layers.{2 * number}."
            for target in _NORMS[symbol]:
                yield _copy(ours + target, f"{theirs}input_layernorm.weight", hidden)
            prefix, mixer = parts[symbol]
            for target, (sources, order) in mixer.items():
                made_of = tuple(Source(name=theirs + prefix + name, shape=shape) for name, shape in sources.items())
                yield Rule(target=ours + target, sources=made_of, order=order)
            ours = f"decoder.layers.{2 * number + 1}."
            for target in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
                yield _copy(ours + target, f"{theirs}pre_ff_layernorm.weight", hidden)
            width = config.ffn_hidden_size
            gate_and_up = tuple(
                Source(name=f"{theirs}feed_forward.{part}_proj.weight", shape=(width, *hidden))
                for part in ("gate", "up")
            )
            yield Rule(target=f"{ours}mlp.linear_fc1.weight", sources=gate_and_up)
            yield _copy(f"{ours}mlp.linear_fc2.weight", f"{theirs}feed_forward.down_proj.weight", (*hidden, width))
        yield _copy("decoder.final_norm.weight", "model.final_layernorm.weight", hidden)
        yield _copy("output_layer.weight", "lm_head.weight", vocabulary)


def _copy(target: str, source: str, shape: tuple[int, ...]) -> Rule:
    return Rule(target=target, sources=(Source(name=source, shape=shape),))
