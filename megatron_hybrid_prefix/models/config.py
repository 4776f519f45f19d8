"""Dimensions of a hybrid model, and the presets. No torch, no megatron."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

LAYER_SYMBOLS = {"M": "Mamba2", "G": "Gated DeltaNet", "*": "attention", "-": "MLP", "E": "mixture of experts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridModelConfig:
    """Dimensions of a hybrid model, before it is sharded.

    Attributes:
        layer_pattern: One symbol a layer: ``M`` Mamba2, ``G`` Gated DeltaNet, ``*`` attention, ``-`` MLP, ``E`` mixture of
            experts; ``|`` may mark pipeline stages.
        hidden_size: Width of the residual stream.
        vocab_size: Number of token ids.
        max_sequence_length: Longest prompt plus output, in tokens.
        mamba_num_heads: SSM heads of an ``M`` layer; d_inner is heads x head_dim.
        mamba_head_dim: Channels of an SSM head.
        mamba_state_dim: State size of a channel (N).
        mamba_num_groups: Groups that share B and C.
        gdp_num_householder: Pairs of key and value of a token in ``M`` layers, which are Gated Delta Product layers then, with
            ``mamba_`` dimensions; 0: they are Mamba2.
        gdn_num_key_heads: Query and key heads of a ``G`` layer.
        gdn_num_value_heads: Its value heads, each with a matrix as state; those that share a key head are neighbours.
        gdn_key_head_dim: Channels of a query and a key head (K).
        gdn_value_head_dim: Channels of a value head (V).
        gdn_beta_scale: How much of its value a token writes (beta) is a sigmoid times this; 2 allows negative eigenvalues.
        d_conv: Taps of the causal convolution in ``M`` and ``G`` layers.
        chunk_size: Tokens in a chunk of the SSD scan (a power of two).
        num_attention_heads: Query heads.
        num_query_groups: Key/value heads.
        kv_channels: Channels of an attention head.
        ffn_hidden_size: Width of an MLP layer; of an expert, too, unless ``moe_ffn_hidden_size`` says another.
        activation: "relu2" (squared ReLU), "gelu", or "swiglu" (gated).
        rotary_base: Base of rotary embeddings; None for no position embedding (Nemotron-H).
        rotary_fraction: Part of each head's channels that rotary embeddings turn, the first ones.
        yarn_factor: YaRN (arXiv 2309.00071): slow rotations are this many times slower, above 1; None: no YaRN.
        yarn_original_length: Tokens that the model was trained for before YaRN; 0: no YaRN.
        yarn_beta_fast: Channels that turn more often than this within that length are left as they are.
        yarn_beta_slow: Those that turn less often get the whole factor; between the two it grows.
        yarn_attention_factor: Cosines and sines of rotary embeddings are multiplied by it; the paper has 0.1 x ln(yarn_factor) + 1.
        yarn_truncate: Round the first and the last of the channels between the two to whole ones, outwards.
        attention_output_gate: Multiply the output of each attention head by the sigmoid of a projection of its input.
        qk_norm: RMS norm of each query and each key head before its rotary embedding.
        attention_post_norm: As OLMo 2: attention layers, and MLP layers behind them, normalise their output, not their input; the
            norms of ``qk_norm`` are of all heads of a token together.
        attention_multiplier: Queries times keys are multiplied by it before the softmax; None: by 1 / sqrt(kv_channels).
        embedding_multiplier: The embeddings of tokens are multiplied by it.
        residual_multiplier: The output of every layer is multiplied by it before the residual is added.
        logits_scaling: The logits are divided by it.
        layernorm_epsilon: Epsilon of the RMS norms.
        gated_norm_epsilon: That of the norm inside of ``G`` layers; None: ``layernorm_epsilon``.
        dtype: Parameters' dtype: "float32" or "bfloat16".
        float32_norms: Keep the weights of RMS norms in float32 whatever ``dtype`` is. For families whose norms multiply by
            1 + weight: bfloat16 would round the sum to 8 bits, and the weight alone is small. Not with Transformer Engine.
        state_dtype: Dtype of the recurrent layers' matrix states where an engine is not told another: "float32" or
            "bfloat16"; None: the layer kind's choice.
        tie_embeddings: Share the embedding with the output layer.
        long_memory: Initialise A, dt and the convolution so that both state components matter for hundreds of
            tokens; a model that forgets cannot tell a right state from a wrong one.
        num_moe_experts: Experts of an ``E`` layer.
        moe_router_topk: Experts that each token goes through, 2 or more; their weights are a softmax over these experts' scores
            (Hugging Face: ``norm_topk_prob=True``), or see ``moe_router_score``.
        moe_router_score: "softmax", or "sigmoid": a sigmoid of each score; the choice adds a bias of each expert, a buffer of
            the model; the weights of the chosen experts are their sigmoids over the sum of these.
        moe_router_groups: Groups that the experts of a layer are in; a token's experts are of ``moe_router_topk_groups`` of
            them, those with the largest sum of their best moe_router_topk / moe_router_topk_groups experts. 0: no groups.
        moe_router_topk_groups: See ``moe_router_groups``.
        moe_router_scaling: The experts' weights are multiplied by it.
        moe_ffn_hidden_size: Width of an expert; 0: that of an MLP layer.
        moe_latent_size: Channels that a token has in the experts that the router chooses, after one projection and before
            another; 0: those of the residual stream. Router and shared expert read the latter.
        moe_shared_expert_intermediate_size: Width of the expert that every token goes through, too; 0: there is none.
        moe_shared_expert_gate: Multiply the shared expert's output by the sigmoid of a learned score of the token.
        mtp_num_layers: Depths of multi-token prediction: so many tokens can be drafted for speculative decoding.
        mtp_layer_pattern: Layers of one depth, in the same symbols.
        mtp_use_repeated_layer: All depths have the same weights, so that more tokens than ``mtp_num_layers`` may be drafted.
    """

    layer_pattern: str
    hidden_size: int
    vocab_size: int
    max_sequence_length: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state_dim: int = 0
    mamba_num_groups: int = 0
    gdp_num_householder: int = 0
    gdn_num_key_heads: int = 0
    gdn_num_value_heads: int = 0
    gdn_key_head_dim: int = 0
    gdn_value_head_dim: int = 0
    gdn_beta_scale: float = 1.0
    d_conv: int = 4
    chunk_size: int = 128
    activation: str = "relu2"
    rotary_base: int | None = None
    rotary_fraction: float = 1.0
    yarn_factor: float | None = None
    yarn_original_length: int = 0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_attention_factor: float = 1.0
    yarn_truncate: bool = True
    attention_output_gate: bool = False
    qk_norm: bool = False
    attention_post_norm: bool = False
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    layernorm_epsilon: float = 1e-5
    gated_norm_epsilon: float | None = None
    dtype: str = "bfloat16"
    float32_norms: bool = False
    state_dtype: str | None = None
    tie_embeddings: bool = False
    long_memory: bool = False
    num_moe_experts: int = 0
    moe_router_topk: int = 2
    moe_router_score: str = "softmax"
    moe_router_groups: int = 0
    moe_router_topk_groups: int = 0
    moe_router_scaling: float = 1.0
    moe_ffn_hidden_size: int = 0
    moe_latent_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    mtp_num_layers: int = 0
    mtp_layer_pattern: str = ""
    mtp_use_repeated_layer: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.layer_pattern) - set(LAYER_SYMBOLS) - {"|"}
        if unknown or not self.layer_pattern.strip("|"):
            raise ValueError(
                f"layer_pattern={self.layer_pattern!r}: use the symbols M, G, *, - and E (and | between stages)"
            )
        if "*" not in self.layer_pattern:
            raise ValueError(f"layer_pattern={self.layer_pattern!r} has no attention layer; the engine needs one")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: use 'float32' or 'bfloat16'")
        if self.state_dtype not in ("float32", "bfloat16", None):
            raise ValueError(f"state_dtype={self.state_dtype!r}: use 'float32', 'bfloat16' or None")
        if self.activation not in ("relu2", "gelu", "swiglu"):
            raise ValueError(f"activation={self.activation!r}: use 'relu2', 'gelu' or 'swiglu'")
        if self.chunk_size < 1 or self.chunk_size & (self.chunk_size - 1):
            raise ValueError(f"chunk_size={self.chunk_size}: must be a power of two")
        if set(self.mtp_layer_pattern) - set(LAYER_SYMBOLS) or bool(self.mtp_layer_pattern) != (
            self.mtp_num_layers > 0
        ):
            raise ValueError(
                f"mtp_layer_pattern={self.mtp_layer_pattern!r}, mtp_num_layers={self.mtp_num_layers}: "
                "give both, the pattern in the symbols M, *, - and E, or neither"
            )
        if self.mtp_use_repeated_layer and not self.mtp_num_layers:
            raise ValueError("mtp_use_repeated_layer=True needs mtp_num_layers")
        self._check_dimensions()
        if self.has_experts and not 2 <= self.moe_router_topk <= self.num_moe_experts:
            raise ValueError(
                f"E layers need moe_router_topk={self.moe_router_topk} from 2 to num_moe_experts={self.num_moe_experts}"
            )
        self._check_router()
        if self.moe_shared_expert_gate and not self.moe_shared_expert_intermediate_size:
            raise ValueError("moe_shared_expert_gate=True needs moe_shared_expert_intermediate_size")
        self._check_recurrent_layers()
        self._check_rotary()
        if not 2 <= self.d_conv <= 4:
            raise ValueError(f"d_conv={self.d_conv}: megatron's decode kernel supports 2, 3 and 4 taps")
        for name, by in (
            *([("mamba_num_heads", "mamba_num_groups")] if "M" in self.symbols else []),
            *([("gdn_num_value_heads", "gdn_num_key_heads")] if "G" in self.symbols else []),
            ("num_attention_heads", "num_query_groups"),
        ):
            value, divisor = getattr(self, name), getattr(self, by)
            if value % divisor:
                raise ValueError(f"{name}={value} is not a multiple of {by}={divisor}")

    def _check_dimensions(self) -> None:
        used = ["hidden_size", "vocab_size", "max_sequence_length"]
        used += ["num_attention_heads", "num_query_groups", "kv_channels", *self._ffn_names()]
        for name in used:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in (
            *("num_moe_experts", "moe_ffn_hidden_size", "moe_latent_size", "moe_shared_expert_intermediate_size"),
            *("gdp_num_householder", "mtp_num_layers"),
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")
        multipliers = (
            "attention_multiplier",
            "embedding_multiplier",
            "residual_multiplier",
            "logits_scaling",
            "gdn_beta_scale",
        )
        for name in ("layernorm_epsilon", "gated_norm_epsilon", *multipliers):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value}: must be above 0")

    def _ffn_names(self) -> list[str]:
        """Fields with the width of the MLP layers and experts that there are."""
        names = ["ffn_hidden_size"] if "-" in self.symbols else []
        if self.has_experts:
            names.append("moe_ffn_hidden_size" if self.moe_ffn_hidden_size else "ffn_hidden_size")
        return names

    def _check_recurrent_layers(self) -> None:
        for symbol, prefix in (("M", "mamba_"), ("G", "gdn_")):
            if symbol in self.symbols:
                for name in (field.name for field in fields(self) if field.name.startswith(prefix)):
                    if getattr(self, name) < 1:
                        raise ValueError(f"{symbol} layers need {name}={getattr(self, name)} to be at least 1")
        if "G" in self.layer_pattern and self.activation != "swiglu":
            raise ValueError(
                f"activation={self.activation!r}: with G layers use 'swiglu'; megatron's have the SiLU of the whole model"
            )
        if self.attention_post_norm and self.symbols - set("G*-") | set(self.mtp_layer_pattern):
            raise ValueError("attention_post_norm=True: only with G, * and - layers, and without mtp_layer_pattern")
        if "G" in self.mtp_layer_pattern:
            raise ValueError(f"mtp_layer_pattern={self.mtp_layer_pattern!r}: G layers cannot predict drafts")

    def _check_router(self) -> None:
        if self.moe_router_score not in ("softmax", "sigmoid"):
            raise ValueError(f"moe_router_score={self.moe_router_score!r}: use 'softmax' or 'sigmoid'")
        groups, chosen = self.moe_router_groups, self.moe_router_topk_groups
        if not (groups or chosen):
            return
        if groups < 1 or self.num_moe_experts % groups or not 1 <= chosen <= groups or self.moe_router_topk % chosen:
            raise ValueError(
                f"moe_router_groups={groups} must divide num_moe_experts={self.num_moe_experts}, and moe_router_topk_groups="
                f"{chosen} must be from 1 to that and divide moe_router_topk={self.moe_router_topk}"
            )

    def _check_rotary(self) -> None:
        if self.rotary_base is not None and self.rotary_base < 1:
            raise ValueError(f"rotary_base={self.rotary_base}: must be at least 1, or None for no position embedding")
        if self.rotary_base is None and self.rotary_fraction != 1.0:
            raise ValueError(f"rotary_fraction={self.rotary_fraction} needs rotary_base")
        turned = self.rotary_fraction * self.kv_channels
        if not 0 < self.rotary_fraction <= 1 or (self.rotary_base is not None and turned % 2):
            raise ValueError(
                f"rotary_fraction={self.rotary_fraction} of kv_channels={self.kv_channels}: "
                f"must be an even number of channels, from 2 to all"
            )
        if (self.yarn_factor is None) != (self.yarn_original_length < 1):
            raise ValueError(
                f"yarn_factor={self.yarn_factor} and yarn_original_length={self.yarn_original_length}: give both or neither"
            )
        if self.yarn_factor is not None:
            self._check_yarn(self.yarn_factor)

    def _check_yarn(self, factor: float) -> None:
        if self.rotary_base is None or self.rotary_base < 2:
            raise ValueError(f"yarn_factor={factor} needs rotary_base={self.rotary_base} to be at least 2")
        if not 1 < factor < float("inf"):
            raise ValueError(f"yarn_factor={factor}: must be above 1, or None for no YaRN")
        if not 0 < self.yarn_attention_factor < float("inf"):
            raise ValueError(f"yarn_attention_factor={self.yarn_attention_factor}: must be above 0")
        if not 0 < self.yarn_beta_slow <= self.yarn_beta_fast < float("inf"):
            raise ValueError(
                f"yarn_beta_slow={self.yarn_beta_slow} must be above 0, and at most yarn_beta_fast={self.yarn_beta_fast}"
            )

    @property
    def layers(self) -> str:
        """``layer_pattern`` without marks of stages."""
        return self.layer_pattern.replace("|", "")

    @property
    def num_layers(self) -> int:
        """Layers of every kind."""
        return len(self.layers)

    def normalises_output(self, number: int) -> bool:
        """Whether the layer of this number, from 0, has its norm behind it (``attention_post_norm``)."""
        return self.attention_post_norm and (self.layers[number] == "*" or self.layers[: number + 1].endswith("*-"))

    def count(self, symbol: str) -> int:
        """Number of layers with this symbol."""
        return self.layer_pattern.count(symbol)

    @property
    def symbols(self) -> frozenset[str]:
        """Symbols of the layers that there are, those of multi-token prediction included."""
        return frozenset(self.layer_pattern + self.mtp_layer_pattern) - {"|"}

    @property
    def has_experts(self) -> bool:
        """Whether a layer is a mixture of experts."""
        return "E" in self.symbols

    @property
    def mtp_heads(self) -> int:
        """Depths of multi-token prediction that have weights of their own."""
        return 1 if self.mtp_use_repeated_layer else self.mtp_num_layers

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    def check_parallel(self, *, tp: int, pp: int, ep: int = 1, etp: int | None = None) -> str:
        """Return the pattern cut into ``pp`` stages. ``etp`` divides each expert; None: ``tp``.

        Raises:
            ValueError: A size is below 1, a dimension of the layers that there are does not divide by ``tp``, ``ep`` or
                ``etp``, or a stage would have no attention layer.
        """
        etp = tp if etp is None else etp
        for name, size in (("tp", tp), ("pp", pp), ("ep", ep)):
            if size < 1:
                raise ValueError(f"{name}={size}: must be at least 1")
        if ep > 1 and not self.has_experts:
            raise ValueError(f"ep={ep} needs E layers; layer_pattern={self.layer_pattern!r} has none")
        if self.has_experts and self.num_moe_experts % ep:
            raise ValueError(f"ep={ep} does not divide num_moe_experts={self.num_moe_experts}")
        for name in (
            *(("mamba_num_groups", "mamba_num_heads") if "M" in self.symbols else ()),
            *(("gdn_num_key_heads", "gdn_num_value_heads") if "G" in self.symbols else ()),
            *("num_attention_heads", "vocab_size"),
            *(("ffn_hidden_size",) if "-" in self.symbols else ()),
            *(("moe_shared_expert_intermediate_size",) if self.has_experts else ()),
        ):
            if getattr(self, name) % tp:
                raise ValueError(f"tp={tp} does not divide {name}={getattr(self, name)}")
        if self.has_experts and self.expert_ffn_hidden_size % etp:
            name = "moe_ffn_hidden_size" if self.moe_ffn_hidden_size else "ffn_hidden_size"
            raise ValueError(f"{'tp' if etp == tp else 'etp'}={etp} does not divide {name}={getattr(self, name)}")
        if self.num_query_groups % tp and tp % self.num_query_groups:
            raise ValueError(f"tp={tp} is neither a divisor nor a multiple of num_query_groups={self.num_query_groups}")
        if self.attention_post_norm and self.num_query_groups % tp:
            raise ValueError(f"tp={tp} does not divide num_query_groups={self.num_query_groups} (attention_post_norm)")
        if pp > 1 and self.tie_embeddings:
            raise ValueError("tied embeddings with pp > 1 are not supported")
        return split_into_stages(self.layer_pattern, pp)


def split_into_stages(layer_pattern: str, pp: int) -> str:
    """Put ``|`` between ``pp`` stages of similar length, each with an attention layer.

    Raises:
        ValueError: Not every stage can have an attention layer (megatron's context needs one on every stage).
    """
    if "|" in layer_pattern:
        stages = layer_pattern.split("|")
        if len(stages) != pp:
            raise ValueError(f"layer_pattern={layer_pattern!r} has {len(stages)} stages, but pp={pp}")
        if any("*" not in stage for stage in stages):
            raise ValueError(f"layer_pattern={layer_pattern!r}: every pipeline stage needs an attention layer")
        return layer_pattern
    attention = [i for i, symbol in enumerate(layer_pattern) if symbol == "*"]
    if pp > len(attention):
        raise ValueError(
            f"pp={pp} is impossible: every pipeline stage needs an attention layer, the model has {len(attention)}"
        )
    # Cut nearest to equal lengths, but after the attention layer that the stage needs and before the last ones.
    cuts: list[int] = []
    for stage in range(1, pp):
        even = round(stage * len(layer_pattern) / pp)
        lowest = attention[stage - 1] + 1
        if cuts:
            lowest = max(lowest, next(a for a in attention if a >= cuts[-1]) + 1)
        highest = attention[len(attention) - (pp - stage)]
        cuts.append(min(max(even, lowest), highest))
    bounds = [0, *cuts, len(layer_pattern)]
    return "|".join(layer_pattern[a:b] for a, b in pairwise(bounds))


# A laptop CPU builds it in well under a second; every dimension divides by tp=4, two stages have attention.
_TINY = HybridModelConfig(
    layer_pattern="M*-M*-",
    hidden_size=64,
    vocab_size=512,
    max_sequence_length=16896,
    mamba_num_heads=8,
    mamba_head_dim=16,
    mamba_state_dim=16,
    mamba_num_groups=4,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    ffn_hidden_size=128,
    dtype="float32",
    long_memory=True,
)

_SMALL = HybridModelConfig(
    layer_pattern="M-M-M*-M-M-M*-M-M-",
    hidden_size=1024,
    vocab_size=32768,
    max_sequence_length=65536,
    mamba_num_heads=32,
    mamba_head_dim=64,
    mamba_state_dim=128,
    mamba_num_groups=8,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=64,
    ffn_hidden_size=4096,
)

# The 4.1B hybrid of the published figures: 13 Mamba2, 3 attention, 13 MLP layers.
_HYBRID_4B = HybridModelConfig(
    layer_pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-",
    hidden_size=4096,
    vocab_size=32768,
    max_sequence_length=65536,
    mamba_num_heads=128,
    mamba_head_dim=64,
    mamba_state_dim=128,
    mamba_num_groups=8,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=21504,
)

# True dimensions of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B; the weights are random, as of all presets.
_NEMOTRON_3_NANO = replace(
    _HYBRID_4B,
    layer_pattern="MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME",
    hidden_size=2688,
    vocab_size=131072,
    max_sequence_length=262144,
    mamba_num_heads=64,
    num_query_groups=2,
    ffn_hidden_size=1856,
    state_dtype="float32",
    num_moe_experts=128,
    moe_router_topk=6,
    moe_router_score="sigmoid",
    moe_router_scaling=2.5,
    moe_ffn_hidden_size=1856,
    moe_shared_expert_intermediate_size=3712,
)

# Those of Qwen/Qwen3.5-27B: three value heads share a key head.
_QWEN3_5_27B = HybridModelConfig(
    layer_pattern="G-G-G-*-" * 16,
    hidden_size=5120,
    vocab_size=248320,
    max_sequence_length=262144,
    gdn_num_key_heads=16,
    gdn_num_value_heads=48,
    gdn_key_head_dim=128,
    gdn_value_head_dim=128,
    num_attention_heads=24,
    num_query_groups=4,
    kv_channels=256,
    ffn_hidden_size=17408,
    activation="swiglu",
    rotary_base=10_000_000,
    rotary_fraction=0.25,
    attention_output_gate=True,
    qk_norm=True,
    layernorm_epsilon=1e-6,
    float32_norms=True,
)

# Those of Qwen/Qwen3-Next-80B-A3B.
_QWEN3_NEXT_80B = replace(
    _QWEN3_5_27B,
    layer_pattern="GEGEGE*E" * 12,
    hidden_size=2048,
    vocab_size=151936,
    gdn_num_value_heads=32,
    num_attention_heads=16,
    num_query_groups=2,
    ffn_hidden_size=5120,
    num_moe_experts=512,
    moe_router_topk=10,
    moe_ffn_hidden_size=512,
    moe_shared_expert_intermediate_size=512,
    moe_shared_expert_gate=True,
)

PRESETS: dict[str, HybridModelConfig] = {
    "tiny": _TINY,
    "tiny-mtp": replace(_TINY, mtp_num_layers=3, mtp_layer_pattern="*-"),
    "tiny-moe": replace(_TINY, layer_pattern="M*EM*E", num_moe_experts=4),
    "tiny-gdn": replace(
        _TINY,
        layer_pattern="G*-G*-",
        gdn_num_key_heads=4,
        gdn_num_value_heads=8,
        gdn_key_head_dim=16,
        gdn_value_head_dim=16,
        activation="swiglu",
    ),
    "tiny-qwen3-next": replace(
        _QWEN3_NEXT_80B,
        layer_pattern="GEGEGE*E",
        hidden_size=64,
        vocab_size=512,
        max_sequence_length=16896,
        gdn_num_key_heads=4,
        gdn_num_value_heads=8,
        gdn_key_head_dim=16,
        gdn_value_head_dim=16,
        num_attention_heads=4,
        kv_channels=16,
        ffn_hidden_size=128,
        dtype="float32",
        long_memory=True,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "tiny-nemotron-3": replace(
        _TINY,
        layer_pattern="MEM*EM*E",
        state_dtype="float32",
        num_moe_experts=16,
        moe_router_topk=4,
        moe_router_score="sigmoid",
        moe_router_scaling=2.5,
        moe_ffn_hidden_size=48,
        moe_latent_size=32,
        moe_shared_expert_intermediate_size=96,
        mtp_num_layers=1,
        mtp_layer_pattern="*E",
        mtp_use_repeated_layer=True,
    ),
    "small": _SMALL,
    "small-gdn": replace(
        _SMALL,
        layer_pattern=_SMALL.layer_pattern.replace("M", "G"),
        gdn_num_key_heads=8,
        gdn_num_value_heads=16,
        gdn_key_head_dim=128,
        gdn_value_head_dim=128,
        ffn_hidden_size=2816,
        activation="swiglu",
    ),
    "hybrid-4b": _HYBRID_4B,
    # The same with Gated DeltaNet in place of Mamba2, at the same inner width: 4.2B parameters.
    "gdn-4b": replace(
        _HYBRID_4B,
        layer_pattern=_HYBRID_4B.layer_pattern.replace("M", "G"),
        gdn_num_key_heads=16,
        gdn_num_value_heads=64,
        gdn_key_head_dim=128,
        gdn_value_head_dim=128,
        ffn_hidden_size=14336,
        activation="swiglu",
    ),
    # Those of nvidia/Nemotron-H-8B-Base-8K.
    "nemotron-h-8b": replace(
        _HYBRID_4B, layer_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", vocab_size=131072
    ),
    "nemotron-3-nano-30b-a3b": _NEMOTRON_3_NANO,
    # Those of nvidia/NVIDIA-Nemotron-3-Super-120B-A12B, with latent experts and a repeated head for drafts.
    "nemotron-3-super-120b-a12b": replace(
        _NEMOTRON_3_NANO,
        layer_pattern="MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME",
        hidden_size=4096,
        mamba_num_heads=128,
        ffn_hidden_size=2688,
        num_moe_experts=512,
        moe_router_topk=22,
        moe_router_scaling=5.0,
        moe_ffn_hidden_size=2688,
        moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376,
        mtp_num_layers=1,
        mtp_layer_pattern="*E",
        mtp_use_repeated_layer=True,
    ),
    # Those of ibm-granite/granite-4.0-h-small (32B, 9B of them active).
    "granite-4.0-h-small": replace(
        _HYBRID_4B,
        layer_pattern="ME" * 5 + ("*E" + "ME" * 9) * 3 + "*E" + "ME" * 4,
        vocab_size=100352,
        max_sequence_length=131072,
        mamba_num_groups=1,
        ffn_hidden_size=768,
        activation="swiglu",
        attention_multiplier=0.0078125,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=16.0,
        tie_embeddings=True,
        num_moe_experts=72,
        moe_router_topk=10,
        moe_ffn_hidden_size=768,
        moe_shared_expert_intermediate_size=1536,
    ),
    # Those of transformers' `OlmoHybridConfig`.
    "olmo-hybrid-7b": HybridModelConfig(
        layer_pattern="G-G-G-*-" * 8,
        hidden_size=3840,
        vocab_size=100352,
        max_sequence_length=65536,
        gdn_num_key_heads=30,
        gdn_num_value_heads=30,
        gdn_key_head_dim=96,
        gdn_value_head_dim=192,
        gdn_beta_scale=2.0,
        num_attention_heads=30,
        num_query_groups=30,
        kv_channels=128,
        ffn_hidden_size=11008,
        activation="swiglu",
        qk_norm=True,
        attention_post_norm=True,
        layernorm_epsilon=1e-6,
        gated_norm_epsilon=1e-5,
    ),
    "qwen3-next-80b-a3b": _QWEN3_NEXT_80B,
    "qwen3.5-27b": _QWEN3_5_27B,
    # Those of Qwen/Qwen3.5-35B-A3B.
    "qwen3.5-35b-a3b": replace(
        _QWEN3_NEXT_80B,
        layer_pattern="GEGEGE*E" * 10,
        vocab_size=248320,
        ffn_hidden_size=512,
        num_moe_experts=256,
        moe_router_topk=8,
    ),
}


def get_preset(name: str, **changes: Any) -> HybridModelConfig:
    """A preset, with some dimensions changed. Raises ValueError if no preset has this name."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are: {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes)
