"""Every name that a platform replaces, and why. No other module of the package replaces names for a platform.

Each group but the last three applies only if the part is missing:
  * `HOST_*`                  no CUDA device: ``torch.cuda`` describes the CPU, pinning is skipped, kernels are PyTorch.
  * `HOST_IMPORT`             likewise, only while megatron is imported. What it decorated then stays as it is.
  * `HOST_TRAINING`           likewise, once megatron.training is imported.
  * `CUDA_IMPORT`             a CUDA device: ``torch.compile``, only while megatron is imported. What it decorated then is compiled when
                              it is called.
  * `MAMBA_PARTS`             mamba-ssm or causal-conv1d missing or too old: the parts that dynamic inference uses.
  * `MAMBA_TRAINING`          mamba-ssm, causal-conv1d or their compiled extensions missing: the mixer trains, and predicts drafts,
                              with PyTorch.
  * `NO_MAMBA_SSM`            no mamba-ssm: the mixer can be built; static batching raises an error that says what to install.
  * `NO_FLA`                  no flash-linear-attention: Gated DeltaNet layers can be built, and train with PyTorch.
  * `GDP_PARTS`               either of the two: likewise, of Gated Delta Product layers, where megatron has them.
  * `*GATHERING_ATTENTION`    no flash-attention of any generation: on a CPU attention gathers the pages, on a GPU a kernel reads them.
  * `NO_TRANSFORMER_ENGINE`   no Transformer Engine, or no CUDA device for it: what upstream calls of it whatever the layers are.
  * `TRAINING`                always: megatron.training compares its flags with the process groups that run.
  * `AUTOTUNERS`              an engine with ``exact="bits"``: no kernel of its steps is chosen by timing.
Placeholders replace compiled modules that mamba-ssm and causal-conv1d import and that the dynamic path never calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch

from megatron_hybrid_prefix.ops.invariant import scope
from megatron_hybrid_prefix.ops.triton_or_torch import triton
from megatron_hybrid_prefix.platform import cpu as host
from megatron_hybrid_prefix.platform.sizes import check_sizes
from megatron_hybrid_prefix.upstream import modules
from megatron_hybrid_prefix.upstream.rebinding import Applied, Placeholder, Rebinding, apply

# On a GPU only: the CPU uses nothing of these packages.
COMPILED_EXTENSIONS = (
    Placeholder(name="selective_scan_cuda", package="mamba_ssm", why="loaded on import; the dynamic path is Triton"),
    Placeholder(name="causal_conv1d_cuda", package="causal_conv1d", why="loaded on import; the dynamic path is Triton"),
)

# On a GPU only, too. Its ``__init__`` imports its models, transformers and cutlass, seconds that megatron has no use for: it uses two
# modules of kernels. Whatever else is asked of the package runs it.
LATE_PACKAGE = "mamba_ssm"


def _replace_by(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _kernel(module: str, name: str) -> Callable[[Any], Any]:
    """The PyTorch version, imported when the replacement is applied."""

    def make(original: Any) -> Any:
        from importlib import import_module

        return getattr(import_module(f"megatron_hybrid_prefix.platform.kernels.{module}"), name)

    return make


def _alike(owner: str, name: str, make: Callable[[Any], Any], why: str, *, may_be_absent: bool = False) -> Rebinding:
    return Rebinding(owner, name, make, why, same_signature=True, may_be_absent=may_be_absent)


def _cuda(name: str, value: Any, why: str, owner: str = "torch.cuda") -> Rebinding:
    def make(original: Any) -> Any:
        # torch.compile keeps one rule per function object of torch: every name needs its own object.
        if isinstance(value, FunctionType):
            return FunctionType(value.__code__, value.__globals__, name, value.__defaults__, value.__closure__)
        return value

    return Rebinding(owner, name, make, why)


HOST_TORCH = (
    _cuda(
        "is_available", host.false, "there may be GPUs that are not used: packages look at them while they are imported"
    ),
    _cuda("current_device", host.current_device, "upstream passes it as device=; raises without a driver"),
    _cuda("set_device", host.do_nothing, "one device"),
    _cuda("synchronize", host.do_nothing, "host work is synchronous"),
    _cuda("reset_peak_memory_stats", host.do_nothing, "no caching allocator"),
    _cuda("is_current_stream_capturing", host.false, "no CUDA graphs"),
    _cuda("mem_get_info", host.mem_get_info, "budgets are checked against host memory"),
    _cuda("memory_stats", host.memory_stats, "the engine logs allocator counters each step"),
    _cuda("Stream", host.HostStream, "copy streams"),
    _cuda("Event", host.HostEvent, "step timing and fences"),
    _cuda("current_stream", host.current_stream, "fences"),
    _cuda("default_stream", host.current_stream, "fences"),
    _cuda("stream", host.no_context, "copy streams"),
    _cuda("device", host.NoDevice, "kernel launches select a device"),
    _cuda("get_rng_state", host.get_rng_state, "model-parallel seeds fork the generator"),
    _cuda("set_rng_state", host.set_rng_state, "model-parallel seeds fork the generator"),
    _cuda("manual_seed", host.manual_seed, "model-parallel seeds"),
    _cuda("manual_seed_all", host.manual_seed, "model-parallel seeds"),
    _cuda("initial_seed", host.initial_seed, "model-parallel seeds"),
    _cuda("default_generators", host.DEFAULT_GENERATORS, "model-parallel seeds"),
    _cuda("_lazy_call", host.lazy_call, "deferred until CUDA starts, which never happens"),
    _cuda("get_rng_state", host.get_rng_state, "model-parallel seeds fork the generator", owner="torch.cuda.random"),
    _cuda("set_rng_state", host.set_rng_state, "model-parallel seeds fork the generator", owner="torch.cuda.random"),
    Rebinding("torch:Tensor", "cuda", _replace_by(host.same_tensor), "everything is on the host"),
    Rebinding("torch:Tensor", "pin_memory", _replace_by(host.same_tensor), "pinning needs a driver"),
    Rebinding("torch.nn:Module", "cuda", _replace_by(host.same_module), "everything is on the host"),
    _cuda("range_push", host.do_nothing, "a CPU build of torch has no NVTX", owner="torch.cuda.nvtx"),
    _cuda("range_pop", host.do_nothing, "a CPU build of torch has no NVTX", owner="torch.cuda.nvtx"),
)

HOST_IMPORT = (
    Rebinding(
        "torch",
        "compile",
        _replace_by(host.compile_nothing),
        "megatron's fused functions: decorating imports all of inductor; the first call takes 20 s and a C++ compiler",
    ),
)


def _when_called(compile_now: Callable[..., Any]) -> Any:
    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Inside of another compiled function it is a part of that; in an exact step it runs as it is written.
            return (model if torch.compiler.is_compiling() or scope.is_on() else compiled())(*args, **kwargs)

        return call

    return compile_later


CUDA_IMPORT = (
    Rebinding(
        "torch",
        "compile",
        _when_called,
        "megatron's fused functions: decorating imports all of inductor, and few models call one",
    ),
)


def _accept_any_device(original: Any) -> Any:
    def _is_cuda(tensor: Any) -> None:
        assert tensor is not None

    return _is_cuda


def _triton(owner: str, name: str, module: str, *, may_be_absent: bool = False) -> Rebinding:
    return _alike(owner, name, _kernel(module, name), "a Triton kernel", may_be_absent=may_be_absent)


def _gated_norm(original: Any) -> Any:
    from megatron_hybrid_prefix.platform.gated_norm import GatedRMSNorm

    return GatedRMSNorm


def _packing_is_supported(original: Any) -> Any:
    def _check_mamba_sequence_packing_support(for_inference_not_training: bool = True) -> tuple[bool, str | None]:
        return (True, None) if for_inference_not_training else original(for_inference_not_training)

    return _check_mamba_sequence_packing_support


MAMBA_PARTS = (
    Rebinding(modules.MAMBA_MIXER, "ExtendedRMSNorm", _gated_norm, "derives from mamba-ssm's norm"),
    Rebinding(
        modules.MAMBA_MIXER,
        "causal_conv1d_varlen_states",
        _kernel("conv", "causal_conv1d_varlen_states"),
        "of causal-conv1d; megatron's own prefill calls it",
        same_signature=True,
        may_be_absent=True,
    ),
    _alike(
        modules.MAMBA_MIXER,
        "_check_mamba_sequence_packing_support",
        _packing_is_supported,
        "checks versions of mamba-ssm and causal-conv1d, whose parts are replaced",
    ),
)
MAMBA_TRAINING = (
    Rebinding(
        modules.MAMBA_MIXER,
        "mamba_split_conv1d_scan_combined",
        _kernel("training", "mamba_split_conv1d_scan_combined"),
        "training calls it, and it calls compiled extensions; this one is differentiable PyTorch, for small models",
    ),
    Rebinding(
        modules.MAMBA_MIXER,
        "causal_conv1d_fn",
        _replace_by(None),
        "a compiled extension, called by layers that predict drafts; megatron uses PyTorch where it is None",
    ),
)
NO_MAMBA_SSM = (
    Rebinding(modules.MAMBA_MIXER, "HAVE_MAMBA_SSM", _replace_by(True), "the mixer's constructor requires mamba-ssm"),
    Rebinding(
        modules.MAMBA_MIXER,
        "mamba_chunk_scan_combined",
        _kernel("training", "mamba_chunk_scan_combined"),
        "layers that predict drafts call it; static batching gets a clear error",
    ),
)


_TRAINS = "training calls it; this one is differentiable PyTorch, for small models"
NO_FLA = (
    Rebinding(
        modules.GATED_DELTA_NET_BASE,
        "HAVE_FLA",
        _replace_by(True),
        "the layer's constructor asks for flash-linear-attention",
    ),
    Rebinding(
        modules.GATED_DELTA_NET,
        "chunk_gated_delta_rule",
        lambda original: sys.modules[modules.GATED_DELTA_NET].torch_chunk_gated_delta_rule,
        "megatron has it in PyTorch, too",
    ),
    Rebinding(modules.GATED_DELTA_NET, "causal_conv1d", _kernel("training", "causal_conv1d"), _TRAINS),
    Rebinding(modules.GATED_DELTA_NET_BASE, "l2norm", _kernel("training", "l2norm"), _TRAINS),
)


GDP_PARTS = tuple(
    Rebinding(modules.GATED_DELTA_PRODUCT, name, make, "construction and training ask for it", may_be_absent=True)
    for name, make in (
        ("HAVE_FLA", _replace_by(True)),
        ("HAVE_MAMBA_SSM", _replace_by(True)),
        ("ExtendedRMSNorm", _gated_norm),
        ("check_fla_sequence_packing_support", _replace_by(lambda: (True, None))),  # the last one refuses it
        ("causal_conv1d_fn", _replace_by(None)),  # megatron then uses PyTorch
        ("l2_norm", _kernel("training", "l2norm")),
        ("chunk_gated_delta_product", _kernel("training", "chunk_gated_delta_product")),
    )
)


def _not_compiled(original: Any) -> Any:
    return getattr(original, "_torchdynamo_orig_callable", original)


def _no_unified_memory(original: Any) -> Any:
    def create_unified_mempool() -> Any:
        from megatron_hybrid_prefix.upstream.names import UnifiedMemoryUnsupportedError

        raise UnifiedMemoryUnsupportedError("no CUDA device")

    return create_unified_mempool


HOST_MEGATRON = (
    *(
        Rebinding(
            owner,
            "torch",
            host.torch_without_pinning,
            "makes bookkeeping tensors with pin_memory=True, which needs a driver",
        )
        for owner in (modules.DYNAMIC_CONTEXT, modules.CONTROLLER)
    ),
    Rebinding(modules.RANDOM, "_lazy_call", _replace_by(host.lazy_call), "imported by value from torch.cuda"),
    Rebinding(modules.RANDOM, "device_ctx_manager", _replace_by(host.no_context), "imported by value from torch.cuda"),
    _alike(
        modules.RANDOM,
        "_set_cuda_rng_state",
        lambda original: lambda new_state, device=-1, graph_safe=False: host.set_rng_state(new_state),
        "sets the generator through torch._C where CUDA is compiled in",
    ),
    _alike(
        modules.COMMUNICATION,
        "_is_cuda",
        _accept_any_device,
        "pipeline stages assert that the logits they broadcast are on a GPU",
    ),
    _alike(
        modules.FUSED_SOFTMAX,
        "get_default_causal_mask",
        _replace_by(host.causal_mask),
        "attention outside the dynamic path (drafting tokens) makes its mask on 'cuda'",
    ),
    _alike(
        modules.TOKEN_DISPATCHER,
        "maybe_move_tensor_to_cpu",
        _replace_by(host.move_to_host),
        "makes arrays of the sizes of the expert exchange only if they come from a GPU",
    ),
    _alike(
        modules.ATTENTION_CLASS,
        "_apply_output_gate",
        _not_compiled,
        "compiled at its first call: 20 s and a C++ compiler for a product of two tensors",
    ),
    Rebinding(
        modules.DYNAMIC_CONTEXT,
        "create_unified_mempool",
        _no_unified_memory,
        "compiles an allocator of CUDA memory; megatron goes on without",
    ),
    _triton(modules.DYNAMIC_CONTEXT, "triton_append_key_value_cache", "kv_append"),
    _triton(modules.MAMBA_MIXER, "mamba_chunk_scan_combined_varlen", "ssd"),
    _triton(modules.MAMBA_MIXER, "causal_conv1d_update", "conv"),
    _triton(modules.CAUSAL_CONV1D, "causal_conv1d_varlen_fn", "conv"),
    _triton(modules.MAMBA_MIXER, "causal_conv1d_varlen_carry_states", "conv", may_be_absent=True),
    _triton(modules.MAMBA_MIXER, "selective_state_update", "decode"),
    _triton(modules.MAMBA_MIXER, "scatter_intermediate_ssm", "extraction"),
    _triton(modules.MAMBA_MIXER, "scatter_intermediate_conv", "extraction"),
    _triton(modules.ROWS_OF_A_STEP, "tensor_get_slice_after", "rows"),
    _triton(modules.MAMBA_MIXER, "tensor_masked_update", "rows"),
    _triton(modules.ROWS_OF_A_STEP, "tensor_merge", "rows"),
    _triton(modules.CONTROLLER, "mamba_state_selective_copy", "speculative"),
    _triton(modules.CONTROLLER, "prepare_next_forward_pass", "speculative"),
    _triton(modules.CONTROLLER, "verify_speculative_tokens", "speculative"),
)


def _has_attention(original: Any) -> Any:
    return lambda version, check_equality=True: True


def _gathering_attention(module: str) -> tuple[Rebinding, ...]:
    why = "no flash-attention of any generation"
    return (
        _alike(
            modules.ATTENTION, "is_fa_min_version", _has_attention, "dynamic batching requires flash-attention >= 2.7.3"
        ),
        Rebinding(modules.ATTENTION, "flash_attn_varlen_func", _kernel(module, "flash_attn_varlen_func"), why),
        Rebinding(modules.ATTENTION, "flash_attn_with_kvcache", _kernel(module, "flash_attn_with_kvcache"), why),
        Rebinding(modules.ATTENTION, "HAVE_FA3", _replace_by(False), why),
        Rebinding(modules.ATTENTION, "HAVE_FA4", _replace_by(False), why),
    )


HOST_ATTENTION = _gathering_attention("attention")
CUDA_GATHERING_ATTENTION = _gathering_attention("attention_cuda")


def _fa4(original: Any) -> Any:
    from megatron_hybrid_prefix.platform.kernels.attention_cuda import flash_attn4_varlen_func

    return flash_attn4_varlen_func(original, hopper=torch.cuda.get_device_capability()[0] == 9)


FA4 = (
    Rebinding(
        modules.ATTENTION,
        "flash_attn4_varlen_func",
        _fa4,
        "FA4 raises 'SplitKV not supported on SM 9.0' unless num_splits=1; it supports neither float32 nor every head size",
    ),
)


def _torch_norm(original: Any) -> Any:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return WrappedTorchNorm


NO_TRANSFORMER_ENGINE = (
    Rebinding(
        modules.DRAFTING,
        "is_inference_column_parallel_linear",
        _replace_by(host.false),
        "compares with classes that derive from Transformer Engine's; without it they are placeholders, and isinstance raises",
        may_be_absent=True,
    ),
    Rebinding(
        modules.HYBRID_BLOCK,
        "TENorm",
        _torch_norm,
        "HybridStack hard-codes Transformer Engine's norm as its final norm",
    ),
    Rebinding(
        modules.MOE_UTILS,
        "te_general_gemm",
        _replace_by(None),
        "routers multiply with Transformer Engine where it is installed, also on a CPU; with PyTorch where it is None",
    ),
)


def _with_a_device(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        counted = Applied()
        apply([_cuda("device_count", lambda: 1, "for the time of a call")], counted)
        try:
            return original(*args, **kwargs)
        finally:
            counted.undo()

    return call


HOST_TRAINING = (
    *(
        Rebinding(
            "megatron.training.initialize",
            name,
            _with_a_device,
            "makes process groups, and seeds their generators, only where it counts a GPU",
            on_import=True,
        )
        for name in ("_initialize_distributed", "_set_random_seed")
    ),
    Rebinding(
        "megatron.training.arguments",
        "get_device_arch_version",
        _replace_by(lambda: sys.maxsize),
        "asked with tp > 1, to want an environment variable on old GPUs",
        same_signature=True,
        on_import=True,
    ),
)


def _with_checked_sizes(original: Callable[[], Any]) -> Any:
    def get_args() -> Any:
        args = original()
        check_sizes(args, "flags of megatron.training")
        return args

    return get_args


TRAINING = (
    Rebinding(
        "megatron.training.initialize",
        "get_args",
        _with_checked_sizes,
        "it keeps the process groups that run, and ignores that its flags ask for others",
        same_signature=True,
        on_import=True,
    ),
)


def _first_that_fits(original: Callable[..., Any]) -> Any:
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if scope.is_on() and len(self.configs) > 1:
            tuned, self.nargs = self.configs, dict(zip(self.arg_names, args, strict=False))
            try:
                *others, last = self.prune_configs(kwargs)
                for config in others:
                    self.configs = [config]
                    with suppress(OutOfResources, PTXASError, CompileTimeAssertionFailure):
                        return original(self, *args, **kwargs)
                self.configs = [last]
                return original(self, *args, **kwargs)
            finally:
                self.configs = tuned
        return original(self, *args, **kwargs)

    return run


_WHY = "the fastest depends on what else runs, and kept results pass it on: in an exact step the first that fits runs"
AUTOTUNERS = () if triton is None else (_alike("triton.runtime.autotuner:Autotuner", "run", _first_that_fits, _WHY),)
