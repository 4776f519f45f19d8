"""Megatron's modules and classes with names that ``platform/patches.py`` and ``mcore/entrypoints/install.py`` replace."""

from megatron_hybrid_prefix.upstream.capabilities import form_of

_CORE = "megatron.core"
_INFERENCE = f"{_CORE}.inference"

ATTENTION = f"{_CORE}.transformer.attention"
ATTENTION_CLASS = f"{ATTENTION}:Attention"
_OPS = f"{_CORE}.ssm.ops"
_HAS_KINDS = form_of("recurrent kernels") == "by kind"
COMMON_KERNELS = f"{_OPS}.common" if _HAS_KINDS else _OPS
"""The package of the kernels that recurrent layers of several kinds have in common."""
CAUSAL_CONV1D = f"{COMMON_KERNELS}.causal_conv1d_varlen"
SSD_KERNELS = f"{_OPS}.mamba2" if _HAS_KINDS else _OPS
"""The package of the kernels of Mamba2's chunked scan."""
COMMUNICATION = f"{_INFERENCE}.communication_utils"
CONTROLLER = f"{_INFERENCE}.text_generation_controllers.text_generation_controller"
CONTROLLER_CLASS = f"{CONTROLLER}:TextGenerationController"
CUDA_GRAPHS = f"{_CORE}.transformer.cuda_graphs"
DRAFTING = f"{_CORE}.transformer.multi_token_prediction"
DYNAMIC_CONTEXT = f"{_INFERENCE}.contexts.dynamic_context"
DYNAMIC_CONTEXT_CLASS = f"{DYNAMIC_CONTEXT}:DynamicInferenceContext"
DYNAMIC_ENGINE = f"{_INFERENCE}.engines.dynamic_engine"
DYNAMIC_ENGINE_CLASS = f"{DYNAMIC_ENGINE}:DynamicInferenceEngine"
FUSED_SOFTMAX = f"{_CORE}.fusions.fused_softmax"
GATED_DELTA_NET = f"{_CORE}.ssm.gated_delta_net.gdn"
GATED_DELTA_NET_BASE = f"{_CORE}.ssm.gated_delta_net.common"
GATED_DELTA_PRODUCT = f"{_CORE}.ssm.gated_delta_product"
HYBRID_BLOCK = f"{_CORE}.models.hybrid.hybrid_block"
MAMBA_MIXER = f"{_CORE}.ssm.mamba_mixer"
MOE_UTILS = f"{_CORE}.transformer.moe.moe_utils"
RANDOM = f"{_CORE}.tensor_parallel.random"
ROWS_OF_A_STEP = f"{_CORE}.ssm.ssm_inference" if form_of("steps of recurrent layers") == "shared" else MAMBA_MIXER
"""Has the functions that split and merge the decoded and prefilled rows of a step."""
STATE_CONFIG_CLASS = f"{_INFERENCE}.config:MambaInferenceStateConfig"
TOKEN_DISPATCHER = f"{_CORE}.transformer.moe.token_dispatcher"
