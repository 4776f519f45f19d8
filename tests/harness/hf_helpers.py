"""A tiny random model of Hugging Face, its answers, and the same dimensions as a `HybridModelConfig`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models import (
    build_hybrid_model,
    load_checkpoint,
    open_folder,
    save_checkpoint,
    save_hf_folder,
)
from megatron_hybrid_prefix.models.hf.dimensions import dimensions_of
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from tests.harness.engine_helpers import greedy, run_to_end, unequal
from tests.harness.hf_families import MODELS
from tests.harness.hf_state_dict import hf_shapes
from tests.harness.limits import HANG_S
from tests.harness.workers.launch import run_play

WORKERS = Path(__file__).parent / "workers"
NEW_TOKENS = 8


def config_json(kind: str, *, tied: bool = False) -> dict[str, Any]:
    """What the ``config.json`` of a tiny model of `tests.harness.hf_families` says."""
    model = MODELS[kind]
    own = {"model_type": model.model_type, "dtype": "float32", "tie_word_embeddings": tied}
    return {**model.dimensions, **own, "max_position_embeddings": 2048}


# The dimensions as the package reads them; parity with the answers of transformers shows that they are right.
CONFIGS = {kind: dimensions_of(config_json(kind), kind) for kind in MODELS}
NEMOTRON_H, NEMOTRON_H_EXPERTS, QWEN3_NEXT = (CONFIGS[k] for k in ("nemotron_h", "nemotron_h_experts", "qwen3_next"))


def make_folder(
    folder: Path, kind: str = "nemotron_h", *, shards: int = 1, tied: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A folder with random weights; returns them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(kind, tied=tied)))
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in hf_shapes(CONFIGS[kind], MODELS[kind].model_type).items()
        if not (tied and name == "lm_head.weight")
    }
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        save_shards(folder, *(dict(list(weights.items())[number::shards]) for number in range(shards)))
    return weights


def save_shards(folder: Path, *parts: dict[str, torch.Tensor]) -> None:
    """Saves weights in a file each, with an index."""
    index = {}
    for number, weights in enumerate(parts):
        file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        save_file(weights, folder / file)
        index |= dict.fromkeys(weights, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def save_tokenizer(folder: Path, *special: str) -> None:
    """A tokenizer of single bytes, ids 0 to 255 in ByteLevel's order, and special tokens behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))


def make_references(asked: dict[Path, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """State dict, and tokens and logits of prompts with their greedy continuation, of each folder. It gets the model's files.

    One process makes them all.
    """
    for folder, wanted in asked.items():
        folder.mkdir(exist_ok=True)
        (folder / "asked.json").write_text(json.dumps(wanted))
    run_transformers("hf_reference.py", *asked)
    return {folder: load_reference(folder) for folder in asked}


def logits_of_transformers(tokens: dict[Path, list[int]]) -> dict[Path, dict[str, Any]]:
    """What `tests/harness/workers/hf_logits.py` finds for each folder."""
    for folder, wanted in tokens.items():
        (folder / "tokens.json").write_text(json.dumps(wanted))
    run_transformers("hf_logits.py", *tokens)
    return {folder: torch.load(folder / "logits.pt", weights_only=True) for folder in tokens}


def run_transformers(worker: str, *folders: Path) -> None:
    """Runs a worker in a process that sees no GPU and no network."""
    result = subprocess.run(
        [sys.executable, str(WORKERS / worker), *map(str, folders)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def load_reference(folder: Path) -> dict[str, Any]:
    """What `make_references` left in a folder."""
    return torch.load(folder / "out.pt", weights_only=True)


def answers_of_a_batch(model: Any, reference: dict[str, Any]) -> dict[int, Any]:
    """All prompts together, prefills of several lengths, then batched decodes: finished requests by the case's number."""
    engine = build_engine(model, materialize_only_last_token_logits=False)
    finished: dict[int, Any] = {}
    for number, case in enumerate(reference["cases"]):
        engine.add_request(number, case["tokens"][: case["length"]], greedy(NEW_TOKENS, skip_prompt_log_probs=False))
    run_to_end(engine, finished)
    return finished


def assert_same_answer(request: Any, case: dict[str, Any]) -> float:
    """Tokens, and log-probs of prompt and answer within 1e-4; returns how far off the worst log-prob is."""
    length = case["length"]
    assert list(request.generated_tokens) == case["tokens"][length:]
    right = torch.log_softmax(case["logits"].double(), -1)[:-1]
    right = right.gather(1, torch.tensor(case["tokens"][1:])[:, None])[:, 0]
    got = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs], dtype=torch.float64)
    assert got.shape == right.shape
    gap = float((got - right).abs().max())
    assert gap <= 1e-4, f"prompt of {length} tokens"
    return gap


class PromptLogits:
    """Logits after every token of a prompt, as the engine's prefill computes them.

    One engine, built once: weights may change between two prompts.
    """

    def __init__(self, model: Any, **fields: Any) -> None:
        self.model = model
        self.engine = build_engine(model, materialize_only_last_token_logits=False, **fields)
        self.next_id = 0

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        """(tokens, vocabulary), on the CPU; nothing of use on a pipeline stage without an output layer."""
        seen: list[torch.Tensor] = []
        hook = self.model.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
        try:
            self.engine.add_request(self.next_id, tokens, greedy(1, skip_prompt_log_probs=False))
            self.next_id += 1
            run_to_end(self.engine, {})
        finally:
            hook.remove()
        return seen[0].reshape(-1, seen[0].shape[-1])[: len(tokens)].cpu()


def on_ranks(_, *names):
    """Folders of `make_references` on this rank: models are built with the name alone.

    A checkpoint in FOLDER/mcore must hold the same weights; this layout's is saved into FOLDER/mcore-again. A part of a model
    cannot be saved as a folder.
    """
    found = {}
    for folder in map(Path, names):
        read = []
        model = build_hybrid_model(hf=folder, on_read=lambda *values, read=read: read.append(values))
        held = sum(value.numel() for _, value in parameters_by_global_name(model))
        of_folder = {"values_read": read[-1][0], "values_held": held}
        if (folder / "mcore").is_dir():
            save_checkpoint(model, folder / "mcore-again")
            other = build_hybrid_model(open_folder(folder).config, seed=5)
            load_checkpoint(other, folder / "mcore")
            of_folder["unequal"] = unequal(model, other)
        try:
            save_hf_folder(model, folder / "part")
        except ValueError as error:
            of_folder["not_saved"] = str(error)
        found[folder.name] = of_folder | gaps(model, load_reference(folder))
    return found


def run_folders(tmp_path, layout, *folders):
    """What each of two ranks in this layout (tp, pp, ep, etp) finds of folders."""
    part = ["tests.harness.hf_helpers:on_ranks", *map(str, folders)]
    sizes = dict(zip(("tp", "pp", "ep", "etp"), layout, strict=True))
    return [found["folders"] for found in run_play(tmp_path, {"sizes": sizes, "parts": {"folders": part}})]


def gaps(model, reference):
    """Largest gaps of a model to its reference, of logits and of log-probs; the greedy answers must be the same.

    A pipeline stage without an output layer has the log-probs, and no logits.
    """
    answers, cases = answers_of_a_batch(model, reference), reference["cases"]
    found = {"log_probs_gap": max(assert_same_answer(answers[n], case) for n, case in enumerate(cases))}
    prompt_logits = PromptLogits(model)
    for case in cases:
        logits = prompt_logits(case["tokens"])
        if model.post_process:
            gap = float((logits - case["logits"]).abs().max())
            found["logits_gap"] = max(gap, found.get("logits_gap", 0.0))
    return found
