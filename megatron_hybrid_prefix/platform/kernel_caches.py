"""Compiled kernels are kept for the next process: by the caches of FlashAttention 4 and Triton, in folders that nobody else can write.

Both run the code that they find there. FlashAttention 4 (FA4) reads its variables when it is imported, and keeps nothing by default.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch

from megatron_hybrid_prefix.support.private_folder import make_private

logger = logging.getLogger(__name__)

_FA4_IS_ON = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_FA4_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_TRITON_FOLDER = "TRITON_CACHE_DIR"
_OF_A_PROCESS = "hybrid-prefix-triton-"  # begins the name of a folder that is deleted at the end


def keep_kernels() -> None:
    """Choose the folders; call it before FA4 is imported. A second call does nothing.

    FA4's is the one that its variable names, else one below the user's cache folder; Triton's is its default, below the home folder. One
    that cannot be used safely is not used, with one warning line: FA4 then keeps nothing, and Triton compiles into a folder of this
    process. Whoever sets `_FA4_IS_ON` or `_TRITON_FOLDER` decides, and nothing is checked. Triton also keeps which configuration of a
    kernel was fastest, so that a process need not time them all; ``exact="bits"`` times none.
    """
    if not _is_deterministic():  # megatron then chooses by size, but times all if this is set
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # read where a kernel is defined
    if _FA4_IS_ON not in os.environ and _has_fa4():
        wanted = os.environ.get(_FA4_FOLDER) or _user_cache() / "megatron_hybrid_prefix" / "flash_attention_4"
        try:
            os.environ[_FA4_FOLDER] = str(make_private(Path(wanted), locks=True))
            os.environ[_FA4_IS_ON] = "1"
        except OSError as error:
            os.environ[_FA4_IS_ON] = "0"
            _warn("FlashAttention 4", error, _FA4_FOLDER)
    if _TRITON_FOLDER not in os.environ:
        try:
            os.environ[_TRITON_FOLDER] = str(make_private(_triton_default(), locks=False))
        except OSError as error:
            folder = os.environ[_TRITON_FOLDER] = tempfile.mkdtemp(prefix=_OF_A_PROCESS)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            _warn("Triton", error, _TRITON_FOLDER)


def kernel_folders() -> str:
    """Where compiled kernels are kept, as a part of a line."""
    folder = Path(os.environ.get(_TRITON_FOLDER) or _triton_default())
    triton = f"Triton's {'nowhere' if folder.name.startswith(_OF_A_PROCESS) else f'in {folder}'}"
    if not _has_fa4():
        return triton
    kept = f"in {os.environ.get(_FA4_FOLDER, 'its default folder')}"
    return f"{triton}, FlashAttention 4's {kept if os.environ.get(_FA4_IS_ON) == '1' else 'nowhere'}"


def _is_deterministic() -> bool:
    """What megatron's ``ssm/ops/determinism.py`` asks; importing it would define kernels."""
    given = os.environ.get("MAMBA_DETERMINISTIC")
    return given[0] == "1" if given else torch.are_deterministic_algorithms_enabled()


def _has_fa4() -> bool:
    """Whether FA4 is installed. Importing its package would import FlashAttention 2, too, where that is installed."""
    found = importlib.util.find_spec("flash_attn")
    places = () if found is None else found.submodule_search_locations or ()
    return any((Path(place) / "cute").is_dir() for place in places)


def _user_cache() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path(os.path.expanduser("~"), ".cache")  # as its specification says


def _triton_default() -> Path:
    return Path(os.environ.get("TRITON_HOME", os.path.expanduser("~")), ".triton", "cache")


def _warn(whose: str, error: OSError, variable: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the other ranks of this host have the same folders
        logger.warning(
            "compiled kernels of %s are not kept, each process compiles them again: %s; name a folder of your own in %s",
            whose,
            error,
            variable,
        )
