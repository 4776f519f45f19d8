"""The families of Hugging Face models that the tests know, a module each."""

from tests.harness.hf_families import bamba, granite, nemotron_h, olmo_hybrid, qwen3_5, qwen3_next
from tests.harness.hf_families.entry import Fields, Model

_FAMILIES = (bamba, granite, nemotron_h, olmo_hybrid, qwen3_next, qwen3_5)
MODELS: dict[str, Model] = {kind: model for family in _FAMILIES for kind, model in family.MODELS.items()}
FIELDS: dict[str, Fields] = {fields.config_class: fields for family in _FAMILIES for fields in family.FIELDS}
