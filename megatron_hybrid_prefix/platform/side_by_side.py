"""Triton's kernels of a forward are compiled side by side, in threads: the forward goes through its launches, and none of them runs.

One after the other, the configurations that are timed alone take most of a start without kept kernels. Triton's passes and its assembler
let other threads run.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from megatron_hybrid_prefix.upstream.rebinding import Applied, Rebinding, apply

_MODE = "triton.runtime._async_compile"


def _compiled_only(original: Callable[..., Any]) -> Any:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return original(self, *args, grid=grid, warmup=True, **kwargs)

    return run


def _in_all_configurations(original: Callable[..., Any]) -> Any:
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    return run


_LAUNCHES = (
    Rebinding(
        "triton.runtime.jit:JITFunction", "run", _compiled_only, "compiles, and does not launch", same_signature=True
    ),
    Rebinding(
        "triton.runtime.autotuner:Autotuner",
        "run",
        _in_all_configurations,
        "compiles all, and times none",
        same_signature=True,
    ),
)


@contextmanager
def _without_launches() -> Iterator[None]:
    replaced = Applied()
    apply(_LAUNCHES, replaced)
    try:
        yield
    finally:
        replaced.undo()


@contextmanager
def compiled_side_by_side() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Gives a context in which Triton's kernels are compiled and not launched, so what they would write is undefined.

    Waits for all of them at its end, with a progress bar on a terminal. A kernel that cannot be compiled is left out: its launch will say
    why. A version of Triton that cannot do this compiles and launches one after the other.
    """
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec(_MODE) is None:
        yield nullcontext
        return
    mode_of = importlib.import_module(_MODE).AsyncCompileMode
    processors = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(processors, "compile") as threads, mode_of(threads, ignore_errors=True) as mode:
        yield _without_launches
        _wait(mode.raw_futures)


def _wait(compilations: Sequence[Future[Any]]) -> None:
    ended: Iterable[Future[Any]] = as_completed(compilations)
    if sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0" and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import track

        ended = track(ended, "compiling kernels", len(compilations), console=Console(stderr=True))
    for _ in ended:
        pass
