"""Logits of transformers for models in folders. Usage: ``python hf_logits.py FOLDER...``.

A process of its own, as `hf_reference`. FOLDER/tokens.json is a list of tokens; FOLDER gets ``logits.pt``: the name of the
class, what was missing or unknown among the weights, (tokens, vocabulary), and the weights, those in fp8 dequantised.
"""

import json
import sys
from pathlib import Path

for hidden in ("mamba_ssm", "causal_conv1d", "fla"):
    sys.modules[hidden] = None

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.quantizers import quantizer_finegrained_fp8  # noqa: E402

quantizer_finegrained_fp8.is_accelerate_available = lambda: True  # it is asked for, and not used on a CPU


@torch.no_grad()
def main(folder):
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    tokens = torch.tensor([json.loads((folder / "tokens.json").read_text())])
    logits = model.eval()(tokens, use_cache=False).logits[0]
    wrong = [name for names in loading.values() for name in map(str, names)]
    found = {"class": type(model).__name__, "wrong": wrong, "logits": logits, "state_dict": dict(model.state_dict())}
    torch.save(found, folder / "logits.pt")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(Path(name))
