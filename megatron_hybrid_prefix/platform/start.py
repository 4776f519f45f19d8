"""`ensure_platform`: replace missing parts, start ``torch.distributed`` and megatron's parallel state.

`patch_platform` is the first part alone.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.platform import patches
from megatron_hybrid_prefix.platform.kernel_caches import keep_kernels
from megatron_hybrid_prefix.platform.sizes import running_sizes
from megatron_hybrid_prefix.upstream.modules import MAMBA_MIXER
from megatron_hybrid_prefix.upstream.rebinding import Applied, Placeholder, Rebinding, apply
from megatron_hybrid_prefix.upstream.version import check_version

logger = logging.getLogger(__name__)

_applied = Applied()
_asked: str | None = None  # the device that a running `patch_platform` was asked for
_machine: Machine | None = None
_platform: Platform | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the dynamic engine runs with on this machine.

    Attributes:
        device: ``cuda`` or ``cpu``.
        attention: Kernel family of the dynamic path's attention.
        mamba: Source of the Mamba kernels.
        layers: "Transformer Engine" or "local" (megatron-core's own linear layers and norms).
    """

    device: torch.device
    attention: str
    mamba: str
    layers: str

    @property
    def has_transformer_engine(self) -> bool:
        """Whether models are built with Transformer Engine's layers."""
        return self.layers == "Transformer Engine"

    def check_cuda_graphs(self, cuda_graph_impl: str) -> None:
        """Raise ValueError, in one line, if this machine cannot capture the engine's CUDA graphs."""
        if cuda_graph_impl != "none" and self.device.type != "cuda":
            raise ValueError(f"cuda_graph_impl={cuda_graph_impl!r} needs a CUDA device")

    def describe_kernels(self) -> str:
        """A part of a line."""
        return f"attention: {self.attention}, mamba: {self.mamba}, layers: {self.layers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform(Machine):
    """The machine, and the ranks of this process. ``device`` is ``cuda:N`` or ``cpu``.

    Attributes:
        backend: The ``torch.distributed`` backend.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        ep: Expert-parallel size.
        etp: Tensor-parallel size of experts.
        dp: Data-parallel size.
        rank: Global rank.
        world_size: Number of processes.
    """

    backend: str
    tp: int
    pp: int
    ep: int
    etp: int
    dp: int
    rank: int
    world_size: int

    def describe(self) -> str:
        """One line for the start of a run."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return (
            f"platform: {name} ({self.device}), {self.backend}, {self.describe_kernels()}, "
            f"tp={self.tp} pp={self.pp} ep={self.ep}{'' if self.etp == self.tp else f' etp={self.etp}'} dp={self.dp}"
        )


def ensure_platform(
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    seed: int = 0,
    device: str | None = None,
    timeout_s: float = 600.0,
) -> Platform:
    """Make this process ready to build a hybrid model and run the dynamic engine.

    Works in a single process and in processes that ``torchrun`` started; without sizes each of them is a replica. A second call
    with the same sizes does nothing. From now on ``initialize_megatron`` of megatron.training raises a PlatformError if its flags
    ask for other sizes.

    Args:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        ep: Expert-parallel size.
        etp: Tensor-parallel size of experts: ``tp`` (the default) divides every expert, 1 gives each rank whole experts. With 1, the
            ranks of ``ep`` are those of ``tp``, and then of other replicas: ``tp=2, ep=8, etp=1`` runs on 8 ranks, as 4 replicas.
        seed: Seed of the sampling generators (models are seeded by ``build_hybrid_model``).
        device: "cuda" or "cpu"; by default CUDA if there is a device.
        timeout_s: Timeout of a collective, in seconds.

    Raises:
        ValueError: The sizes do not fit the number of processes.
        PlatformError: megatron-core is missing or unsupported, or another layout runs in this process.
        UpstreamDriftError: A name to replace does not exist, or its signature differs.
    """
    global _platform
    etp = tp if etp is None else etp
    sizes = {"tp": tp, "pp": pp, "ep": ep, "etp": etp}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: must be at least 1")
    if etp not in (1, tp):
        raise ValueError(f"etp={etp}: use 1 (whole experts) or tp={tp} (every expert is divided)")
    if etp != tp and ep % tp and tp % ep:
        raise ValueError(f"ep={ep} with etp=1 is neither a divisor nor a multiple of tp={tp}")
    check_version()
    if _platform is not None:
        running = {name: getattr(_platform, name) for name in sizes}
        if running != sizes:
            raise PlatformError(
                f"already running with {_said(running)}; cannot change to {_said(sizes)} in one process"
            )
        return _platform
    machine = patch_platform(device)
    torch_device = _start_distributed(machine.device.type == "cuda", timeout_s)
    world_size = dist.get_world_size()
    needed, whole = pp * max(tp, ep * etp), pp * max(tp, ep)
    if world_size % needed:
        hint = f"; with etp=1 (whole experts) it needs a multiple of {whole}" if whole < needed else ""
        raise ValueError(f"{_said(sizes)} needs a multiple of {needed} processes, and {world_size} were started{hint}")
    _start_parallel_state(sizes, seed, timeout_s)
    _platform = Platform(
        **asdict(machine) | sizes | {"device": torch_device},
        backend=dist.get_backend(),
        dp=running_sizes()["dp"],
        rank=dist.get_rank(),
        world_size=world_size,
    )
    return _platform


def patch_platform(device: str | None = None) -> Machine:
    """Replace what this machine lacks, and start nothing: for scripts that make their own process groups, before or after.

    `undo_platform` restores the names. A second call does nothing, and `ensure_platform` goes on from there. ``initialize_megatron`` of
    megatron.training makes groups of the sizes of its flags, or raises a PlatformError if others run.

    Args:
        device: "cuda" or "cpu"; by default CUDA if there is a device.

    Returns:
        What megatron's dynamic engine runs with.

    Raises:
        ValueError: There is no such device.
        PlatformError: megatron-core is missing or unsupported, or the names were replaced for another device.
        UpstreamDriftError: A name to replace does not exist, or its signature differs.
    """
    global _asked, _machine
    check_version()
    if _machine is None:
        before, _asked = _asked, device or _asked
        try:
            use_cuda = _use_cuda(_asked)
            with importing_megatron(use_cuda):
                import megatron.core  # noqa: F401  first: with HYBRID_PREFIX_INSTALL it calls this function
            if _machine is None:
                _machine = _replace_what_is_missing(use_cuda)
        finally:
            _asked = before
    if device is not None and device.startswith("cuda") != (_machine.device.type == "cuda"):
        raise PlatformError(f"already runs on {_machine.device}; cannot change to device={device!r} in one process")
    return _machine


@contextmanager
def importing_megatron(use_cuda: bool) -> Iterator[None]:
    """A context in which megatron is imported: chooses folders for kernels, replaces names that matter only then, silences warnings."""
    while_importing = Applied()
    try:
        if use_cuda:
            keep_kernels()
            while_importing.put_off(patches.LATE_PACKAGE)
        apply(patches.CUDA_IMPORT if use_cuda else patches.HOST_IMPORT, while_importing)
        with warnings.catch_warnings():
            # Silences a dozen warnings that Transformer Engine, Apex, absl or a GPU are missing. `Machine.describe_kernels`
            # reports what is used instead.
            warnings.simplefilter("ignore", UserWarning)
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
            yield
    finally:
        while_importing.undo()


def active_rebindings() -> tuple[Rebinding | Placeholder, ...]:
    """The replacements in force in this process."""
    return (*_applied.placeholders, *_applied.rebindings)


def replace_names(rebindings: Iterable[Rebinding]) -> None:
    """Replace further names, once each. `active_rebindings` lists them, `undo_platform` restores them.

    Raises:
        UpstreamDriftError: A name or its signature is not as expected; none of these names is replaced.
    """
    wanted = [rebinding for rebinding in rebindings if rebinding not in _applied.rebindings]
    own = Applied()
    apply(wanted, own)
    _applied.take(own)


def undo_platform() -> None:
    """Restore every replaced name. The process group keeps running (`shut_down` ends it)."""
    global _machine, _platform
    _applied.undo()
    _machine = _platform = None


def join_ranks(*, device: str | None = None, timeout_s: float = 600.0) -> None:
    """Start ``torch.distributed`` alone, for what the ranks agree on before a layout is known.

    `ensure_platform` goes on from there, and `shut_down` ends it. Arguments and errors as of `ensure_platform`.
    """
    _start_distributed(_use_cuda(device), timeout_s)


def shut_down() -> None:
    """End megatron's parallel state and ``torch.distributed``, then restore every replaced name."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    undo_platform()


def _replace_what_is_missing(use_cuda: bool) -> Machine:
    """Apply the replacements that this machine needs."""
    if not use_cuda:
        apply(patches.HOST_TORCH, _applied)
    imported_before = MAMBA_MIXER in sys.modules
    try:
        with importing_megatron(use_cuda):
            compiled = not use_cuda or _stand_in_for_extensions()
            from megatron_hybrid_prefix.upstream import delta_net, delta_product, packages
    except BaseException:
        _applied.undo()
        raise
    has_mamba_ssm = use_cuda and packages.has_mamba_ssm()
    has_parts = has_mamba_ssm and packages.has_mamba_parts()
    rebindings: tuple[Rebinding, ...] = patches.TRAINING
    if not has_parts:
        rebindings += patches.MAMBA_PARTS
    if not has_mamba_ssm:
        rebindings += patches.NO_MAMBA_SSM
    if not has_parts or not compiled:
        rebindings += patches.MAMBA_TRAINING
    if not delta_net.has_fla():
        rebindings += patches.NO_FLA
    if delta_product.IS_THERE and not (has_parts and compiled and delta_net.has_fla()):
        rebindings += patches.GDP_PARTS
    if not use_cuda:
        rebindings += patches.HOST_MEGATRON + patches.HOST_ATTENTION + patches.HOST_TRAINING
        attention, mamba = "gather (PyTorch)", "PyTorch"
    else:
        mamba = (
            "Triton, without mamba-ssm" if not has_parts else f"Triton{'' if compiled else ' (no compiled extensions)'}"
        )
        if not has_mamba_ssm and imported_before and importlib.util.find_spec("mamba_ssm") is not None:
            logger.warning("%s was imported before ensure_platform(): the installed mamba-ssm is not used", MAMBA_MIXER)
        family = packages.attention_family()
        if family == "FA4":
            rebindings += patches.FA4
        elif family is None:
            rebindings += patches.CUDA_GATHERING_ATTENTION
        attention = family or "this package's, in Triton"
    # Transformer Engine cannot run on the CPU, even if it is installed.
    has_te = packages.HAVE_TE and use_cuda
    if not has_te:
        rebindings += patches.NO_TRANSFORMER_ENGINE
    apply(rebindings, _applied)
    return Machine(
        device=torch.device("cuda" if use_cuda else "cpu"),
        attention=attention,
        mamba=mamba,
        layers="Transformer Engine" if has_te else "local",
    )


def _stand_in_for_extensions() -> bool:
    """Add placeholders for the compiled extensions of mamba-ssm and causal-conv1d if these are installed without them.

    Returns:
        Whether all extensions are installed.
    """
    missing = [p for p in patches.COMPILED_EXTENSIONS if importlib.util.find_spec(p.name) is None]
    for placeholder in missing:
        if importlib.util.find_spec(placeholder.package) is not None:
            _applied.add_placeholder(placeholder)
    return not missing


def _use_cuda(device: str | None) -> bool:
    use_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if use_cuda and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch finds no CUDA device")
    return use_cuda


def _start_distributed(use_cuda: bool, timeout_s: float) -> torch.device:
    """Join ``torchrun``'s processes, or start alone. Keeps a process group that already runs."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if use_cuda:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(f"local rank {local_rank} has no GPU: this host has {torch.cuda.device_count()}")
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
    if not dist.is_initialized():
        backend = "nccl" if use_cuda else "gloo"
        timeout = timedelta(seconds=timeout_s)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore(), timeout=timeout)
    return device


def _said(sizes: Mapping[str, int]) -> str:
    """Sizes for a message; that of experts where it is one of its own."""
    return " ".join(f"{name}={size}" for name, size in sizes.items() if name != "etp" or size != sizes["tp"])


def _start_parallel_state(sizes: Mapping[str, int], seed: int, timeout_s: float) -> None:
    from megatron.core import parallel_state

    from megatron_hybrid_prefix.upstream.packages import model_parallel_cuda_manual_seed

    running = running_sizes()
    if running:
        running = {name: running[name] for name in sizes}
        if running != sizes:
            raise PlatformError(f"megatron's parallel state already runs with {_said(running)}, not {_said(sizes)}")
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=sizes["etp"],
        create_gloo_process_groups=True,  # by default megatron.training uses them
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)


def running_platform() -> Platform | None:
    """The platform that `ensure_platform` started in this process, or None."""
    return _platform


def patched_machine() -> Machine | None:
    """What `patch_platform`, or `ensure_platform`, found in this process, or None."""
    return _machine
