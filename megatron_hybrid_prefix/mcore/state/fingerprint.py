"""`Fingerprint`: names everything that cached KV and states depend on, so that nothing else ever matches them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.ops.checksum import checksum_rows
from megatron_hybrid_prefix.upstream.version import check_version

_CHUNK_WORDS = 2**24  # 128 MiB of weights at a time
# What kernels are, and are compiled by; and variables that change the code that runs.
_PACKAGES = "triton", "flash-attn-4", "nvidia-cutlass-dsl", "mamba-ssm", "causal-conv1d"
_OF_TRITON = "TRITON_F32_DEFAULT", "TRITON_DEFAULT_FP_FUSION"
_PROCESSOR = "model name", "flags", "Features", "CPU part"  # the last two: of ARM
_OF_PROCESSOR = "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"


class Fingerprint:
    """Makes the name of the entries of a model.

    Weights are summed where they are, twice and by position, at the speed of their memory; one number per tensor is copied
    to the host. Settings are the plain attributes of the modules and of their configs, such as the scale of the attention and
    the activation function, and the tensors of modules without parameters, such as the frequencies of rotary embeddings. They
    are read once, at the start.

    Args:
        model: This rank's part of the model.
        layout: Shapes, dtypes, tokens per block, place among the ranks.
        weights: A name for the weights, in place of their sums. Whoever gives it promises to change it with them.
    """

    def __init__(self, model: Any, layout: str, *, weights: str | None = None) -> None:
        self._model, self._weights, self._calls = model, weights, 0
        settings: list[Any] = [__version__, str(check_version().version), layout, weights]
        configs: dict[int, str] = {}  # by id(): most modules have the same one
        for name, module in model.named_modules():
            public = sorted((key, value) for key, value in vars(module).items() if not key.startswith("_"))
            settings.append((name, type(module).__qualname__, _plain(item for item in public if item[0] != "training")))
            for key, value in public:
                if dataclasses.is_dataclass(value) and not isinstance(value, type):
                    if id(value) not in configs:
                        fields = [field.name for field in dataclasses.fields(value)]
                        plain = repr(_plain((each, getattr(value, each, None)) for each in fields))
                        configs[id(value)] = blake2b(plain.encode(), digest_size=16).hexdigest()
                    settings.append((key, configs[id(value)]))
            # Elsewhere such tensors are inputs of the last forward.
            kept = public if next(module.parameters(), None) is None else []
            tensors = [(f"{name}.{key}", value) for key, value in kept if isinstance(value, torch.Tensor)]
            settings.append(_digest(tensors).hex())
        self._settings = repr(settings).encode()

    def __call__(self) -> bytes:
        """The name for the weights as they are now, 16 bytes; the same in every process with the same weights.

        With a name for the weights, each call after the first gives one that no other process has: nobody renamed them.
        """
        if self._weights is None:
            buffers = [item for item in self._model.named_buffers() if not item[0].rpartition(".")[2].startswith("_")]
            weights = _digest([*self._model.named_parameters(), *buffers])
        else:
            weights = os.urandom(16) if self._calls else b""
        self._calls += 1
        return blake2b(self._settings + weights, digest_size=16).digest()


def conditions_of_bits(device: torch.device) -> list[object]:
    """What the bits of a model with ``exact="bits"`` depend on beside the model, plain values: this machine's, and versions.

    What a `Fingerprint` has anyway is left out: this package's version, and megatron's.
    """
    versions = [(name, *(each.version for each in distributions(name=name))) for name in _PACKAGES]
    if device.type == "cuda":
        variables = [(name, os.environ.get(name)) for name in _OF_TRITON]
        machine = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return ["bits", torch.__version__, versions, variables, machine]
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    processor = sorted({line for line in lines if line.startswith(_PROCESSOR)}), torch.get_num_threads()
    variables = [(name, os.environ.get(name)) for name in _OF_PROCESSOR]
    return ["bits", torch.__version__, versions, variables, torch.backends.cpu.get_cpu_capability(), processor]


def _plain(items: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    """The settings among these attributes, in a form whose ``repr`` is the same in every process."""
    return [(key, plain) for key, value in items if (plain := _setting(value)) is not None]


def _setting(value: object) -> object:
    """A plain value, or the name of a function or class; None if it is neither."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if isinstance(value, list | tuple):
        return [_setting(each) for each in value]
    if isinstance(value, dict):
        return [(_setting(key), _setting(each)) for key, each in value.items()]
    if isinstance(value, functools.partial):
        return [_setting(each) for each in (value.func, value.args, value.keywords)]
    name = getattr(value, "__qualname__", None)  # an instance has none
    return None if name is None else f"{getattr(value, '__module__', None)}.{name}"


def _digest(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """Digest of names, shapes, dtypes and contents."""
    digest = blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
    sums = [each for _, tensor in tensors for each in _sums(tensor)]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in sums:
        by_device.setdefault(each.device, []).append(each)
    for device in sorted(by_device, key=str):
        digest.update(torch.stack(by_device[device]).cpu().numpy().tobytes())
    return digest.digest()


@torch.no_grad()
def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Sums of a tensor's bytes, each (); two per chunk. One alone would miss two flips of a word's highest bit."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    for start in range(0, len(data), _CHUNK_WORDS * 8):
        part = data[start : start + _CHUNK_WORDS * 8]
        if len(part) % 8 or part.data_ptr() % 8:
            part = torch.nn.functional.pad(part, (0, -len(part) % 8))
        words = part.view(torch.int64)[None]
        yield checksum_rows(words)[0]
        yield checksum_rows(words ^ (words >> 31))[0]
