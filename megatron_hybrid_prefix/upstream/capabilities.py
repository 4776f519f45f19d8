"""What megatron-core has in another form from one version to the next, and which form the installed one has.

Nothing asks for a version. A seam that differs asks `form_of` for the form, which is found by a name that only this form has.
Sources are read for it and nothing is imported, so that the answer is there before a platform starts. The rest of a form's names is
for the contract: its rows for names of another form than the installed one do not apply.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from megatron_hybrid_prefix.upstream.version import megatron_folder

_INFERENCE = "megatron.core.inference"
_CONTEXTS = f"{_INFERENCE}.contexts"
_CONTEXT = f"{_CONTEXTS}.dynamic_context:DynamicInferenceContext"
_BLOCKS = f"{_CONTEXTS}.kv_block_allocator:KVBlockAllocator"
_ENGINE = f"{_INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine"
_COORDINATOR = f"{_INFERENCE}.data_parallel_inference_coordinator.coordinator:DataParallelInferenceCoordinator"
_SSM = "megatron.core.ssm"
_MIXER = f"{_SSM}.mamba_mixer:MambaMixer"

CAPABILITIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # One pool of KV blocks, with a limit of what paused requests keep; or a pool for each kind of request.
    "KV blocks": {
        "one pool": (
            f"{_BLOCKS}.pool_size",
            f"{_BLOCKS}.pool_avail",
            f"{_BLOCKS}.paused_limit",
            f"{_BLOCKS}.get_allocatable_count",
        ),
        "two pools": (
            f"{_BLOCKS}.total_count",
            f"{_BLOCKS}.total_avail",
            f"{_BLOCKS}.paused_count",
            f"{_BLOCKS}.active_count",
            f"{_BLOCKS}.get_active_avail",
        ),
    },
    "events of cached KV": {
        "yes": (f"{_CONTEXT}.dynamo_helper", f"{_BLOCKS}._blocks_deregistered_observers"),
        "no": (),
    },
    # Whether clients can abort a request, and get its new tokens.
    "aborts and new tokens": {
        "yes": (
            f"{_INFERENCE}.headers:Request.ABORT_REQUEST",
            f"{_ENGINE}._try_send_streaming_partials",
            f"{_COORDINATOR}.client_request_to_request_id",
        ),
        "no": (),
    },
    "trainers look requests up": {
        "yes": (
            f"{_ENGINE}._send_request_records_to_coordinator",
            f"{_ENGINE}.local_metadata_ledger",
            f"{_ENGINE}.local_metadata_ledger_enabled",
        ),
        "no": (),
    },
    # Recurrent layers of all kinds split a step into rows in one base class; or each class does.
    "steps of recurrent layers": {
        "shared": (
            f"{_SSM}.ssm_inference",
            *(f"{_MIXER}.ssm_{name}" for name in ("dynamic_inference", "prefill", "decode")),
        ),
        "by class": tuple(
            f"{_MIXER}._{name}"
            for name in ("dynamic_inference_prefill", "dynamic_inference", "ssm_prefill", "ssm_decode")
        ),
    },
    # What a layer computes once from its weights is computed again when they change; or in a later step, if a flag says so.
    "what follows from weights": {"refreshed": (f"{_MIXER}.refresh_cache",), "flagged": ()},
    # Where the kernels are.
    "recurrent kernels": {
        "by kind": (f"{_SSM}.ops.mamba2", f"{_SSM}.ops.common"),
        "in one folder": (
            f"{_SSM}.ops.ssd_bmm",
            f"{_SSM}.ops.ssd_chunk_scan",
            f"{_SSM}.ops.ssd_chunk_state",
            f"{_SSM}.ops.causal_conv1d_varlen",
        ),
    },
    # In a model with ``batch_invariant_mode``, Mamba2 decodes as its prefill does, from the inputs of a chunk; or as in any model.
    "batch-invariant decode": {"replays a chunk": (f"{_MIXER}._get_batch_invariant_decoder",), "no": ()},
    # A model may be built with logits in another dtype than its parameters.
    "dtype of logits": {
        "any": ("megatron.core.tensor_parallel.layers:ColumnParallelLinear.output_dtype",),
        "the model's": (),
    },
    # The experts of layers of ``transformer_impl="inference_optimized"``.
    "inference-optimized experts": {
        "SwiGLU, too": (f"{_INFERENCE}.moe.fused_moe:ActivationType.SWIGLU",),
        "squared ReLU": (),
    },
}
"""By capability: its forms, newest first. By form: names that it alone has; the first one is looked for. A name is written as
``module``, ``module:Class.name`` or ``module:name``. A form without names is that of a megatron without the capability."""


@functools.cache
def form_of(capability: str) -> str:
    """The form that the installed megatron-core has; the oldest one if it has none, and the contract then says what is missing."""
    forms = CAPABILITIES[capability]
    return next((form for form, names in forms.items() if names and is_there(names[0])), list(forms)[-1])


def forms() -> dict[str, str]:
    """The form of each capability."""
    return {capability: form_of(capability) for capability in CAPABILITIES}


def applies(symbol: str) -> bool:
    """Whether a dotted name can be looked for in the installed megatron-core: no form that it does not have has the name alone."""
    return not any(symbol == name or symbol.startswith(f"{name}.") for name in _of_other_forms())


@functools.cache
def _of_other_forms() -> frozenset[str]:
    chosen = forms()
    return frozenset(
        name.replace(":", ".")
        for capability, of_form in CAPABILITIES.items()
        for form, names in of_form.items()
        if form != chosen[capability]
        for name in names
    )


def is_there(name: str) -> bool:
    """Whether a module exists, and its text defines or assigns the name."""
    folder = megatron_folder()
    if folder is None:
        return False
    module, _, inner = name.partition(":")
    path = folder.joinpath(*module.removeprefix("megatron.core.").split("."))
    if not inner:
        return path.is_dir() or path.with_suffix(".py").is_file()
    text = _text(path.with_suffix(".py"))
    return re.search(rf"(?:^\s*|\bdef |\bclass |\bself\.){inner.rpartition('.')[2]}\b", text, re.MULTILINE) is not None


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
