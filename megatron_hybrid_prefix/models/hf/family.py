"""`Family`: what is to be known of one family of Hugging Face models, to read and to write its folders. No torch, no megatron.

One file adds a family: it defines a `Family` and calls `register_family`. In the package, put the file into this folder and
import it in `dimensions`; outside, make it a plugin (``plugins.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.given import Given
from megatron_hybrid_prefix.models.hf.mapping import Rule
from megatron_hybrid_prefix.plugins import Registry


class Family(ABC):
    """A family of models.

    Attributes:
        model_types: Its names in ``config.json``. The first is its name here, and the one that is saved.
        architecture: transformers' class of a saved model.
        ties: Whether that class can share the embedding with the output layer.
    """

    model_types: ClassVar[tuple[str, ...]]
    architecture: ClassVar[str]
    ties: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The first of its ``model_types``."""
        return self.model_types[0]

    @abstractmethod
    def dimensions(self, given: Given) -> HybridModelConfig:
        """The model that a ``config.json`` describes; `dimensions_of` adds its dtypes, and whether embeddings are tied.

        Args:
            given: The file; where it has a ``text_config``, the values of that, as of `Given.of_text`.

        Raises:
            ValueError: A value is missing or wrong, or megatron's layers cannot compute with it (`Given.error`).
        """

    @abstractmethod
    def config_json(self, config: HybridModelConfig) -> dict[str, Any]:
        """`dimensions` the other way round, for any dimensions: a family has those that come back from `dimensions`.

        Of ``config``, the width of experts and the multiplier of attention are set. `config_json_of` adds the model's type,
        class and dtypes, and whether embeddings are tied.
        """

    def as_stored(self, config: HybridModelConfig, names: Collection[str]) -> HybridModelConfig:
        """Dimensions of a folder with weights of these names; ``config`` is what its ``config.json`` says."""
        return config

    def canonical(self, name: str) -> str | None:
        """The name that the rules have for a tensor of a state dict; None: it is not read."""
        return name

    @abstractmethod
    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        """How every parameter is made, those of other ranks included.

        A norm that Transformer Engine fuses into the next layer has two rules, one for each of its names.

        Args:
            config: The whole model's dimensions.
            names: Canonical names of the state dict, perhaps with its tensors: they decide where one thing is written in two ways.
        """


FAMILIES: Registry[Family] = Registry("model_type")
"""By each of their ``model_types``."""


def register_family(family: Family) -> None:
    """Registers a family; ``model_type`` of a ``config.json`` chooses it.

    Raises:
        ValueError: One of its ``model_types`` is empty or taken.
    """
    for model_type in family.model_types:
        FAMILIES.register(model_type, family)
