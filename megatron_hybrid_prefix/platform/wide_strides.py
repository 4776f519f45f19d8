"""Triton kernels of megatron whose products of a stride have 64 bits.

Triton passes an integer argument in 32 bits if its value fits. The product of two such numbers then has 32 bits, too.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from types import FunctionType
from typing import Any

from megatron_hybrid_prefix.errors import UpstreamDriftError


def with_64_bits(*arguments: str) -> Callable[[Any], Any]:
    """Returns a function of a Triton kernel: the same kernel, in which these integer arguments always have 64 bits.

    The function raises UpstreamDriftError if the kernel has no such argument.
    """

    def widen(kernel: Any) -> Any:
        import triton  # not at the top: only a machine with a GPU needs it

        missing = sorted(set(arguments) - set(kernel.arg_names))
        if missing:
            raise UpstreamDriftError(f"the kernel takes ({', '.join(kernel.arg_names)}), no {', '.join(missing)}")
        if not isinstance(kernel.fn, FunctionType):  # heuristics around the kernel
            outer = copy(kernel)
            outer.fn = widen(kernel.fn)
            return outer
        original = kernel.fn
        function = FunctionType(
            original.__code__, original.__globals__, original.__name__, original.__defaults__, original.__closure__
        )
        function.__annotations__ = original.__annotations__ | dict.fromkeys(arguments, "tl.int64")
        return triton.jit(function, do_not_specialize=getattr(kernel, "do_not_specialize", None))

    return widen
