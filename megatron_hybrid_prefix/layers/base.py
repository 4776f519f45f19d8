"""`LayerKind`: everything that the cache and the engine need to know about a kind of recurrent layer.

One file adds a kind: it defines a `LayerKind` and calls `register_layer_kind`. In the package, put the file into this folder
and import it in `kinds`; outside, make it a plugin (``plugins.py``). A kind defines

- which modules of a built model are its layers, and the tensors of one layer's state (`components`);
- its chunk quantum: a prefill can produce the state at multiples of it, counted from the start of a prompt;
- how prefill and decode read and write slots: `slot_class`, a mixin placed before the module's class (`SlotLayer` for
  layers that megatron's engine cannot run);
- what a decode keeps beside a state (`ring`), and how a state advances over it (`flush`); by default each decode writes its state;
- what to compute again when the weights change.

A model may have several kinds; a slot then holds the states of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any, ClassVar

import torch

from megatron_hybrid_prefix.layers.components import OPEN_RINGS, RINGS
from megatron_hybrid_prefix.layers.step import Quantum
from megatron_hybrid_prefix.ops.rings import RingRows, take_last
from megatron_hybrid_prefix.ops.slot_copies import copy_slots
from megatron_hybrid_prefix.plugins import Registry
from megatron_hybrid_prefix.pool.layout import StateComponent
from megatron_hybrid_prefix.upstream.overrides import NOT_IN_STEPS, lost_override, written_for


class LayerKind(ABC):
    """A kind of recurrent layer. Its methods get modules of a built model, on this tensor-parallel rank.

    Attributes:
        name: Its name in reports and errors.
        slot_class: Mixin that makes a module's forward read and write states by slot.
        drafts: Whether it supports speculative decoding: where a decode goes on from is settled after it, see `ring`.
        cuda_graphs: Whether CUDA graphs can capture its work in a step: it never waits for the GPU, nor loops over data there.
            A graph that captured other work is wrong without an error, so a kind has to say so.
        whole_chunks: Whether a KV block must consist of whole chunks. Otherwise the last chunk of a block may be shorter.
        keeps: Methods of the layers' class that ``slot_class`` calls as that does, or that only training calls: a subclass may override
            them. What ``slot_class`` defines it may extend, if ``slot_class`` derives from the layers' class (`upstream.overrides`).
    """

    name: ClassVar[str]
    slot_class: ClassVar[type]
    drafts: ClassVar[bool] = False
    cuda_graphs: ClassVar[bool] = False
    whole_chunks: ClassVar[bool] = False
    keeps: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def is_layer(self, module: torch.nn.Module) -> bool:
        """Whether the module is a recurrent layer of this kind."""

    @abstractmethod
    def components(
        self, module: torch.nn.Module, *, state_dtype: torch.dtype | None, window_dtype: torch.dtype | None
    ) -> tuple[StateComponent, ...]:
        """Tensors of one state of this layer, on this rank. No other kind may use their names.

        Args:
            module: The layer.
            state_dtype: Dtype for tensors that accumulate over tokens (``HybridPrefixConfig.state_dtype``); None: the kind
                chooses. Tensors that take it have ``accumulates=True``: their dtype may change later.
            window_dtype: Dtype for tensors that hold the layer's last inputs; None: the kind chooses.
        """

    @abstractmethod
    def chunk_tokens(self, module: torch.nn.Module) -> Quantum:
        """Chunk quantum of the layer, in tokens; a fraction where chunks end inside of tokens, see `Quantum`."""

    def ring(
        self, state: tuple[StateComponent, ...], tokens: int, step_tokens: int, dtype: str
    ) -> tuple[StateComponent, ...]:
        """What a decode keeps in each layer for each running request beside its state: the layer's *ring*.

        Kinds of the package have one in `RINGS`. By default a decode writes its state, and with drafts the state after each token of the step.

        Args:
            state: The components of one state.
            tokens: States are written at multiples of it, or of fewer.
            step_tokens: Most tokens of a row in a step: one, and its drafts.
            dtype: Name of the dtype of the layer's inputs.

        Returns:
            Tensors of one layer's ring, entries first. No other ring nor state may use their names. Those of a kind may not depend
            on a module: a flush knows of none.
        """
        if self.name in RINGS:
            return RINGS[self.name](state, tokens, step_tokens, dtype)
        if step_tokens == 1:
            return ()
        return tuple(replace(each, name=f"{each.name}_after", shape=(step_tokens, *each.shape)) for each in state)

    def open_ring(
        self, state: tuple[StateComponent, ...], tokens: int, step_tokens: int, dtype: str
    ) -> tuple[StateComponent, ...]:
        """The ring of a decode with a prefill's bits: the inputs of the open chunk of ``tokens``. Kinds of plugins have none by default."""
        if self.name not in OPEN_RINGS:
            raise ValueError(
                f"layers of kind {self.name} have no decode with the bits of their prefill; use exact=None"
            )
        return OPEN_RINGS[self.name](state, tokens, step_tokens, dtype)

    def flush(
        self, states: Mapping[str, torch.Tensor], ring: Mapping[str, torch.Tensor], rows: Mapping[str, RingRows]
    ) -> None:
        """Advance states of all layers of some requests to `RingRows.ends`, in their slots and in those that are given them, too.

        Args:
            states: As of `SlotLayer.slot_decode_rows`, but of all layers: a slot of a layer is one of many. Slots may overlap.
            ring: Likewise.
            rows: By component of ``states``: each request has a row for each layer. The positions are the ends.
        """
        for name, after in ring.items():
            name = name.removesuffix("_after")
            take_last(states[name], after, rows[name])
        for name, tensor in states.items():
            copy_slots(tensor[None], tensor[None], rows[name].slots, rows[name].kept)

    @abstractmethod
    def invalidate(self, module: torch.nn.Module) -> None:
        """The layer has new weights: compute everything derived from the old ones again, now and in the same memory.

        A captured CUDA graph goes on reading that memory, and runs no Python that could look at a flag.
        """

    def put_on(self, module: torch.nn.Module) -> bool:
        """Make the layer read and write states by slot, in place. Weights and training do not change.

        Returns:
            Whether the layer changed; False if it already uses slots.
        """
        return put_before("Slot", self.slot_class, module, last=bool(written_for(type(module), self.slot_class)))

    def problem_of(self, module: torch.nn.Module) -> str | None:
        """What of the module's class `put_on` would lose, in a few words; None: nothing."""
        extends = bool(written_for(type(module), self.slot_class))
        return lost_override(module, self.slot_class, keeps=self.keeps | NOT_IN_STEPS, extends=extends)

    def take_off(self, module: torch.nn.Module) -> bool:
        """Undo `put_on`; returns whether the layer changed."""
        changed = False
        while isinstance(module, self.slot_class) and (original := _ORIGINALS.get(type(module))) is not None:
            module.__class__, changed = original, True
        return changed


KINDS: Registry[LayerKind] = Registry("layer kind")
"""All kinds by name. Importing `kinds` registers those of the package."""
_PREFILL = ("inputs", "states", "kept", "step")
_ORIGINALS: dict[type, type] = {}
_DERIVED: dict[tuple[type, type], type] = {}


def register_layer_kind(kind: LayerKind) -> None:
    """Register a kind: models may have layers of it from now on.

    Raises:
        ValueError: The name is empty or taken, or the ``slot_prefill`` of its layers is of an earlier version.
    """
    prefill = getattr(kind.slot_class, "slot_prefill", None)
    if prefill is not None and (taken := [*signature(prefill).parameters][1:]) != list(_PREFILL):
        raise ValueError(
            f"layer kind {kind.name!r}: slot_prefill takes ({', '.join(taken)}), must take ({', '.join(_PREFILL)})"
        )
    KINDS.register(kind.name, kind)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a `StateComponent`."""
    return str(dtype).removeprefix("torch.")


def put_before(prefix: str, mixin: type, module: Any, *, last: bool = False) -> bool:
    """Put a mixin before the class of a module, in place. Returns False if it is there already.

    Args:
        prefix: Of the new class's name. There is one class for each mixin and class.
        mixin: The mixin.
        module: The module, or another object.
        last: Before the class that the mixin derives from only: what a subclass of that overrides comes first.
    """
    if isinstance(module, mixin):
        return False
    original = type(module)
    if (mixin, original) not in _DERIVED:
        bases: tuple[type, ...] = (mixin, original)
        if last:
            bases = (mixin,) if issubclass(mixin, original) else (original, mixin)
        derived = type(prefix + original.__name__, bases, {"__doc__": original.__doc__})
        _DERIVED[mixin, original], _ORIGINALS[derived] = derived, original
    module.__class__ = _DERIVED[mixin, original]
    return True
