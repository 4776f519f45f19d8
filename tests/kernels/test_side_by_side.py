"""Triton's kernels compile side by side, each configuration once, and none is launched. A fake GPU: nothing could be launched on it."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.errors import CompileTimeAssertionFailure  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from megatron_hybrid_prefix.platform.side_by_side import compiled_side_by_side  # noqa: E402

CONFIGURATIONS = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]


def plus_one(out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(out_ptr + at, mask=at < count) + 1, mask=at < count)


def wrong(out_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0)


GPU = SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Names and blocks of what was compiled, not loaded; in which thread."""
    found = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def listen(*, src, cache_hit, **about):
        if not cache_hit:
            found.append((src.name, dict(src.constants)[next(iter(src.constants))], threading.current_thread().name))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    monkeypatch.setattr(triton.runtime.driver, "_active", GPU)
    return found


def test_each_configuration_once_and_nothing_is_launched(compiled):
    single, tuned = JITFunction(plus_one), triton.autotune(configs=CONFIGURATIONS, key=["count"])(JITFunction(plus_one))
    out = torch.zeros(48)

    def forward():
        for count in (48, 48, 47):  # Triton compiles for multiples of 16 apart
            single[(1,)](out, count, BLOCK=128)
            tuned[lambda options: (options["BLOCK"],)](out, count)

    methods = JITFunction.run, Autotuner.run
    for _ in range(2):
        with compiled_side_by_side() as without_launches:
            for _ in range(2):
                with without_launches():
                    forward()
                assert (JITFunction.run, Autotuner.run) == methods
    assert Counter(block for _, block, _ in compiled) == {16: 2, 32: 2, 64: 2, 128: 2}
    assert threading.current_thread().name not in {thread for *_, thread in compiled}
    assert (out == 0).all()
    with compiled_side_by_side() as without_launches, without_launches():
        JITFunction(plus_one)[(1,)](out, 48, BLOCK=128)  # another process's first: loaded from the folder
    assert len(compiled) == 8


def test_what_cannot_be_compiled_is_left_to_its_launch(compiled):
    with compiled_side_by_side() as without_launches, without_launches():
        JITFunction(wrong)[(1,)](torch.zeros(1), BLOCK=16)
        JITFunction(plus_one)[(1,)](torch.zeros(16), 16, BLOCK=16)
    assert [name for name, *_ in compiled] == ["plus_one"]
    with pytest.raises(CompileTimeAssertionFailure):
        JITFunction(wrong)[(1,)](torch.zeros(1), BLOCK=16)


def test_names_are_restored_after_an_error(compiled):
    methods = JITFunction.run, Autotuner.run
    with pytest.raises(ZeroDivisionError), compiled_side_by_side() as without_launches, without_launches():
        JITFunction(plus_one)[(1,)](torch.zeros(16), 16, BLOCK=16)
        raise ZeroDivisionError
    assert (JITFunction.run, Autotuner.run) == methods and len(compiled) == 1


def test_without_triton_s_threads_kernels_are_launched(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    methods = JITFunction.run, Autotuner.run
    with compiled_side_by_side() as without_launches, without_launches():
        assert (JITFunction.run, Autotuner.run) == methods
