"""Imports megatron with wrong settings, then with ``optional``. Usage: ``env_errors.py OUT.json CASES``.

CASES: JSON, a list of variables and a version of megatron-core (null: the installed one). OUT gets the error of each import.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from packaging.version import Version

from megatron_hybrid_prefix.upstream import version


def error_of(variables, installed):
    """The error of ``import megatron.core``; None: there was none."""
    os.environ.update(variables)
    version.check_version.cache_clear()
    found = version.MegatronVersion(version=Version(installed)) if installed else real()
    version.find_megatron = lambda: found
    try:
        importlib.import_module("megatron.core")
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def main(out, cases):
    finders = list(sys.meta_path)
    errors = [error_of(*case) for case in json.loads(cases)]
    assert sys.meta_path == finders, "an import that failed fails again"
    os.environ["HYBRID_PREFIX_INSTALL"] = "optional"
    assert error_of({}, None) is None
    assert len(sys.meta_path) == len(finders) - 1

    import torch
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    from megatron_hybrid_prefix.platform import active_rebindings

    owners = [DynamicInferenceContext.__init__.__module__, torch.cuda.current_device.__module__]
    Path(out).write_text(json.dumps({"errors": errors, "owners": owners, "active": len(active_rebindings())}))


if __name__ == "__main__":
    real = version.find_megatron
    main(sys.argv[1], sys.argv[2])
