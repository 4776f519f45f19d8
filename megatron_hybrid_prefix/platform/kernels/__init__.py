"""Plain-PyTorch stand-ins for the Triton and flash-attn kernels on megatron-core 0.19's dynamic inference path.

One module per group of kernels. Each function has the parameter names, order, defaults and side effects of the upstream
function that it replaces. The modules import torch only; ``platform/patches.py`` decides what is replaced, and when.

| module | replaces |
|---|---|
| `ssd` | `megatron.core.ssm.ops.ssd_combined` |
| `conv` | `megatron.core.ssm.ops.causal_conv1d_{varlen,triton}`, `causal_conv1d.causal_conv1d_varlen` |
| `decode` | `megatron.core.ssm.ops.mamba_ssm` |
| `attention`, `attention_cuda`, both called through `flash_attn_calls` | `flash_attn` |
| `kv_append` | `megatron.core.inference.contexts.fused_kv_append_kernel` |
| `extraction` | `megatron.core.ssm.ops.intermediate_extraction` |
| `rows` | `megatron.core.inference.contexts.attention_context.triton.tensor_ops` |
| `speculative` | `megatron.core.inference.text_generation_controllers.mtp_utils_triton` |
"""
