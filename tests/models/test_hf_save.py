"""A model that was trained here, saved as a Hugging Face folder: read again by this package and by transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("safetensors")

from megatron.core.inference.utils import InferenceMode

from megatron_hybrid_prefix.models import build_hybrid_model, open_folder, save_hf_folder
from tests.harness.engine_helpers import random_tokens
from tests.harness.hf_helpers import NEMOTRON_H, PromptLogits
from tests.harness.hf_state_dict import hf_shapes
from tests.harness.limits import HANG_S
from tests.harness.naive_model import NaiveHybridModel

TOKENS = random_tokens(100, seed=1, vocabulary=NEMOTRON_H.vocab_size)

# transformers must not see the mamba packages, whose compiled parts may be missing.
TRANSFORMERS = """
import sys
for hidden in ("mamba_ssm", "causal_conv1d", "fla"):
    sys.modules[hidden] = None
import torch, transformers
folder, tokens = sys.argv[1], torch.tensor([list(map(int, sys.argv[2].split(",")))])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
assert type(model).__name__ == "NemotronHForCausalLM"
with torch.no_grad():
    torch.save(model(tokens, use_cache=False).logits[0], folder + "/logits.pt")
"""


def training_logits(model, rows):
    """(rows, tokens, vocabulary), from megatron's forward outside of inference."""
    positions = torch.arange(rows.shape[1]).expand_as(rows)
    engine_is_active = InferenceMode.is_active()  # another test of this process left its engine
    InferenceMode.unset_active()
    try:
        return model(input_ids=rows, position_ids=positions, attention_mask=None)
    finally:
        if engine_is_active:
            InferenceMode.set_active()


@pytest.fixture(scope="module")
def trained(platform):
    """Three steps from random weights, and the losses."""
    model = build_hybrid_model(NEMOTRON_H, seed=3, platform=platform).requires_grad_().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows, losses = torch.tensor(TOKENS).view(2, -1), []
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(3):
        logits = training_logits(model, rows)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0] - 0.5
    assert [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])] == []
    return model


def test_the_training_forward_is_the_model(trained):
    naive = NaiveHybridModel(trained, NEMOTRON_H).logits(TOKENS)
    torch.testing.assert_close(training_logits(trained, torch.tensor([TOKENS]))[0].double(), naive, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_comes_back(trained, platform, tmp_path, dtype):
    save_hf_folder(trained, tmp_path / "model", dtype=dtype, generation={"eos_token_id": 5})
    folder = open_folder(tmp_path / "model")
    assert folder.config == replace(NEMOTRON_H, dtype=dtype) and folder.end_tokens == (5,)
    assert {name: weight.shape for name, weight in folder.weights.items()} == hf_shapes(NEMOTRON_H)
    assert {weight.dtype for weight in folder.weights.values()} == {dtype}
    again = build_hybrid_model(replace(folder.config, dtype="float32"), hf=folder, platform=platform)
    weights = dict(again.named_parameters())
    for name, weight in trained.named_parameters():
        assert torch.equal(weights.pop(name), weight.detach().to(getattr(torch, dtype)).float()), name
    assert not weights


def test_what_cannot_be_saved(platform, tmp_path, trained, monkeypatch):
    monkeypatch.setattr(trained, "hybrid_config", replace(NEMOTRON_H, qk_norm=True))
    with pytest.raises(ValueError, match=r"^nemotron_h has qk_norm=False \(not True\)$"):
        save_hf_folder(trained, tmp_path, model_type="nemotron_h")
    monkeypatch.setattr(trained, "hybrid_config", replace(NEMOTRON_H, ffn_hidden_size=64))
    with pytest.raises(ValueError, match=r"linear_fc1\.weight has shape .*sharded"):
        save_hf_folder(trained, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_transformers_gives_the_same_logits(trained, platform, tmp_path):
    pytest.importorskip("transformers")
    save_hf_folder(trained, tmp_path, dtype="float32")
    assert json.loads((tmp_path / "config.json").read_text())["time_step_min"] == 0.0  # else it clamps the step size
    done = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS, str(tmp_path), ",".join(map(str, TOKENS))],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.load(tmp_path / "logits.pt", weights_only=True)
    ours = PromptLogits(build_hybrid_model(hf=tmp_path, platform=platform))(TOKENS)
    assert float(theirs.std()) > 0.5
    assert float((ours - theirs).abs().max()) <= 1e-4
