"""Layout of a slot: the states of all recurrent layers at one token position, as names, shapes and types.

Each kind of recurrent layer (Mamba2, Gated DeltaNet, ...) has one `StateLayout`. A model may have several kinds; a slot then
holds the states of all of them (`SlotLayout`). The pool, the slots and the cache do not depend on the kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_hybrid_prefix.support.arithmetic import round_up

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
CHECKPOINT_DTYPES = ("bfloat16", "int8")
CODES = ("int8", "row_scales", "column_scales")
"""What a checkpoint in int8 has of a component, by the end of the names (``ops/state_codes.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComponent:
    """One tensor of a layer's state.

    Attributes:
        name: For Mamba2 "conv" (the last inputs of the convolution) or "ssm".
        shape: Shape of one state in one layer, on this rank.
        dtype: Name of the torch dtype.
        accumulates: Whether it accumulates over tokens, so that its dtype is ``HybridPrefixConfig.state_dtype`` where that is
            set, and a checkpoint may keep it in fewer bytes (`SlotLayout.kept_in`).

    Raises:
        ValueError: The dtype is unknown, or the shape has no elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    accumulates: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"state component {self.name!r}: unknown dtype {self.dtype!r}, known are {list(DTYPE_BYTES)}"
            )
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"state component {self.name!r}: shape {self.shape} has no elements")

    @property
    def bytes(self) -> int:
        """Bytes of one state in one layer."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The states of all recurrent layers of one kind on this rank.

    Attributes:
        kind: Name of the layer kind, such as "mamba2".
        layers: Number of its layers on this rank; 0 on a pipeline stage without any.
        components: Tensors of one layer's state.
    """

    kind: str
    layers: int
    components: tuple[StateComponent, ...]

    def __post_init__(self) -> None:
        names = [component.name for component in self.components]
        if self.layers < 0 or not names or len(set(names)) < len(names):
            raise ValueError(f"state layout {self.kind!r}: {self.layers} layers, components {names}")


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The states of all kinds of recurrent layers of a model.

    Attributes:
        kinds: One layout per kind. Component names are unique over all kinds.

    Raises:
        ValueError: There is no component, or two kinds have a component of the same name.
    """

    kinds: tuple[StateLayout, ...]

    def __post_init__(self) -> None:
        names = [component.name for _, component in self]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"layer kinds {[layout.kind for layout in self.kinds]} have components {names}")

    def __iter__(self) -> Iterator[tuple[StateLayout, StateComponent]]:
        """All components, each with the layout of its kind."""
        return ((layout, component) for layout in self.kinds for component in layout.components)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot; 0 if this rank has no recurrent layers."""
        return sum(of_kind.layers * component.bytes for of_kind, component in self)

    def with_dtypes(self, *, state: str | None, window: str | None) -> SlotLayout:
        """The same states in other dtypes.

        Args:
            state: Of what accumulates over tokens; None: as it is.
            window: Of what holds the last inputs; None: as it is.
        """

        def changed(component: StateComponent) -> StateComponent:
            dtype = state if component.accumulates else window
            return component if dtype is None else replace(component, dtype=dtype)

        kinds = (replace(layout, components=tuple(map(changed, layout.components))) for layout in self.kinds)
        return SlotLayout(tuple(kinds))

    def kept_in(self, dtype: str | None) -> SlotLayout:
        """What a checkpoint holds of the same states: what accumulates over tokens in another dtype, windows as they are.

        Args:
            dtype: One of `CHECKPOINT_DTYPES`; None: as it is.

        Raises:
            ValueError: The dtype is unknown, or a kind has nothing that can be kept in it.
        """
        if dtype is None:
            return self
        if dtype not in CHECKPOINT_DTYPES:
            names = " or ".join(map(repr, CHECKPOINT_DTYPES))
            raise ValueError(f"checkpoint_dtype={dtype!r}: must be {names}, or None")
        least = 2 if dtype == "int8" else 1  # dimensions
        kinds = []
        for layout in self.kinds:
            if not any(each.accumulates and len(each.shape) >= least for each in layout.components):
                raise ValueError(
                    f"checkpoint_dtype={dtype!r}: layers of kind {layout.kind} have no matrices that accumulate"
                )
            parts = (part for each in layout.components for part in _in_int8(each))
            kinds.append(replace(layout, components=tuple(parts)))
        return SlotLayout(tuple(kinds)) if dtype == "int8" else self.with_dtypes(state=dtype, window=None)


def _in_int8(component: StateComponent) -> tuple[StateComponent, ...]:
    """Matrices are the last two dimensions of what accumulates. Small ones have no fewer bytes so: they stay as they are."""
    if not component.accumulates or len(component.shape) < 2:
        return (component,)
    *others, rows, columns = component.shape
    shapes = (component.shape, (*others, rows), (*others, columns))
    codes = tuple(
        replace(component, name=f"{component.name}_{code}", shape=shape, dtype="bfloat16" if scales else "int8")
        for scales, (code, shape) in enumerate(zip(CODES, shapes, strict=True))
    )
    return codes if sum(code.bytes for code in codes) < component.bytes else (component,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLayout:
    """What a running request keeps of the inputs since its state: the rings of its recurrent layers (``ops/rings.py``).

    Attributes:
        tokens: Decodes write states at multiples of it.
        is_open: Whether a ring is the open chunk of the scan: for decodes with a prefill's bits, which write states at ends of chunks.
        kinds: As of `SlotLayout`, but a kind without a ring is missing: tensors of one layer's ring, their entries first.

    Raises:
        ValueError: Two kinds have a tensor of the same name.
    """

    tokens: int
    kinds: tuple[StateLayout, ...] = ()
    is_open: bool = False

    def __post_init__(self) -> None:
        names = [component.name for layout in self.kinds for component in layout.components]
        if len(set(names)) < len(names):
            raise ValueError(f"layer kinds {[layout.kind for layout in self.kinds]} have rings {names}")

    def bytes(self, requests: int, alignment_bytes: int = 1) -> int:
        """Bytes of the rings of so many requests, each tensor aligned."""
        return sum(
            round_up(layout.layers * requests * component.bytes, alignment_bytes)
            for layout in self.kinds
            for component in layout.components
        )
