"""`import_megatron`: the cache, installed while a script imports megatron (`environment` says when).

``startup/sitecustomize.py`` calls it. It starts no process groups.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import fields

import torch

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.mcore.entrypoints.install import install
from megatron_hybrid_prefix.platform.start import importing_megatron, patch_platform, undo_platform
from megatron_hybrid_prefix.support.environment import CONFIG_VARIABLE, INSTALL_VARIABLE, ON, OPTIONAL, config_of, say
from megatron_hybrid_prefix.upstream.version import check_version

logger = logging.getLogger(__name__)
# The process that has said the line; one that it starts, such as megatron's coordinator, does not repeat it.
_SAID_BY = "HYBRID_PREFIX_SAID_BY"


def import_megatron(run: Callable[[], None]) -> None:
    """Run the module ``megatron.core``, replace what the machine lacks, and install the cache. One line says what was done.

    Args:
        run: Runs the module. It imports neither layers nor engines, so that none of them is half imported afterwards.

    Raises:
        PlatformError: The variables are wrong, or the cache does not go with this megatron-core. With ``optional`` that is the line,
            and megatron's own classes go on.
    """
    mode = os.environ.get(INSTALL_VARIABLE, "")
    with importing_megatron(use_cuda=torch.cuda.is_available()):
        run()
    try:
        if mode not in (ON, OPTIONAL):
            raise ValueError(f"must be {ON}, {OPTIONAL}, 0 or empty")
        machine = patch_platform()
        config = config_of(os.environ)  # loads plugins, which may import layers
        install(config)
    except (ValueError, PlatformError, ImportError) as error:  # ImportError: of a plugin or a dependency
        undo_platform()
        problem = f"{INSTALL_VARIABLE}={mode}: {error}"
        if mode != OPTIONAL:
            raise PlatformError(problem) from None  # no ImportError: many scripts take that for "no megatron"
        say(logger, f"no prefix cache, {problem}", on_each_rank=True)  # one rank alone without it is worth a line
    else:
        if os.environ.get(_SAID_BY) == str(os.getppid()):
            return
        os.environ[_SAID_BY] = str(os.getpid())
        say(
            logger,
            f"prefix cache {__version__} in {check_version()}, {_settings(config)}; {machine.device.type}, {machine.describe_kernels()}",
        )


def _settings(config: HybridPrefixConfig | None) -> str:
    if config is None:
        return f"for contexts with enable_prefix_caching (for all: set {CONFIG_VARIABLE})"
    given = [
        f"{each.name}={value!r}" for each in fields(config) if (value := getattr(config, each.name)) != each.default
    ]
    memory = ["memory: buffer_size_gb"] if config.cache_gb is None else []
    return f"for all contexts: {', '.join(given + memory)}"
