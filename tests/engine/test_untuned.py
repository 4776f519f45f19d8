"""``exact="bits"``: nothing that a dependency chooses by timing is a part of the bits."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_hybrid_prefix.ops.invariant import scope
from megatron_hybrid_prefix.platform import patches
from tests.harness.bits import exact_harness
from tests.harness.lifecycle_helpers import EngineHarness, tokens

triton = pytest.importorskip("triton")
from triton.runtime.autotuner import Autotuner  # noqa: E402


def test_no_autotuned_kernel_is_timed_in_a_step(tiny, monkeypatch):
    """Each that is imported is launched in each step, and its last configuration is the fastest. Another engine of the process tunes."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    kernels = {each for module in modules for each in [*vars(module).values()] if isinstance(each, Autotuner)}
    timed = set()
    for kernel in kernels:
        for name, value in {"fn": SimpleNamespace(run=lambda **_: None), "cache": {}, "cache_results": False}.items():
            monkeypatch.setattr(kernel, name, value)

    def bench(kernel, *, config, **options):
        timed.add(kernel)
        return -kernel.configs.index(config)

    def launch(*_):
        for kernel in kernels:
            kernel.run(grid=(1,), warmup=False)

    monkeypatch.setattr(Autotuner, "_bench", bench)
    with tiny.decoder.register_forward_pre_hook(launch):
        exact_harness(tiny).send(tokens(0, 20, seed=1), count=2)
        assert {"_causal_conv1d_varlen_kernel", "_chunk_scan_fwd_kernel"} <= {each.base_fn.__name__ for each in kernels}
        assert not timed and all(each.best_config is each.configs[0] for each in kernels)
        EngineHarness(tiny).send(tokens(0, 20, seed=1), count=2)
        assert timed == kernels and all(each.best_config is each.configs[-1] for each in kernels)


def test_a_configuration_that_does_not_fit_is_left_out(tiny):
    exact_harness(tiny)
    kernel = triton.autotune([triton.Config({"BLOCK": block}) for block in (64, 32, 16)], key=[])(triton.jit(tokens))
    launched = []

    def launch(BLOCK, **options):
        launched.append(BLOCK)
        if BLOCK > 16:
            raise triton.OutOfResources(BLOCK, 16, "shared memory")

    kernel.fn = SimpleNamespace(run=launch)
    with scope.invariant():
        kernel.run()
    assert launched == [64, 32, 16] and len(kernel.configs) == 3


def test_compiled_functions_run_as_they_are_written_in_a_step(tiny, monkeypatch):
    """Those that are compiled when they are called, and others."""
    stances, compiled = [], []
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: stances.append(stance) or nullcontext())
    EngineHarness(tiny).send(tokens(0, 20, seed=1), count=1)
    assert stances == []
    exact_harness(tiny).send(tokens(0, 20, seed=1), count=1)
    assert {*stances} == {"force_eager"}
    (rebinding,) = patches.CUDA_IMPORT
    double = rebinding.make(lambda function: compiled.append(function) or function)(lambda x: 2 * x)
    with scope.invariant():
        assert double(1) == 2 and not compiled
    assert double(1) == 2 and len(compiled) == 1
