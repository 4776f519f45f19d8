"""`ensure_platform`: what it replaces, that it checks it, and that it can be undone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import types
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_hybrid_prefix.errors import PlatformError, UpstreamDriftError
from megatron_hybrid_prefix.mcore import HybridPrefixContext, build_engine, build_upstream_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import active_rebindings, ensure_platform, patches
from megatron_hybrid_prefix.platform.sizes import check_sizes
from megatron_hybrid_prefix.upstream.rebinding import Applied, Placeholder, Rebinding, apply
from tests.engine.test_install import CONFIG
from tests.harness.limits import HANG_S
from tests.harness.workers.launch import run_prepared

on_host = pytest.mark.skipif(torch.cuda.is_available(), reason="the host platform")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, env=os.environ | environment
    )


def run_prepared_code(code: str) -> list[subprocess.CompletedProcess[str]]:
    """`run_python` in a process that has megatron imported."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(code)
        script.flush()
        return run_prepared(script.name)


def test_importing_the_package_changes_nothing_and_does_not_import_megatron():
    code = """
import sys, torch
before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
factories = (torch.empty, torch.Tensor.cuda, torch.Tensor.pin_memory, torch.nn.Module.cuda)
import megatron_hybrid_prefix, megatron_hybrid_prefix.platform, megatron_hybrid_prefix.models, megatron_hybrid_prefix.config
import megatron_hybrid_prefix.text.tokenizer, megatron_hybrid_prefix.errors
from megatron_hybrid_prefix import *  # the names that a script imports before it calls ensure_platform()
from megatron_hybrid_prefix.models import *
assert not any(name.split('.')[0] in ('megatron', 'mamba_ssm', 'causal_conv1d') for name in sys.modules)
assert all(getattr(torch.cuda, name) is value for name, value in before.items())
assert factories == (torch.empty, torch.Tensor.cuda, torch.Tensor.pin_memory, torch.nn.Module.cuda)
assert 'selective_scan_cuda' not in sys.modules
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@on_host
def test_everything_is_put_back_and_can_be_replaced_again():
    code = """
import sys, torch
before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
compile_before = torch.compile
from megatron_hybrid_prefix.platform import ensure_platform, undo_platform, shut_down, active_rebindings
ensure_platform()
assert torch.compile is compile_before
from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
build_engine(build_hybrid_model('tiny'))
assert 'torch._dynamo' not in sys.modules and 'torch._inductor' not in sys.modules, 'seconds of every start'
from megatron.core.fusions.fused_bias_swiglu import swiglu
assert swiglu.__module__ == 'megatron.core.fusions.fused_bias_swiglu' and not hasattr(swiglu, '_torchdynamo_orig_callable')
listed = active_rebindings()
assert len(listed) > 40
assert torch.cuda.current_device is not before['current_device']
undo_platform()
assert active_rebindings() == ()
assert all(getattr(torch.cuda, name) is value for name, value in before.items())
assert 'selective_scan_cuda' not in sys.modules
from megatron.core.ssm import mamba_mixer
assert mamba_mixer.selective_state_update.__module__.startswith('megatron.')
from megatron.core.inference.contexts import dynamic_context
assert dynamic_context.torch is torch
assert ensure_platform().tp == 1
build_hybrid_model('tiny')
assert {entry.name for entry in active_rebindings()} == {entry.name for entry in listed}
shut_down()
assert not torch.distributed.is_initialized()
ensure_platform()
build_hybrid_model('tiny')
"""
    result = run_python(code, TORCHDYNAMO_DISABLE="0")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@on_host
def test_what_megatron_decorates_is_compiled_when_it_is_called_on_a_gpu():
    code = """
import sys, torch
from megatron_hybrid_prefix.platform.start import importing_megatron
compile_before = torch.compile
with importing_megatron(use_cuda=True):
    assert torch.compile is not compile_before
    import megatron.core
    from megatron.core.fusions.fused_bias_swiglu import swiglu
assert torch.compile is compile_before
assert 'torch._inductor.compile_fx' not in sys.modules, 'seconds of every start'
try:
    swiglu()
except TypeError:
    pass
assert 'torch._inductor.compile_fx' in sys.modules, 'and a call compiles'
"""
    result = run_python(code, TORCHDYNAMO_DISABLE="0", TRITON_CACHE_DIR="unused")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mamba_ssm") is None, reason="needs mamba-ssm's Python files")
def test_on_a_gpu_mamba_ssm_is_asked_for_its_kernels_alone():
    code = """
import sys, types
for extension in ('selective_scan_cuda', 'causal_conv1d_cuda'):
    sys.modules.setdefault(extension, types.ModuleType(extension))
from megatron_hybrid_prefix.platform.start import importing_megatron
with importing_megatron(use_cuda=True), importing_megatron(use_cuda=True):
    import megatron.core
    from megatron_hybrid_prefix.upstream import packages
assert packages.has_mamba_parts()
assert not {'mamba_ssm.models', 'mamba_ssm.modules', 'transformers', 'torch._dynamo'} & set(sys.modules), 'seconds of every start'
from mamba_ssm import Mamba2
assert Mamba2.__module__ == 'mamba_ssm.modules.mamba2' and 'mamba_ssm.models' in sys.modules
"""
    result = run_python(code, TRITON_CACHE_DIR="unused")
    assert result.returncode == 0, result.stderr


@on_host
def test_a_second_start_in_a_process_keeps_nothing_that_has_ended():
    """The first one leaves the modules out of later garbage collections."""
    code = """
import gc, weakref
from types import SimpleNamespace
from megatron_hybrid_prefix.console.running import started_platform
class Engine:
    def __init__(self):
        self.itself = self
for start in range(2):
    with started_platform(SimpleNamespace(tp=1, pp=1, device='cpu')):
        assert gc.isenabled() and gc.get_freeze_count() > 10_000
    engine = weakref.ref(Engine()) if start == 0 else engine
gc.collect()
assert engine() is None
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_a_function_is_compiled_once_and_not_inside_of_another(monkeypatch):
    compiled = []

    def compile_now(function, **options):
        def call(*args, **kwargs):
            with monkeypatch.context() as inside:
                inside.setattr(torch.compiler, "is_compiling", lambda: True)
                return function(*args, **kwargs)

        compiled.append((function.__name__, options))
        return call

    (rebinding,) = patches.CUDA_IMPORT
    decorate = rebinding.make(compile_now)

    @decorate
    def double(x):
        return x * 2

    class Layer:
        @decorate(dynamic=True)
        def forward(self, x, *, more=0):
            return double(x) + more

    assert compiled == []
    assert [Layer().forward(1, more=more) for more in (1, 1, 2)] == [3, 3, 4]
    assert compiled == [("forward", {"dynamic": True})]
    assert double(1) == double(1) == 2
    assert compiled[1:] == [("double", {})]
    decorate(Layer)
    assert compiled[2:] == [("Layer", {})], "what is no function is compiled at once"


@on_host
@pytest.mark.slow
def test_megatron_may_be_imported_first():
    result = run_python(
        "import megatron.core.ssm.mamba_mixer\n"
        "from megatron_hybrid_prefix.platform import ensure_platform\n"
        "from megatron_hybrid_prefix.models import build_hybrid_model\n"
        "ensure_platform(); build_hybrid_model('tiny')"
    )
    assert result.returncode == 0, result.stderr


@on_host
def test_the_triton_interpreter_is_not_used(platform):
    assert "TRITON_INTERPRET" not in os.environ
    import triton

    assert not triton.knobs.runtime.interpret
    assert platform.device == torch.device("cpu")
    assert not torch.cuda.is_available()


@on_host
def test_what_needs_mamba_ssm_says_so(platform):
    from megatron.core.ssm import mamba_mixer

    x = torch.ones(1, 2, 1, 1)
    with pytest.raises(ImportError, match=r"needs mamba-ssm.*megatron-hybrid-prefix\[mamba\]"):
        mamba_mixer.mamba_chunk_scan_combined(
            x, x[..., 0], -x[0, 0, 0], x, x, 1, D=x[0, 0, 0], dt_bias=x[0, 0, 0], return_final_states=True
        )
    assert mamba_mixer._check_mamba_sequence_packing_support() == (True, None)


@on_host
def test_every_entry_of_the_table_is_active_and_says_why(platform):
    entries = patches.HOST_TORCH + patches.HOST_MEGATRON + patches.HOST_ATTENTION + patches.NO_TRANSFORMER_ENGINE
    entries += patches.MAMBA_PARTS + patches.MAMBA_TRAINING + patches.NO_MAMBA_SSM
    active = active_rebindings()
    assert set(entries) <= set(active)
    assert len({entry.symbol for entry in entries}) == len(entries)
    for entry in active:
        assert entry.why.strip()
        assert "\n" not in entry.why


def test_asking_again_gives_the_same_platform_and_another_layout_is_refused(platform):
    assert ensure_platform() is platform
    with pytest.raises(PlatformError, match="already running with tp=1 pp=1"):
        ensure_platform(tp=2)
    with pytest.raises(
        PlatformError, match="already running with tp=1 pp=1 ep=1; cannot change to tp=2 pp=1 ep=2 etp=1 in"
    ):
        ensure_platform(tp=2, ep=2, etp=1)
    with pytest.raises(ValueError, match="tp=0"):
        ensure_platform(tp=0)
    with pytest.raises(ValueError, match=r"^etp=2: use 1 \(whole experts\) or tp=4 \(every expert is divided\)$"):
        ensure_platform(tp=4, etp=2)
    with pytest.raises(ValueError, match=r"^ep=3 with etp=1 is neither a divisor nor a multiple of tp=2$"):
        ensure_platform(tp=2, ep=3, etp=1)


SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "virtual_pipeline_model_parallel_size": "vp",
}


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("build", [build_engine, build_upstream_engine, HybridPrefixContext])
def test_a_model_of_other_sizes_is_refused_in_one_line_that_names_both(tiny, field, build, monkeypatch):
    config = CONFIG(tiny)
    monkeypatch.setattr(tiny.config, field, 2)
    name = SIZES[field]
    with pytest.raises(
        PlatformError, match=rf"^the model's config: {name}=2, but this process runs with {name}=1; [^\n]+$"
    ):
        build(tiny.config, config) if build is HybridPrefixContext else build(tiny)


def test_sizes_for_experts_are_those_of_models_with_experts(platform):
    check_sizes(SimpleNamespace(expert_model_parallel_size=2, num_moe_experts=None), "a dense model")
    with pytest.raises(
        PlatformError, match=r"tp=2 ep=4, but .*; call ensure_platform\(tp=2, pp=1, ep=4, etp=1\) first$"
    ):
        sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
        check_sizes(SimpleNamespace(num_moe_experts=4, **sizes), "a mixture")
    for name in ("num_moe_experts", "num_experts"):
        with pytest.raises(
            PlatformError, match=r"ep=2 etp=4, but this process runs with ep=1 etp=1; call .*ep=2\) first$"
        ):
            check_sizes(
                SimpleNamespace(expert_model_parallel_size=2, expert_tensor_parallel_size=4, **{name: 8}), "a mixture"
            )


def test_a_model_with_groups_of_its_own_is_compared_with_those(platform):
    """As of a trainer's inference model in another layout."""
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 4), pp=None)
    check_sizes(SimpleNamespace(tensor_model_parallel_size=4, pipeline_model_parallel_size=8), "a model", groups)
    with pytest.raises(
        PlatformError, match=r"^a model: tp=1, but this process runs with tp=4; make the process groups"
    ):
        check_sizes(SimpleNamespace(tensor_model_parallel_size=1), "a model", groups)


def test_a_model_is_not_built_for_other_sizes(platform):
    with pytest.raises(PlatformError, match="tp=2, but this process runs with tp=1"):
        build_hybrid_model("tiny", platform=replace(platform, tp=2))
    with pytest.raises(PlatformError, match="pp=2, but this process runs with pp=1"):
        build_hybrid_model("tiny", platform=platform, pipeline_model_parallel_size=2)


@on_host
@pytest.mark.parametrize("first", ["platform", "training", "undone"])
def test_megatron_training_compares_its_flags_whenever_it_is_imported(first):
    """A platform does not import it: that takes long, and wants packages."""
    (result,) = run_prepared_code(
        f"""
import sys
from types import SimpleNamespace
if {first!r} == "training":
    import megatron.training.initialize
from megatron_hybrid_prefix.platform import ensure_platform, undo_platform
ensure_platform(device="cpu")
assert ("megatron.training" in sys.modules) == ({first!r} == "training")
from megatron.training.global_vars import set_args
from megatron.training.initialize import initialize_megatron
set_args(SimpleNamespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1))
if {first!r} == "undone":
    undo_platform()
    assert not any("rebinding" in type(finder).__module__ for finder in sys.meta_path)
try:
    initialize_megatron(allow_no_cuda=True, skip_mpu_initialization=True)
except Exception as error:
    print(type(error).__name__, error)
"""
    )
    assert result.returncode == 0, result.stderr
    if first == "undone":
        assert "PlatformError" not in result.stdout
    else:
        assert result.stdout.endswith(
            "PlatformError flags of megatron.training: tp=2, but this process runs with tp=1; "
            "call ensure_platform(tp=2, pp=1, ep=1) first\n"
        )


@pytest.fixture
def upstream(monkeypatch):
    """A stand-in for an upstream module with one function."""
    module = types.ModuleType("fake_upstream")
    module.kernel = lambda x, out: None
    monkeypatch.setitem(sys.modules, "fake_upstream", module)
    return module


def entry(name="kernel", replacement=None, **fields):
    return Rebinding(
        owner="fake_upstream",
        name=name,
        make=lambda original: replacement or (lambda x, out: "ours"),
        why="t",
        **fields,
    )


def test_all_missing_symbols_are_named_and_nothing_stays_replaced(upstream):
    original = upstream.kernel
    applied = Applied()
    with pytest.raises(
        UpstreamDriftError, match=r"fake_upstream\.gone: it does not exist.*; .*fake_upstream\.too: it does"
    ):
        apply([entry(name="gone"), entry(), entry(name="too")], applied)
    assert upstream.kernel is original
    assert applied.rebindings == []


def test_a_module_that_is_not_imported_yet_is_replaced_when_it_is(tmp_path, monkeypatch):
    """Each time, and checked then; nothing is left of it afterwards."""
    (tmp_path / "imported_later.py").write_text("def kernel(x, out): return 'original'\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    applied = Applied()
    later = {"owner": "imported_later", "name": "kernel", "why": "t", "on_import": True, "same_signature": True}
    apply([Rebinding(make=lambda original: lambda x, out: "ours", **later)], applied)
    assert applied.rebindings == [] and "imported_later" not in sys.modules
    module = importlib.import_module("imported_later")
    assert module.kernel(1, 2) == "ours" and len(applied.rebindings) == 1
    assert importlib.reload(module).kernel(1, 2) == "ours"
    applied.undo()
    assert importlib.reload(module).kernel(1, 2) == "original" and sys.meta_path == finders
    del sys.modules["imported_later"]
    apply([Rebinding(make=lambda original: lambda x: "ours", **later)], applied)
    with pytest.raises(UpstreamDriftError, match=r"imported_later\.kernel: .*\(x, out\).*\(x\)"):
        importlib.import_module("imported_later")
    applied.undo()
    assert sys.meta_path == finders


def test_a_missing_module_is_named():
    with pytest.raises(UpstreamDriftError, match=r"no_such_module_here\.kernel"):
        apply([Rebinding(owner="no_such_module_here", name="kernel", make=lambda original: None, why="t")], Applied())


def test_a_name_that_an_optional_package_brings_may_be_absent(upstream):
    applied = Applied()
    apply([entry(name="gone", same_signature=True, may_be_absent=True)], applied)
    assert upstream.gone(1, 2) == "ours"
    applied.undo()
    assert not hasattr(upstream, "gone")
    upstream.gone = lambda other: None
    with pytest.raises(UpstreamDriftError, match=r"fake_upstream\.gone: .*\(other\).*\(x, out\)"):
        apply([entry(name="gone", same_signature=True, may_be_absent=True)], Applied())


def test_another_signature_is_named_with_both_parameter_lists(upstream):
    upstream.kernel = lambda x, out, new_argument: None
    with pytest.raises(UpstreamDriftError, match=r"fake_upstream\.kernel: .*\(x, out, new_argument\).*\(x, out\)"):
        apply([entry(same_signature=True)], Applied())


def test_an_inherited_attribute_is_removed_again_not_pinned(upstream):
    class Base:
        def method(self):
            return "base"

    class Child(Base):
        pass

    upstream.Child = Child
    applied = Applied()
    apply(
        [Rebinding(owner="fake_upstream:Child", name="method", make=lambda original: lambda self: "ours", why="t")],
        applied,
    )
    assert Child().method() == "ours"
    applied.undo()
    assert "method" not in vars(Child)
    assert Child().method() == "base"


def test_a_placeholder_never_hides_a_real_module(upstream):
    applied = Applied()
    applied.add_placeholder(Placeholder(name="fake_upstream", package="any", why="t"))
    assert sys.modules["fake_upstream"] is upstream
    applied.add_placeholder(Placeholder(name="not_installed_anywhere", package="any", why="t"))
    assert "not_installed_anywhere" in sys.modules
    applied.undo()
    assert "not_installed_anywhere" not in sys.modules
    assert sys.modules["fake_upstream"] is upstream


def test_free_memory_of_a_container_is_within_its_limit(tmp_path):
    from megatron_hybrid_prefix.platform.memory import host_free_bytes

    machine = host_free_bytes(tmp_path)  # no limit
    assert machine > 0
    for limit, used, dropped, free in (("1000", 400, 100, 700), ("1000", 1400, 100, 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {dropped}\n")
        assert host_free_bytes(tmp_path) == free
    (tmp_path / "memory.max").write_text("max\n")
    assert host_free_bytes(tmp_path) > 1000
