"""`LayerKind`: all that the cache and the engine have to know of a kind of recurrent layer.

One file adds a kind: it defines a `LayerKind` and calls `register_layer_kind`. Inside the package such a file lies in this
folder, and `kinds` imports it; anywhere else it is a plugin (``plugins.py``). A kind says

- which modules of a built model are its layers, and what one state of such a layer is (`components`);
- its chunk quantum: at whose multiples, counted from the start of a prompt, a prefill can give the state;
- how prefill and decode read and write slots: `slot_class`, a mixin that is put before the module's class (`SlotLayer`
  for layers that megatron's engine cannot run);
- what new weights make stale.

A model may have several kinds; a slot then holds the states of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from megatron_hybrid_prefix.plugins import Registry
from megatron_hybrid_prefix.pool.layout import StateComponent


class LayerKind(ABC):
    """A kind of recurrent layer. Modules are those of a built model, on this tensor-parallel rank.

    Attributes:
        name: Its name, in reports and errors.
        slot_class: Mixin with which a module's forward reads and writes states by slot.
        drafts: Whether it can be decoded speculatively: `slot_class` then keeps the state after each drafted token, as
            `SlotLayer` does.
        cuda_graphs: Whether CUDA graphs can capture what it does in a step: no waiting for the device, no loop over its data.
        whole_chunks: Whether a KV block has to consist of whole chunks. Else the last chunk of each may be shorter.
    """

    name: ClassVar[str]
    slot_class: ClassVar[type]
    drafts: ClassVar[bool] = False
    cuda_graphs: ClassVar[bool] = True
    whole_chunks: ClassVar[bool] = False

    @abstractmethod
    def is_layer(self, module: torch.nn.Module) -> bool:
        """Whether the module is a recurrent layer of this kind."""

    @abstractmethod
    def components(
        self, module: torch.nn.Module, *, state_dtype: torch.dtype | None, window_dtype: torch.dtype | None
    ) -> tuple[StateComponent, ...]:
        """Tensors of one state of this layer, on this rank. Their names must not be another kind's.

        Args:
            module: The layer.
            state_dtype: Wanted type of what accumulates over tokens (``HybridPrefixConfig.state_dtype``); None: the
                kind's choice.
            window_dtype: Likewise of what holds the layer's last inputs.
        """

    @abstractmethod
    def chunk_tokens(self, module: torch.nn.Module) -> int:
        """Chunk quantum of the layer, in tokens."""

    @abstractmethod
    def invalidate(self, module: torch.nn.Module) -> None:
        """The layer has new weights: what was derived from the old ones is not used any more."""

    def put_on(self, module: torch.nn.Module) -> bool:
        """Makes the layer read and write states by slot, in place; weights and training stay as they are.

        Returns:
            False where it does already.
        """
        if isinstance(module, self.slot_class):
            return False
        module.__class__ = _with_slots(self.slot_class, type(module))
        return True

    def take_off(self, module: torch.nn.Module) -> bool:
        """Undoes `put_on`; whether there was anything to undo."""
        original = _ORIGINALS.get(type(module))
        if original is None or not isinstance(module, self.slot_class):
            return False
        module.__class__ = original
        return True


KINDS: Registry[LayerKind] = Registry("layer kind")
"""All kinds by name; those of the package are there once `kinds` is imported."""
_ORIGINALS: dict[type, type] = {}
_DERIVED: dict[tuple[type, type], type] = {}


def register_layer_kind(kind: LayerKind) -> None:
    """From now on models may have layers of this kind.

    Raises:
        ValueError: The name is empty or taken.
    """
    KINDS.register(kind.name, kind)


def _with_slots(slot_class: type, original: type) -> type:
    """``original`` with the mixin before it; one class a pair."""
    derived = _DERIVED.get((slot_class, original))
    if derived is None:
        derived = type(f"Slot{original.__name__}", (slot_class, original), {"__doc__": original.__doc__})
        _DERIVED[slot_class, original] = derived
        _ORIGINALS[derived] = original
    return derived
