"""Where megatron keeps the names that this package replaces (``platform/patches.py``, ``mcore/entrypoints/patches.py``)."""

_CORE = "megatron.core"
_INFERENCE = f"{_CORE}.inference"
_CONTROLLERS = f"{_INFERENCE}.text_generation_controllers.text_generation_controller"

ATTENTION = f"{_CORE}.transformer.attention"
CAUSAL_CONV1D = f"{_CORE}.ssm.ops.causal_conv1d_varlen"
COMMUNICATION = f"{_INFERENCE}.communication_utils"
CONTROLLER = _CONTROLLERS
CONTROLLER_CLASS = f"{_CONTROLLERS}:TextGenerationController"
CUDA_GRAPHS = f"{_CORE}.transformer.cuda_graphs"
DYNAMIC_CONTEXT = f"{_INFERENCE}.contexts.dynamic_context"
DYNAMIC_CONTEXT_CLASS = f"{DYNAMIC_CONTEXT}:DynamicInferenceContext"
DYNAMIC_ENGINE_CLASS = f"{_INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine"
FUSED_SOFTMAX = f"{_CORE}.fusions.fused_softmax"
GATED_DELTA_NET = f"{_CORE}.ssm.gated_delta_net.gdn"
GATED_DELTA_NET_BASE = f"{_CORE}.ssm.gated_delta_net.common"
HYBRID_BLOCK = f"{_CORE}.models.hybrid.hybrid_block"
MAMBA_MIXER = f"{_CORE}.ssm.mamba_mixer"
RANDOM = f"{_CORE}.tensor_parallel.random"
ROWS_OF_A_STEP = MAMBA_MIXER
"""What moves decoded and prefilled rows of a step apart and together."""
TOKEN_DISPATCHER = f"{_CORE}.transformer.moe.token_dispatcher"
