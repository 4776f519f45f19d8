"""Replacements for ``torch.cuda`` on a machine without a CUDA device: the CPU is the one device, with one stream.

CPU work is synchronous, so an event is complete when it is recorded, and a stream never waits.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class HostEvent:
    """``torch.cuda.Event`` whose times are wall-clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        """Always complete."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    synchronize = wait


class HostStream:
    """``torch.cuda.Stream`` that runs everything at once, in order."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Record ``event`` (a new one if None) and return it."""
        event = event or HostEvent()
        event.record()
        return event

    def synchronize(self, other: Any = None) -> None:
        """Nothing to wait for."""

    wait_event = wait_stream = synchronize

    def query(self) -> bool:
        """Always idle."""
        return True


_STREAM = HostStream()


def current_device() -> torch.device:
    """The device that upstream passes as ``device=``."""
    return CPU


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """For calls that only a GPU needs."""


def compile_nothing(model: Any = None, **options: Any) -> Any:
    """``torch.compile`` and, with options alone, its decorator: what it gets stays as it is."""
    return (lambda function: function) if model is None else model


def current_stream(*args: Any, **kwargs: Any) -> HostStream:
    """The one stream."""
    return _STREAM


@contextlib.contextmanager
def no_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    """``torch.cuda.stream``."""
    yield


class NoDevice(contextlib.nullcontext[None]):
    """``torch.cuda.device``: nothing is selected, and nothing is one."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


def false(*args: Any, **kwargs: Any) -> bool:
    """``is_available``, and ``is_current_stream_capturing``: there are no CUDA graphs."""
    return False


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the CPU generator, the only generator."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the CPU generator."""
    torch.default_generator.set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.default_generator.manual_seed(int(seed))


def initial_seed() -> int:
    """Seed of the CPU generator."""
    return torch.default_generator.initial_seed()


def lazy_call(callback: Any, **kwargs: Any) -> None:
    """``torch.cuda._lazy_call`` waits until CUDA starts, which never happens here; so call at once."""
    callback()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(available, total) bytes of host memory."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_stats(device: Any = None) -> dict[str, int]:
    """Counters of the caching allocator, which does not exist here: all are 0."""
    return defaultdict(int)


class _Generators:
    """``torch.cuda.default_generators``: any index is the CPU generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


DEFAULT_GENERATORS = _Generators()


def same_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.cuda`` and ``Tensor.pin_memory``."""
    return self


def same_module(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """``Module.cuda``."""
    return self


def causal_mask(sq: int) -> torch.Tensor:
    """``get_default_causal_mask``: (sq, sq), True for keys hidden from a query."""
    return torch.ones(sq, sq, dtype=torch.bool).triu(diagonal=1)


def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """``maybe_move_tensor_to_cpu``; returns an array if ``as_numpy``."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_FACTORIES = ("arange", "empty", "empty_like", "full", "full_like", "ones", "tensor", "zeros", "zeros_like")


def torch_without_pinning(original: types.ModuleType) -> types.ModuleType:
    """``torch`` as seen by one upstream module: tensor factories ignore ``pin_memory``, which needs a CUDA driver.

    The real ``torch`` does not change for other modules.
    """

    def unpinned(factory: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    view = types.ModuleType("torch")
    view.__dict__.update(vars(original))
    # A module's own __getattr__ (PEP 562), which the type of modules has as a method.
    view.__getattr__ = lambda name: getattr(original, name)  # type: ignore[method-assign]
    for name in _FACTORIES:
        setattr(view, name, unpinned(getattr(original, name)))
    return view


class HostForCuda(TorchFunctionMode):
    """A context in which ``device="cuda"``, as megatron.training writes it, means the CPU. Of the thread that enters it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device")):
            kwargs = kwargs | {"device": CPU}
        return func(*args, **kwargs)
