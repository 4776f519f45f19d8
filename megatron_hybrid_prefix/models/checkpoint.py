"""`save_checkpoint`, `load_checkpoint`: megatron's distributed checkpoints, saved in one layout, loaded in any.

A checkpoint is a folder of ``torch_dist`` files plus ``hybrid_model.json``, the dimensions. Both calls are collectives, and all
ranks must see the same folder. An error on one rank is raised on all ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_hybrid_prefix.models.weights import warn_not_finite

DIMENSIONS_FILE = "hybrid_model.json"
# These do not affect the weights: a checkpoint may be loaded into a model that differs in them.
_NOT_COMPARED = ("max_sequence_length", "chunk_size", "dtype", "float32_norms", "state_dtype", "long_memory")


def save_checkpoint(model: Any, path: str | os.PathLike[str]) -> None:
    """Save the weights of all ranks' shards.

    Writes to a hidden folder next to ``path``, and renames it when everything is on disk: an interrupted save leaves no
    ``path``.

    Args:
        model: This rank's shard, as `build_hybrid_model` returned it.
        path: A folder that does not exist or is empty, on storage that every rank sees.

    Raises:
        ValueError: ``path`` is a file or is not empty, or the ranks do not share the storage.
        OSError: Writing failed; written files are removed.
    """
    from megatron.core import dist_checkpointing

    from megatron_hybrid_prefix.upstream.check import check_overrides
    from megatron_hybrid_prefix.upstream.checkpoints import SynchronousStrategy

    check_overrides(SynchronousStrategy)
    path = Path(path).absolute()
    dimensions = _dimensions(model)
    names = [f".{path.name}.partial-{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(names, src=0)
    partial = path.with_name(names[0])

    def prepare() -> None:
        if path.is_dir() and any(path.iterdir()):
            raise ValueError(f"{path} is not empty: save a checkpoint into a new folder")
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file: save a checkpoint into a new folder")
        partial.mkdir(parents=True)

    def check_sharing() -> None:
        if not partial.is_dir():
            raise ValueError(f"rank {dist.get_rank()} does not see {partial}: a checkpoint needs shared storage")

    def write() -> None:
        dist_checkpointing.save(model.sharded_state_dict(), str(partial), SynchronousStrategy())

    def complete() -> None:
        _write_synced(partial / DIMENSIONS_FILE, json.dumps(dimensions, indent=2) + "\n")
        _sync_folder(partial)
        partial.rename(path)  # takes the place of an empty folder
        _sync_folder(path.parent)

    together(prepare, only_rank_0=True)
    try:
        together(check_sharing)
        together(write)
        together(complete, only_rank_0=True)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # exists only after an error


def load_checkpoint(model: Any, path: str | os.PathLike[str]) -> None:
    """Load weights that `save_checkpoint` saved, in any tensor- and pipeline-parallel layout.

    Values are converted to the model's dtype. If reading fails halfway, the model has some of the new weights; any other error
    leaves the model unchanged.

    Args:
        model: This rank's shard, as `build_hybrid_model` returned it.
        path: The checkpoint's folder.

    Raises:
        ValueError: The checkpoint is missing, incomplete or unreadable, is of a model with other dimensions, or has a missing
            or an unknown weight.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from megatron_hybrid_prefix.layers.kinds import invalidate_layers  # imports megatron

    path = Path(path).absolute()

    def read() -> None:
        try:
            loaded = dist_checkpointing.load(model.sharded_state_dict(), str(path), strict=StrictHandling.RAISE_ALL)
            model.load_state_dict(loaded, strict=True)
        except (Exception, CheckpointException) as error:
            raise ValueError(f"the checkpoint at {path} cannot be loaded: {_one_line(error)}") from error
        finally:
            invalidate_layers(model)
        warn_not_finite(model, path)

    together(lambda: _check_complete(path))
    together(lambda: _check_dimensions(model, path))
    together(read)


def _dimensions(model: Any) -> dict[str, Any]:
    config = getattr(model, "hybrid_config", None)
    if config is None:
        raise ValueError("the model has no hybrid_config: only models of build_hybrid_model are saved and loaded")
    return asdict(config) | {"layer_pattern": config.layers}


def _check_complete(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint at {path}")
    for name in (DIMENSIONS_FILE, "metadata.json", ".metadata"):
        if not (path / name).is_file():
            raise ValueError(f"{path} is not a complete checkpoint: it has no {name}")


def _check_dimensions(model: Any, path: Path) -> None:
    wanted = _dimensions(model)
    try:
        saved = dict(json.loads((path / DIMENSIONS_FILE).read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint at {path} has an unreadable {DIMENSIONS_FILE}: {error}") from error
    differences = [
        f"{name}={saved[name]!r} (the model has {value!r})"
        for name, value in wanted.items()
        if name in saved and name not in _NOT_COMPARED and saved[name] != value
    ]
    if differences:
        raise ValueError(f"the checkpoint at {path} is of another model: {', '.join(differences)}")


def together(action: Callable[[], None], *, only_rank_0: bool = False) -> None:
    """Run ``action`` on every rank, or only on rank 0, and wait. If it raises on one rank, every rank raises."""
    error: BaseException | None = None
    try:
        if dist.get_rank() == 0 or not only_rank_0:
            action()
    except (Exception, CheckpointException) as caught:
        error = caught
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else (isinstance(error, ValueError), _one_line(error, 2000)))
    first = next((item for item in errors if item is not None), None)
    if first is not None:
        raise (ValueError if first[0] else OSError)(first[1]) from error


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _one_line(error: BaseException, limit: int = 300) -> str:
    if isinstance(error, CheckpointException):  # its text is the stack of every rank
        error = next(iter(error.failures.values()))[0]
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
