"""What the tests know of a family: a `Model` for each kind of tiny model, and `Fields` for each config class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """A tiny random model, which every test of folders takes. `tests/models/test_hf_folder_parity.py` compares it.

    Attributes:
        model_type: Of its ``config.json``.
        config_class: transformers' config class.
        model_class: transformers' class.
        dimensions: Fields of the config class.
        changes: Fields of `HybridModelConfig` that change its logits, each by itself.
        prompt_lengths: Tokens of the prompts; one of 1,000 comes on top.
        seed: Of its weights and prompts.
    """

    model_type: str
    config_class: str
    model_class: str
    dimensions: Mapping[str, Any]
    changes: tuple[Mapping[str, Any], ...] = ()
    prompt_lengths: tuple[int, ...] = (1, 3, 64, 129, 300)
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Every field of a config class: it is honoured, or refused unless neutral, or has no effect on an answer.

    In changes, ``...`` takes a field out of the file.

    Attributes:
        model_type: Of the ``config.json``.
        config_class: transformers' config class.
        modeling: The module whose sources may not read fields without effect: "bamba" is ``models/bamba/modeling_bamba.py``.
        given: A whole file; none of its values is a default of the class.
        honoured: Another value of a field, and the field here that it changes.
        refused: A value that this package cannot compute with.
        no_effect: Fields that change no answer, with the reason, besides those of `test_hf_config_fields.py`.
        read: Those of them that transformers' module reads nevertheless.
        among_others: Honoured fields whose value is not that of the field here: they decide it with others.
        together: What comes with the other value of a field.
        absent_with: What is changed, too, where a field is left out.
        old: Old names, or old places: changes, a field here, and its value.
        old_refused: Likewise: changes, and what the error says.
    """

    model_type: str
    config_class: str
    modeling: str
    given: Mapping[str, Any]
    honoured: Mapping[str, tuple[Any, str]]
    refused: Mapping[str, Any]
    no_effect: Mapping[str, str] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    among_others: frozenset[str] = frozenset()
    together: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    absent_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    old: tuple[tuple[Mapping[str, Any], str, Any], ...] = ()
    old_refused: tuple[tuple[Mapping[str, Any], str], ...] = ()
