"""GRPO whose trainer has the engine's log-probs, bit for bit, and without: ``python examples/grpo.py [STEPS] [PLOT.png]``.

Trains `tiny` on answers that say one token often. The policy that generates is the one that is trained, so each step's ratio is 1, up to
rounding by default, exactly with ``exact="bits"`` and `invariant_forward`. About a minute.
"""

import logging
import sys
from contextlib import nullcontext

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine, invariant_forward
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform

ensure_platform(device="cpu")  # must run before other imports of megatron
from megatron.core.inference.sampling_params import SamplingParams  # noqa: E402

torch.set_num_threads(1)  # products are small
logging.getLogger("megatron_hybrid_prefix").setLevel(logging.ERROR)  # each resume() says what it drops
STEPS, WANTED, PROMPTS, GROUP, ANSWER, BLOCK = int(sys.argv[1]) if sys.argv[1:] else 50, 32, 2, 8, 24, 64
SAMPLING = SamplingParams(
    num_tokens_to_generate=ANSWER, termination_id=-1, return_log_probs=True, skip_prompt_log_probs=True, temperature=1.0
)


def plain_log_probs(logits, tokens):
    """As a trainer computes them."""
    return logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


def train(exact):
    """What each step's KL between engine and trainer is, and its mean reward."""
    model = build_hybrid_model("tiny", seed=0).requires_grad_()
    engine = build_engine(model, prefix=HybridPrefixConfig(cache_gb=0.1, exact=exact), block_size_tokens=BLOCK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(STEPS):
        prompts = [f"{step}, {number}: say it".ljust(100) for number in range(PROMPTS) for _ in range(GROUP)]
        requests = [record.merge() for record in engine.generate(prompts, SAMPLING)]
        engine.suspend()
        generated = torch.tensor([request.generated_log_probs for request in requests])
        tokens = torch.tensor([[*request.prompt_tokens, *request.generated_tokens] for request in requests])
        rewards = (tokens[:, -ANSWER:] == WANTED).float().mean(1).view(PROMPTS, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        with invariant_forward(model, block_size_tokens=BLOCK) if exact else nullcontext(plain_log_probs) as log_probs:
            logits = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
            trained = log_probs(logits, tokens)[:, -ANSWER:]
        assert not exact or torch.equal(trained, generated), "the policy that is trained is not the one that generated"
        (-(trained - generated).exp() * advantages.view(-1, 1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.resume()  # nothing of the old weights is reused
        difference = (trained.detach() - generated).double()
        yield float((difference.expm1() - difference).mean()), float(rewards.mean())  # k3, an estimate of the KL


def draw(path, found):
    """The KL of both, by step."""
    import matplotlib.pyplot as plt

    for name, steps in found.items():
        plt.plot(*zip(*enumerate((kl for kl, _ in steps), 1), strict=True), label=name)
    plt.yscale("symlog", linthresh=1e-15)
    plt.xlabel("step of GRPO")
    plt.ylabel("KL of engine and trainer (k3), nats a token")
    plt.legend()
    plt.savefig(path)


found = {}
for name, exact in ("by default", None), ("invariant_forward", "bits"):
    found[name] = []
    for kl, reward in train(exact):
        found[name].append((kl, reward))
        if len(found[name]) % 10 in (0, 1):
            print(f"{name}, step {len(found[name])}: KL {kl:.1e}, reward {reward:.3f}", flush=True)
    print(
        f"{name}: mean KL {sum(kl for kl, _ in found[name]) / STEPS:.1e}, largest {max(found[name])[0]:.1e}", flush=True
    )
if sys.argv[2:]:
    draw(sys.argv[2], found)
