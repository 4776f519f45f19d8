"""Engines that cannot be built: one line says what was given, and what to use."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore import build_upstream_engine
from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
from megatron_hybrid_prefix.mcore.entrypoints import build as entrypoint
from megatron_hybrid_prefix.models import HybridModelConfig, build, build_hybrid_model, get_preset
from megatron_hybrid_prefix.upstream import mixer
from megatron_hybrid_prefix.upstream.capabilities import form_of

BITS = {"mamba_gb": 0.1, "exact": "bits"}
WHOLE_CHUNKS = "^block_size_tokens=96: layers of kind gated_delta_net need a multiple of 64$"
# Model, settings of the cache, fields of the engine, message.
REFUSED = [
    ("tiny", None, {"buffer_size_gb": 0.0001}, "^buffer_size_gb=.* too small: .*max_requests=16"),
    ("tiny", None, {"max_tokens": 64, "max_requests": 128}, "^max_tokens=64 must be at least max_requests=128"),
    ("tiny", None, {"no_such_field": 1}, "^unknown InferenceConfig field"),
    ("tiny", None, {"block_size_tokens": 0}, "^block_size_tokens=0: must be at least 1"),
    ("tiny", None, {"num_speculative_tokens": 1}, "^num_speculative_tokens=1: the model has no multi-token prediction"),
    ("tiny", None, {"num_speculative_tokens": -1}, "^num_speculative_tokens=-1: must not be negative"),
    ("tiny_mtp", None, {"num_speculative_tokens": 4}, "^num_speculative_tokens=4: the model drafts at most"),
    (
        "tiny_mtp",
        None,
        {"num_speculative_tokens": 3, "block_size_tokens": 3},
        "^num_speculative_tokens=3 must be below",
    ),
    *((name, None, {"block_size_tokens": 96}, WHOLE_CHUNKS) for name in ("tiny_gdn", "tiny_mixed")),
    *((name, {"mamba_gb": 0.01}, {"block_size_tokens": 96}, WHOLE_CHUNKS) for name in ("tiny_gdn", "tiny_mixed")),
    ("tiny_mixed", None, {"enable_prefix_caching": True}, "^megatron's own engine cannot run a model with layers of"),
    # -- the cache
    ("tiny", {"mamba_gb": 0.1}, {"enable_prefix_caching": True}, "^prefix=.* exclude each other$"),
    ("tiny", {"retention_interval_tokens": 100}, {}, "^retention_interval_tokens=100: must be 0 or a multiple of"),
    ("tiny", {"verify_hits": 1.5}, {}, "^verify_hits=1.5: must be from 0 to 1"),
    ("tiny", {"cache_gb": 0.0}, {}, "^cache_gb=0.0: must be above 0$"),
    ("tiny", {"mamba_gb": -1.0}, {}, "^mamba_gb=-1.0: must be 0 or more$"),
    ("tiny", {"cache_gb": 0.01, "mamba_gb": 0.02}, {}, "^mamba_gb=0.02 is a cap within cache_gb=0.01, and larger: .*$"),
    ("tiny_mtp", {"cache_gb": 1.2345678e-5}, {}, "^cache_gb=1.2345678e-05 is too small: .* need 0.[0-9]+ MiB$"),
    (
        "tiny_mtp",
        {"cache_gb": 1e-3},
        {"max_requests": 64, "num_speculative_tokens": 3},
        "^cache_gb=0.001 .* rings of 64 requests",
    ),
    ("tiny_mtp", {}, {"buffer_size_gb": 1e-5}, "^buffer_size_gb=1e-05 is too small: .*$"),
    ("tiny_gdp", None, {"block_size_tokens": 96}, "layers of kind gated_delta_product need a multiple of 64$"),
    # -- bits
    ("tiny_gdp", BITS, {}, "^layers of kind gated_delta_product have no decode with the bits of their prefill"),
    ("tiny", BITS | {"exact": "roughly"}, {}, "exact='roughly': must be 'bits', or None"),
    ("tiny", BITS | {"state_dtype": "bfloat16"}, {}, "exact='bits' needs state_dtype='float32', not 'bfloat16'"),
    ("tiny", BITS, {"enable_chunked_prefill": True, "max_tokens": 128}, "needs max_tokens of 260 or more, not 128"),
]


@pytest.mark.parametrize(("name", "prefix", "fields", "said"), REFUSED, ids=str)
def test_an_engine(request, name, prefix, fields, said):
    model, sizes = request.getfixturevalue(name), {} if prefix is None else {"max_requests": 4, "block_size_tokens": 64}
    with pytest.raises(ValueError, match=said) as error:
        build_engine(model, None if prefix is None else HybridPrefixConfig(**prefix), **sizes | fields)
    assert "\n" not in str(error.value)


def test_more_memory_than_there_is(tiny, monkeypatch):
    """Before megatron lists its blocks, which takes longer than anybody waits."""
    monkeypatch.setattr(SlotContext, "__init__", lambda *_, **__: pytest.fail("megatron is told"))
    with pytest.raises(MemoryError, match=r"^cache_gb=1000000\.0: cannot allocate it: there are [0-9.e+]+ GiB in all$"):
        build_engine(tiny, HybridPrefixConfig(cache_gb=1e6))


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"cache_gb": 1e6}, r"cache_gb=1000000\.0"), ({"mamba_gb": 1e6}, r".* with mamba_gb=1000000\.0")],
)
def test_memory_that_the_system_refuses(tiny, monkeypatch, settings, said):
    """The line names what sets it."""
    monkeypatch.setattr("megatron_hybrid_prefix.mcore.state.budget.total_bytes", lambda: 2**60)
    with pytest.raises(MemoryError, match=rf"^{said}: .*allocate memory") as error:
        # Few blocks: megatron makes a list of them before.
        build_engine(tiny, HybridPrefixConfig(**settings), block_size_tokens=4096)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError("")]
)
def test_another_error_while_memory_is_made(tiny, monkeypatch, error):
    def failing(*args, **options):
        raise error

    monkeypatch.setattr("megatron_hybrid_prefix.mcore.context.context.SharedMemory", failing)
    with pytest.raises(RuntimeError) as raised:
        build_engine(tiny, HybridPrefixConfig(cache_gb=0.02))
    assert raised.value is error


def test_megatrons_own_engine(tiny_mixed):
    with pytest.raises(ValueError, match=r"^megatron's own engine cannot run a model with layers of kind"):
        build_upstream_engine(tiny_mixed)


@pytest.mark.parametrize("prefix", [None, HybridPrefixConfig(mamba_gb=0.01)], ids=["no_cache", "cache"])
def test_megatrons_decode_that_replays_a_chunk(platform, monkeypatch, prefix):
    """It is of 0.20: the flag of 0.19 changes no Mamba mixer."""
    model = build_hybrid_model("tiny", platform=platform)
    monkeypatch.setattr(model.config, "batch_invariant_mode", True)
    if form_of("batch-invariant decode") == "no":
        build_engine(model, prefix)
        monkeypatch.setattr(mixer, "form_of", lambda capability: "replays a chunk")
    with pytest.raises(ValueError, match=r"^batch_invariant_mode=True: .* use False, .*exact='bits'.*$"):
        build_engine(model, prefix)


def test_bits_with_logits_in_another_dtype(platform, monkeypatch):
    """A `HybridModel` of 0.20 takes ``logit_dtype``."""
    model = build_hybrid_model("tiny", platform=platform)
    prefix = HybridPrefixConfig(mamba_gb=0.01, exact="bits")
    monkeypatch.setattr(model.output_layer, "output_dtype", torch.float32, raising=False)
    build_engine(model, prefix)
    monkeypatch.setattr(model.output_layer, "output_dtype", torch.float64)
    with pytest.raises(ValueError, match=r"^exact='bits': output_layer has outputs in torch.float64 \(logit_dtype\), "):
        build_engine(model, prefix)


def test_a_model_without_attention():
    with pytest.raises(ValueError, match="no attention layer"):
        get_preset("tiny", layer_pattern="M-M-")
    assert isinstance(get_preset("tiny"), HybridModelConfig)


def test_cuda_graphs_without_a_gpu(platform):
    with pytest.raises(ValueError, match="cuda_graph_impl='local' needs a CUDA device"):
        build_hybrid_model("tiny", platform=platform, cuda_graph_impl="local")


@pytest.mark.parametrize(
    ("fields", "pp", "used", "said"),
    [
        ({}, 1, "layer", ""),
        ({"inference_cuda_graph_scope": "block"}, 1, "block", ""),
        ({"cuda_graph_modules": ["mamba"]}, 1, "layer", ""),
        (
            {"inference_cuda_graph_scope": "block"},
            2,
            "layer",
            "a pipeline stage receives its input in other memory each time",
        ),
        ({"inference_cuda_graph_scope": "block", "fp8": "e4m3"}, 1, "layer", "megatron captures fp8 and fp4 by layer"),
    ],
)
def test_what_a_graph_captures(platform, caplog, fields, pp, used, said):
    stages = dataclasses.replace(platform, pp=pp)
    config = build._transformer_config(get_preset("tiny"), stages, {"cuda_graph_impl": "local"} | fields)
    assert config.inference_cuda_graph_scope.name == used
    lines = [f"inference_cuda_graph_scope='block': {said}; 'layer' is used"] if said else []
    assert [record.message for record in caplog.records if "graph_scope" in record.message] == lines


def test_an_unknown_graph_scope(platform):
    with pytest.raises(ValueError, match="inference_cuda_graph_scope='whole': use 'block' or 'layer'"):
        build_hybrid_model("tiny", platform=platform, inference_cuda_graph_scope="whole")


@pytest.mark.parametrize(
    ("changes", "drafts", "why"),
    [
        ({"fp8": "e4m3"}, 0, "megatron captures fp8"),
        ({"sequence_parallel": True}, 1, "with sequence_parallel the layers that draft"),
    ],
)
def test_graphs_of_a_model_built_elsewhere(platform, monkeypatch, changes, drafts, why):
    """Refused where they would be wrong: its layers have their graphs, or have none, since it was built."""
    model = build_hybrid_model("tiny-mtp" if drafts else "tiny", platform=platform)
    scope = type(model.config.inference_cuda_graph_scope)
    monkeypatch.setattr(entrypoint, "patched_machine", lambda: None)  # this machine captures nothing
    for name, value in ({"cuda_graph_impl": "local", "inference_cuda_graph_scope": scope.block} | changes).items():
        monkeypatch.setattr(model.config, name, value)
    with pytest.raises(ValueError, match=f"^inference_cuda_graph_scope='block': {why}"):
        build_engine(model, HybridPrefixConfig(mamba_gb=0.01), num_speculative_tokens=drafts, num_cuda_graphs=2)
