"""A driver that imports no megatron, and starts actors with multiprocessing's spawn. Usage: ``env_actor.py OUT.json``.

The environment has what ``hybrid-prefix env`` prints. OUT gets the exit codes of an actor with these settings and of one with wrong
settings, and what the former found.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import weakref
from pathlib import Path


def act(out):
    """The script of an actor. `ensure_platform` imports megatron here, and is called again while it does."""
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.platform import active_rebindings
    from tests.engine.test_install import CONFIG, ENGINE, TOKENS, skipped

    model = build_hybrid_model("tiny", seed=0)
    engine = ENGINE(model, CONFIG(model))
    answers = TOKENS(engine)
    found = {"context": type(engine.context).__name__, "skipped": skipped(engine), "answers": answers}
    symbols = [entry.symbol for entry in active_rebindings()]
    assert len(symbols) == len(set(symbols)) > 40
    assert "torch._inductor" not in sys.modules, "names were replaced before megatron was imported"
    Path(out).write_text(json.dumps(found))
    context = weakref.ref(engine.context)
    del engine
    gc.collect()
    assert context() is None, "the line at the end must not keep its memory"


def main(out):
    spawn = multiprocessing.get_context("spawn")
    codes = []
    for settings in (os.environ["HYBRID_PREFIX_CONFIG"], "{}}"):
        os.environ["HYBRID_PREFIX_CONFIG"] = settings
        actor = spawn.Process(target=act, args=(out,))
        actor.start()
        actor.join()
        codes.append(actor.exitcode)
    assert "megatron" not in sys.modules and "torch" not in sys.modules
    path = Path(out)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"codes": codes}))


if __name__ == "__main__":
    main(sys.argv[1])
