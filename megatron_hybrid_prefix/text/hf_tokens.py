"""Begin and end tokens that the JSON files of a Hugging Face folder name. No torch, no megatron.

Four files name them, and a folder may lack any of these: ``tokenizer_config.json`` and ``special_tokens_map.json`` as texts,
``generation_config.json`` and ``config.json`` as ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read, or has something else.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file} is no JSON object")
    return data


def token_texts(folder: Path, name: str) -> list[str] | None:
    """The texts of a special token, such as "eos_token", that the tokenizer's files give: the first one is the tokenizer's own.

    Returns:
        None: the folder has none of these files. Empty: they name no such token.

    Raises:
        ValueError: A file is no JSON object, or has no token there.
    """
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    found: dict[str, None] = {}
    for file in files:
        value = read_object(file).get(name)
        text = value.get("content") if isinstance(value, dict) else value  # an AddedToken, as it is saved
        if not isinstance(text, str | None):
            raise ValueError(f"{file}: {name} is {value!r}, which is no token")
        if text:
            found[text] = None
    return list(found) if files else None


def end_token_ids(folder: Path, *, generation_config: bool = True) -> tuple[int, ...]:
    """Every ``eos_token_id`` of ``generation_config.json`` and ``config.json``, each once.

    Args:
        folder: The folder.
        generation_config: Whether ``generation_config.json`` counts.

    Raises:
        ValueError: A file is no JSON object, or has no token ids there.
    """
    found: dict[int, None] = {}
    for name in (GENERATION_CONFIG, "config.json") if generation_config else ("config.json",):
        file = folder / name
        if not file.is_file():
            continue
        data = read_object(file)
        text = data.get("text_config")  # the language model's part of a model of several modalities
        for part in (data, text if isinstance(text, dict) else {}):
            value = part.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(token) is int and token >= 0 for token in ids):
                raise ValueError(f"{file}: eos_token_id is {value!r}, neither a token id nor a list of them")
            found |= dict.fromkeys(ids)
    return tuple(found)
