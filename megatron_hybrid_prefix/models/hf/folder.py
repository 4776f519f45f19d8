"""`HfFolder`: what a Hugging Face folder says, before a weight is read. No torch, no megatron.

Of the ``*.safetensors`` files only the headers are read: names, dtypes, shapes and places of the weights. A missing,
truncated or foreign file is found here, before a model is built.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.dimensions import dimensions_of
from megatron_hybrid_prefix.models.hf.family import FAMILIES
from megatron_hybrid_prefix.models.hf.given import Given
from megatron_hybrid_prefix.models.hf.stored import DTYPES, Block, StoredWeight, blocks_of, with_scales
from megatron_hybrid_prefix.text.hf_tokens import GENERATION_CONFIG, end_token_ids, read_object

_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
_MODELOPT = "hf_quant_config.json"  # of modelopt; config.json need not say it again
_HEADER_BYTES = 100_000_000  # the format's limit
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class HfFolder:
    """A folder as ``save_pretrained`` writes it; `open_folder` checks and reads it.

    Attributes:
        path: The folder.
        model_type: Hugging Face's name of the family.
        config: The model's dimensions.
        generation: Values of ``generation_config.json``; empty where there is none.
        end_tokens: ``eos_token_id`` of ``generation_config.json`` and ``config.json``: tokens that end an answer.
        blocks: As of `blocks_of`: what scales of weights in fp8 may be for.
    """

    path: Path
    model_type: str
    config: HybridModelConfig
    generation: Mapping[str, Any]
    end_tokens: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @cached_property
    def weights(self) -> dict[str, StoredWeight]:
        """Every weight of the folder by its name.

        Raises:
            ValueError: A file is missing, truncated or no safetensors file; it and one of its weights are named. Or as of
                `with_scales`.
        """
        return with_scales(stored_weights(self.path), self.blocks)

    def check_weights(self) -> None:
        """Reads the headers of all files. Raises ValueError as `weights`, or where there is none."""
        if not self.weights:
            raise ValueError(f"{self.path} has no weights")

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, in the dtypes of the files. Raises ValueError as `weights`."""
        return sum(weight.stored_bytes for weight in self.weights.values())


def open_folder(path: str | os.PathLike[str]) -> HfFolder:
    """Reads what a folder says of its model; no weights yet.

    Raises:
        ValueError: There is no such folder, a file of it cannot be read, or the model is not supported. A name of the Hub gets
            the command that downloads it.
    """
    if not Path(path).is_dir():
        raise ValueError(_no_folder(str(path)))
    folder = Path(path)
    data = _read_json(folder / "config.json")
    if data.get("quantization_config") is None and (folder / _MODELOPT).is_file():
        of_modelopt = Given(_read_json(folder / _MODELOPT), str(folder / _MODELOPT)).inner("quantization")
        data["quantization_config"] = {"quant_method": "modelopt", **of_modelopt.data}
    generation = folder / GENERATION_CONFIG
    found = _read_json(generation) if generation.is_file() else {}
    blocks = blocks_of(Given.of_text(data, str(folder / "config.json")))
    try:
        weights = with_scales(stored_weights(folder), blocks)
    except ValueError:  # raised again where weights are needed; some commands need none
        weights = {}
    # For a config.json that does not say the dtype: that of the weights.
    dtype = "float32" if any(weight.dtype == "float32" for weight in list(weights.values())[:1]) else "bfloat16"
    config = dimensions_of(data, str(folder / "config.json"), dtype=dtype)
    if "lm_head.weight" in weights:
        # transformers' Nemotron-H does not tie them whatever config.json says; other families have the same values twice.
        config = replace(config, tie_embeddings=False)
    if weights:
        config = FAMILIES[data["model_type"]].as_stored(config, weights)
    opened = HfFolder(
        path=folder,
        model_type=str(data.get("model_type")),
        config=config,
        generation=found,
        end_tokens=end_token_ids(folder),
        blocks=blocks,
    )
    if weights:
        vars(opened)["weights"] = weights  # as the property would read them again
    return opened


def _no_folder(path: str) -> str:
    text = f"there is no folder {path}"
    if _HUB_NAME.fullmatch(path):
        folder = path.partition("/")[2]
        text += f"; nothing is downloaded here: run `hf download {path} --local-dir {folder}`, then give ./{folder}"
    return text


def stored_weights(folder: Path) -> dict[str, StoredWeight]:
    """Every weight of a folder's ``*.safetensors`` files by its name, from their headers.

    Raises:
        ValueError: As of `HfFolder.weights`.
    """
    if (folder / _INDEX).is_file():
        return _indexed_weights(folder)
    files = [folder / _ONE_FILE] if (folder / _ONE_FILE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        other = next(iter(sorted(folder.glob("*.bin"))), None)
        hint = f"; {other.name} is not read: convert it to safetensors" if other is not None else ""
        raise ValueError(f"{folder} has no weights: neither {_ONE_FILE} nor {_INDEX}{hint}")
    if len(files) > 1:
        raise ValueError(
            f"{folder} has {len(files)} safetensors files, and no {_INDEX} that says which are the model's"
        )
    return _weights_of(files[0])


def _indexed_weights(folder: Path) -> dict[str, StoredWeight]:
    index = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{folder / _INDEX}: weight_map is no mapping of weights to files")
    found: dict[str, StoredWeight] = {}
    for file_name in sorted(set(index.values())):
        names = [name for name, of in index.items() if of == file_name]
        if Path(file_name).name != file_name:
            raise ValueError(f"{folder / _INDEX}: {names[0]} is in {file_name!r}, which is no file of this folder")
        if not (folder / file_name).is_file():
            raise ValueError(f"{folder / file_name} is missing: it has {_and_more(names)}")
        weights = _weights_of(folder / file_name)
        if absent := [name for name in names if name not in weights]:
            raise ValueError(f"{folder / file_name} lacks {_and_more(absent)}, which the index says it has")
        if unknown := sorted(weights.keys() - set(names)):
            raise ValueError(f"{folder / file_name} has {_and_more(unknown)}, which the index does not say")
        found |= weights
    return found


def _weights_of(file: Path) -> dict[str, StoredWeight]:
    """The weights of one file: 8 bytes with the length of a JSON header, the header, the values."""
    try:
        with open(file, "rb") as opened:
            length = opened.read(8)
            size = os.fstat(opened.fileno()).st_size
            (header_bytes,) = struct.unpack("<Q", length) if len(length) == 8 else (None,)
            if header_bytes is None or not 2 <= header_bytes <= min(size - 8, _HEADER_BYTES):
                raise ValueError(f"{file} is truncated or no safetensors file: {size:,} bytes end in its header")
            header = json.loads(opened.read(header_bytes))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{file} is no safetensors file: its header is no JSON object")
    weights: dict[str, StoredWeight] = {}
    data_bytes = size - 8 - header_bytes
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(fields["dtype"]), tuple(map(operator.index, fields["shape"]))
            begin, end = map(operator.index, fields["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{file} is no safetensors file: its header says nothing of {name}") from None
        if dtype not in DTYPES:
            raise ValueError(f"{file}: {name} has dtype {dtype}, none of {', '.join(DTYPES)}")
        if end - begin != math.prod(shape) * DTYPES[dtype][1]:
            raise ValueError(f"{file}: {name} has {end - begin:,} bytes, not those of {dtype} {list(shape)}")
        if end > data_bytes:
            raise ValueError(f"{file} is truncated: it ends {end - data_bytes:,} bytes before the end of {name}")
        place = 8 + header_bytes + begin
        weights[name] = StoredWeight(name=name, file=file, dtype=DTYPES[dtype][0], shape=shape, offset_bytes=place)
    return weights


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except FileNotFoundError:
        raise ValueError(f"{file.parent} is no Hugging Face folder: it has no {file.name}") from None


def _and_more(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more weights" if len(names) > 1 else "")
