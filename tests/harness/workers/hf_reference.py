"""Write a random model of Hugging Face, prompts, its greedy continuations and its logits to a folder.

A process of its own: transformers must not see the mamba packages, whose compiled parts may be missing, and megatron
must. Usage: ``python hf_reference.py FOLDER...``. FOLDER/asked.json holds "config_class" and "model_class" (such as
"NemotronHForCausalLM"), "dimensions" (fields of the config class), "prompt_lengths", "new_tokens", "seed" and perhaps
"max_shard_size". FOLDER gets ``out.pt``, and what ``save_pretrained`` writes.
"""

import json
import sys
from pathlib import Path

# Makes `import` raise and `find_spec` find nothing, so transformers takes its own PyTorch path.
for hidden in ("mamba_ssm", "causal_conv1d", "fla"):
    sys.modules[hidden] = None

import torch  # noqa: E402
import transformers  # noqa: E402

# A prompt is drawn again where a router chose an expert by less: rounding might choose another one.
ROUTER_MARGIN = 2e-5


@torch.no_grad()
def randomise(model, generator):
    """Weights large enough that every one of them shows in the logits; no two values are alike."""

    def uniform(value, low, high):
        value.copy_(torch.rand(value.shape, generator=generator) * (high - low) + low)

    for name, value in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last == "A_log":
            uniform(value, 0.05, 2.0)
            value.log_()
        elif last == "dt_bias":
            uniform(value, -4.0, -1.0)
        elif value.dim() == 1 and "norm" in name:
            centre = float(value[0])  # 0 where the norm multiplies by 1 + weight
            uniform(value, centre - 0.5, centre + 0.5)
        elif value.dim() == 1 or "conv1d" in name:  # D, the convolution and its bias
            uniform(value, -0.7, 0.7)
        else:
            std = (0.25 if model.config.tie_word_embeddings else 1.0) if "embed" in name else value.shape[-1] ** -0.5
            value.copy_(torch.randn(value.shape, generator=generator) * std * (2.0 if "lm_head" in name else 1.0))
    for name, value in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            uniform(value, -0.3, 0.3)


def watch_routers(model):
    """List that gets, at each forward of a router, the least by which an expert was chosen before another."""
    margins = []

    def hook(router, args, output):
        scores = output[0].float()
        if hasattr(router, "e_score_correction_bias"):  # a sigmoid, a bias, and perhaps groups of experts
            scores = scores.sigmoid() + router.e_score_correction_bias
            if router.topk_group < router.num_group:
                rated = scores.view(len(scores), router.num_group, -1).topk(2, dim=-1).values.sum(-1)
                note(rated, router.topk_group)
                chosen = torch.zeros_like(rated).scatter_(1, rated.topk(router.topk_group).indices, 1)
                left = chosen.repeat_interleave(router.num_experts // router.num_group, dim=1).bool()
                scores = scores.masked_fill(~left, float("-inf"))
        note(scores, router.top_k)

    def note(scores, count):
        best = scores.topk(count + 1, dim=-1).values
        margins.append(float((best[..., -2] - best[..., -1]).min()))

    for module in model.modules():
        if hasattr(module, "top_k") and hasattr(module, "num_experts"):
            module.register_forward_hook(hook)
    return margins


@torch.no_grad()
def main(folder):
    folder = Path(folder)
    asked = json.loads((folder / "asked.json").read_text())
    generator = torch.Generator().manual_seed(asked["seed"])
    config = getattr(transformers, asked["config_class"])(**asked["dimensions"])
    model = getattr(transformers, asked["model_class"])(config).float().eval()
    randomise(model, generator)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))  # megatron does not clamp dt
    margins = watch_routers(model)
    cases = [answer(model, length, asked["new_tokens"], generator, margins) for length in asked["prompt_lengths"]]
    state_dict = dict(model.state_dict())
    model.save_pretrained(folder, max_shard_size=asked.get("max_shard_size", "5GB"))
    torch.save({"state_dict": state_dict, "cases": cases}, folder / "out.pt")


def answer(model, length, new_tokens, generator, margins):
    """A random prompt with its continuation, and logits after each token. No cache: a step is one forward of all tokens."""
    for _ in range(100):
        margins.clear()
        tokens = torch.randint(0, model.config.get_text_config().vocab_size, (1, length), generator=generator)
        for step in range(new_tokens + 1):
            logits = model(tokens, use_cache=False).logits
            if min(margins, default=1.0) < ROUTER_MARGIN:
                break
            if step == new_tokens:
                return {"length": length, "tokens": tokens[0].tolist(), "logits": logits[0]}
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    raise SystemExit(f"no prompt of {length} tokens whose experts are chosen by {ROUTER_MARGIN}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
