"""`patch_platform`: replaces what `ensure_platform` does, and starts nothing."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_platform import run_prepared_code

CODE = """
import sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_hybrid_prefix import build_engine, install
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.mcore.entrypoints import install as installation
from megatron_hybrid_prefix.platform import *
from megatron_hybrid_prefix.platform import start

def refused(call):
    try:
        call()
    except (ValueError, PlatformError) as error:
        return str(error)

before, checked = torch.cuda.current_device, []
installation.check_overrides = lambda: checked.append(True)
install()
assert not checked, "the layers would be imported before their names are replaced"
machine = patch_platform()
assert patch_platform("cpu") is machine is patched_machine() and str(machine.device) == "cpu"
listed = active_rebindings()
assert len(listed) > 40 and torch.cuda.current_device is not before
assert running_platform() is None and not dist.is_initialized() and not parallel_state.model_parallel_is_initialized()
install()
assert checked == [True]
graphs = SimpleNamespace(config=SimpleNamespace(cuda_graph_impl="local"))
assert refused(lambda: build_engine(graphs)) == "cuda_graph_impl='local' needs a CUDA device"
for call in (patch_platform, lambda device: ensure_platform(device=device)):
    assert refused(lambda: call("cuda")) == "already runs on cpu; cannot change to device='cuda' in one process"

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # a script's own
parallel_state.initialize_model_parallel()
platform = ensure_platform()
assert active_rebindings() == listed and patched_machine() is machine
assert (platform.attention, platform.mamba, platform.layers) == (machine.attention, machine.mamba, machine.layers)
assert (platform.backend, platform.dp) == ("gloo", 1)
undo_platform()
assert active_rebindings() == () and patched_machine() is None and torch.cuda.current_device is before
assert patch_platform() == machine and len(active_rebindings()) == len(listed)
undo_platform()

class Calls:  # as the import of megatron.core does with HYBRID_PREFIX_INSTALL
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.core":
            sys.meta_path.remove(self)
            patch_platform()

asked, use_cuda = [], start._use_cuda
start._use_cuda = lambda device: asked.append(device) or use_cuda(device)
sys.meta_path.insert(0, Calls())
del sys.modules["megatron.core"]
patch_platform("cpu")
assert asked == ["cpu", "cpu"] and len(active_rebindings()) == len(listed)
undo_platform()

has_gpu = torch.cuda.is_available = lambda: True  # a machine with GPUs that are not used
patch_platform("cpu")
assert not torch.cuda.is_available() and not isinstance(None, torch.cuda.device)
with torch.cuda.device(0):
    pass
undo_platform()
assert torch.cuda.is_available is has_gpu
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the host platform")
def test_names_without_groups():
    (result,) = run_prepared_code(CODE)
    assert result.returncode == 0, result.stderr
