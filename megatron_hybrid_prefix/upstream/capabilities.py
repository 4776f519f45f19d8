"""What megatron-core has in another form from one version to the next, and which form the installed one has.

Nothing asks for a version. A seam that differs asks `form_of` for the form, which is found by a name that only the newer one has.
Sources are read for it and nothing is imported, so that the answer is there before a platform starts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_hybrid_prefix.upstream.version import megatron_folder


class Forms(NamedTuple):
    """Forms of a capability.

    Attributes:
        newer: The newer form.
        name: A name that this form alone has, as ``module``, ``module:Class.name`` or ``module:name``.
        older: The older form.
    """

    newer: str
    name: str
    older: str = "no"


_INFERENCE = "megatron.core.inference"
_CONTEXTS = f"{_INFERENCE}.contexts"
_ENGINE = f"{_INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine"
_SSM = "megatron.core.ssm"
_MIXER = f"{_SSM}.mamba_mixer:MambaMixer"

CAPABILITIES: Mapping[str, Forms] = {
    # One pool of KV blocks, with a limit of what paused requests keep; or a pool for each kind of request.
    "KV blocks": Forms("one pool", f"{_CONTEXTS}.kv_block_allocator:KVBlockAllocator.pool_size", "two pools"),
    "events of cached KV": Forms("yes", f"{_CONTEXTS}.dynamic_context:DynamicInferenceContext.dynamo_helper"),
    # Whether layers that draft have KV of their own; `ContextSeam` leaves it off.
    "KV of layers that draft": Forms("yes", f"{_CONTEXTS}.mtp_context_mixin"),
    # Whether clients can abort a request, and get its new tokens.
    "aborts and new tokens": Forms("yes", f"{_INFERENCE}.headers:Request.ABORT_REQUEST"),
    # Messages of the coordinator: one frame; or one that it reads and others that it passes on (its main, from September 2026).
    "coordinator's messages": Forms("of several frames", f"{_INFERENCE}.messages", "of one frame"),
    "trainers look requests up": Forms("yes", f"{_ENGINE}._send_request_records_to_coordinator"),
    # Recurrent layers of all kinds split a step into rows in one base class; or each class does.
    "steps of recurrent layers": Forms("shared", f"{_SSM}.ssm_inference", "by class"),
    # What a layer computes once from its weights is computed again when they change; or in a later step, if a flag says so.
    "what follows from weights": Forms("refreshed", f"{_MIXER}.refresh_cache", "flagged"),
    "Gated Delta Product": Forms("yes", f"{_SSM}.gated_delta_product"),
    # Where the kernels are.
    "recurrent kernels": Forms("by kind", f"{_SSM}.ops.mamba2", "in one folder"),
    # In a model with ``batch_invariant_mode``, Mamba2 decodes as its prefill does, from the inputs of a chunk; or as in any model.
    "batch-invariant decode": Forms("replays a chunk", f"{_MIXER}._get_batch_invariant_decoder"),
    # The experts of layers of ``transformer_impl="inference_optimized"``.
    "inference-optimized experts": Forms(
        "SwiGLU, too", f"{_INFERENCE}.moe.fused_moe:ActivationType.SWIGLU", "squared ReLU"
    ),
}


@functools.cache
def form_of(capability: str) -> str:
    """The form that the installed megatron-core has."""
    forms = CAPABILITIES[capability]
    return forms.newer if is_there(forms.name) else forms.older


def only_in(capability: str, form: str) -> Callable[[Any], Any]:
    """A decorator of methods that override one which megatron has in this form only. See `upstream/check.py`."""

    def mark(method: Any) -> Any:
        method.__override__ = form_of(capability) == form
        return method

    return mark


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
