"""Train a byte-level hybrid (Mamba2, attention, MLP; 25 million parameters) in minutes, and save it as a Hugging Face folder.

    python examples/train_bytes.py --out out/bytes-25m               # one GPU
    python examples/train_bytes.py --size tiny --steps 20 --out out/bytes-tiny   # the CPU, a try
    hybrid-prefix generate "def main(" --hf out/bytes-25m

The text is what an installation has: the topics of Python's help(), the standard library's sources, and this repository. Every twentieth
file is held out. The model is megatron-core's, from `build_hybrid_model`, and so is the training forward; without mamba-ssm the Mamba2
layers run as PyTorch (`platform/kernels/training.py`). Parameters and optimizer are float32, on a GPU with bfloat16 autocast. The
learning rate follows the clock. Longer than the other examples, because it is a whole training.
"""

import argparse
import contextlib
import hashlib
import json
import math
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import HybridModelConfig, build_hybrid_model, save_hf_folder
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.text.tokenizer import HuggingFaceTokenizer

END = 256  # the token behind each file; bytes are tokens 0 to 255
SIZES = {
    "25m": HybridModelConfig(
        layer_pattern="M-M-M*-M-M-M*-M-",
        hidden_size=512,
        vocab_size=264,
        max_sequence_length=8192,
        mamba_num_heads=16,
        mamba_head_dim=64,
        mamba_state_dim=64,
        mamba_num_groups=2,
        chunk_size=64,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=64,
        ffn_hidden_size=1536,
        dtype="float32",
    ),
}
SIZES["tiny"] = replace(
    SIZES["25m"],
    **{"layer_pattern": "M-M*-", "hidden_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_state_dim": 16},
    **{"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16, "ffn_hidden_size": 128},
)
PROMPTS = ('"""Return the ', "class Stack:\n    def push(self, ", 'The "with" statement ')


def read_texts():
    """Names and texts: topics of help(), sources of the standard library, documents and sources of this repository."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", topics[name]
    library, here = Path(sysconfig.get_path("stdlib")), Path(__file__).resolve().parents[1]
    tables = {"site-packages", "dist-packages", "encodings", "pydoc_data"}  # of others, of characters, and read above
    files = [("library", library, library.rglob("*.py"))]
    for folder in ("docs", "examples", "megatron_hybrid_prefix", "tests"):
        files += [("repository", here, (here / folder).rglob(ending)) for ending in ("*.py", "*.md")]
    files.append(("repository", here, here.glob("*.md")))
    for source, root, found in files:
        for file in sorted(found):
            inside = file.relative_to(root)
            if not tables & set(inside.parts):
                with contextlib.suppress(UnicodeDecodeError):  # tests of encodings
                    yield f"{source}/{inside.as_posix()}", file.read_text(encoding="utf-8")


def tokens_of_texts():
    """Training and held-out tokens, bytes and `END`, as int16; every twentieth file by its name is held out."""
    parts = ([], [])
    for name, text in read_texts():
        if text:
            held_out = hashlib.blake2b(name.encode(), digest_size=4).digest()[0] % 20 == 0
            values = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            parts[held_out].extend((values.short(), torch.tensor([END], dtype=torch.int16)))
    return tuple(map(torch.cat, parts))


def losses(model, rows):
    """Cross-entropy in nats of every next token: (rows, tokens - 1)."""
    inputs = rows[:, :-1].contiguous()
    positions = torch.arange(inputs.shape[1], device=rows.device).expand_as(inputs)
    cuda = rows.device.type == "cuda"
    with torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext():
        return model(input_ids=inputs, position_ids=positions, attention_mask=None, labels=rows[:, 1:].contiguous())


class Trainer:
    """The model, its optimizer, and what to do if a step fails."""

    def __init__(self, model, arguments):
        from megatron.core.ssm import mamba_mixer

        self.model, self.arguments, self.mixer = model.requires_grad_().train(), arguments, mamba_mixer
        self.eager = mamba_mixer.mamba_split_conv1d_scan_combined
        device = next(model.parameters()).device
        self.compiled = arguments.compile and device.type == "cuda"
        if self.compiled:
            mamba_mixer.mamba_split_conv1d_scan_combined = torch.compile(self.eager)
        self.rows_at_once = arguments.batch
        matrices = [weight for weight in model.parameters() if weight.dim() == 2]
        others = [weight for weight in model.parameters() if weight.dim() != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")

    def step(self, rows, rate):
        """One step on (batch, tokens + 1); returns its loss. Does without the compiler, or with fewer rows at once, if it must."""
        while True:
            try:
                loss = 0.0
                for part in rows.split(self.rows_at_once):
                    share = losses(self.model, part).mean() * (len(part) / len(rows))
                    share.backward()
                    loss += share.detach()
                break
            except torch.OutOfMemoryError:
                if self.rows_at_once == 1:
                    raise
                self.rows_at_once //= 2
                print(f"out of memory: {self.rows_at_once} rows at once", flush=True)
            except Exception as error:  # the compiler raises anything
                if not self.compiled:
                    raise
                self.compiled, self.mixer.mamba_split_conv1d_scan_combined = False, self.eager
                print(f"torch.compile failed, without it: {type(error).__name__}: {str(error)[:500]}", flush=True)
            self.optimizer.zero_grad()
            if rows.is_cuda:
                torch.cuda.empty_cache()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


@torch.no_grad()
def bits_per_byte(model, tokens, arguments, most_windows=None):
    """Mean bits of each token given those before it in its window; the end of a file counts as a byte."""
    length = arguments.tokens
    starts = range(0, len(tokens) - length, length)
    starts = starts[:: max(1, len(starts) // most_windows)] if most_windows else starts
    windows = [tokens[start : start + length + 1] for start in starts]
    nats = 0.0
    with torch.compiler.set_stance("force_eager"):
        for rows in torch.stack(windows).split(arguments.batch):
            nats += float(losses(model, rows.long()).sum())
    return nats / (len(windows) * length) / math.log(2)


def train(model, train_tokens, held_out, arguments):
    """Trains until the clock or the steps end. Returns [step, seconds, loss in bits per byte] lines, and held-out ones."""
    trainer, device = Trainer(model, arguments), train_tokens.device
    generator = torch.Generator().manual_seed(arguments.seed)
    offsets = torch.arange(arguments.tokens + 1)
    curve, held_out_curve, step, started_s, seen_s, seen_step = [], [], 0, 0.0, 0.0, 0
    while True:
        elapsed_s = time.perf_counter() - started_s if step else 0.0
        done = max(elapsed_s / (60 * arguments.minutes), step / arguments.steps if arguments.steps else 0.0)
        if done >= 1:
            break
        rate = arguments.rate * min(1.0, done / 0.03 + 0.01) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        starts = torch.randint(0, len(train_tokens) - arguments.tokens, (arguments.batch, 1), generator=generator)
        rows = train_tokens[(starts + offsets).to(device)].long()
        loss = trainer.step(rows, rate) / math.log(2)
        if not math.isfinite(loss):
            raise SystemExit(f"the loss is {loss} in step {step}: try a smaller --rate")
        step += 1
        if step == 1:  # without the time of compilers
            started_s = time.perf_counter()
        elapsed_s = time.perf_counter() - started_s
        if step <= 3 or elapsed_s - seen_s >= arguments.say_s:
            speed = (step - seen_step) * rows[:, 1:].numel() / max(elapsed_s - seen_s, 1e-9)
            said = f"{speed:9,.0f} tokens/s" if step > 1 else "(first step)"
            print(f"step {step:5d}  {loss:.4f} bits/byte  {said}  rate {rate:.1e}  {elapsed_s:6.1f} s", flush=True)
            curve.append([step, round(elapsed_s, 1), round(loss, 4)])
            seen_s, seen_step = elapsed_s, step
        if done >= 0.25 * (len(held_out_curve) + 1):
            bits = bits_per_byte(model, held_out, arguments, most_windows=4 * arguments.batch)
            print(f"step {step:5d}  held out (a part): {bits:.4f} bits/byte", flush=True)
            held_out_curve.append([step, round(elapsed_s, 1), round(bits, 4)])
            seen_s, seen_step = time.perf_counter() - started_s, step
    report = {"steps": step, "seconds": round(elapsed_s, 1), "tokens": step * arguments.batch * arguments.tokens}
    report |= {"compiled": trainer.compiled, "rows_at_once": trainer.rows_at_once}
    trainer.mixer.mamba_split_conv1d_scan_combined = trainer.eager
    return report | {"curve": curve, "held_out_curve": held_out_curve}


def save_tokenizer(folder):
    """A token per byte, whose id is the byte, and one behind each text. The chat template puts messages one below the other."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # ByteLevel's: they stand for themselves
    others = [byte for byte in range(256) if byte not in visible]
    symbols = {byte: chr(byte) for byte in visible} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in symbols.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    assert tokenizer.token_to_id("<|endoftext|>") == END
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    settings["chat_template"] = "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def samples(folder, tokens):
    """What the saved model writes, through the engine with its prefix cache."""
    from megatron.core.inference.sampling_params import SamplingParams

    model, tokenizer = build_hybrid_model(hf=folder), HuggingFaceTokenizer(folder)
    prefix = HybridPrefixConfig(cache_gb=0.3)
    engine = build_engine(model, prefix, tokenizer=tokenizer, max_sequence_length=1024)
    sampling = SamplingParams(num_tokens_to_generate=tokens, temperature=0.7, top_p=0.95, termination_id=END)
    with torch.inference_mode():
        records = engine.generate(list(PROMPTS), sampling)
    return [prompt + record.merge().generated_text for prompt, record in zip(PROMPTS, records, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the Hugging Face folder")
    parser.add_argument("--minutes", type=float, default=4.5, help="of training, after the first step")
    parser.add_argument("--steps", type=int, help="stop after so many, if that is earlier")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out-rows", type=int, help="measure on so many in the end (default: all)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="the scan, on a GPU")
    parser.add_argument("--say-s", type=float, default=5.0, help="seconds between lines")
    arguments = parser.parse_args()
    platform = ensure_platform(device=arguments.device)
    print(platform.describe(), flush=True)
    train_tokens, held_out = (part.to(platform.device) for part in tokens_of_texts())
    print(f"text: {len(train_tokens):,} bytes to train on, {len(held_out):,} held out", flush=True)
    if min(len(train_tokens), len(held_out)) < 2 * arguments.tokens:
        raise SystemExit("too little text: is the standard library's source installed?")
    model = build_hybrid_model(SIZES[arguments.size], seed=arguments.seed)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"model: {SIZES[arguments.size].layer_pattern}, {count:,} parameters", flush=True)
    report = train(model, train_tokens, held_out, arguments)
    with torch.no_grad():
        for weight in model.parameters():  # what is saved is what is measured
            weight.copy_(weight.bfloat16())
    report["held_out_bits_per_byte"] = round(bits_per_byte(model, held_out, arguments, arguments.held_out_rows), 4)
    report |= {"parameters": count, "platform": platform.describe(), "training_bytes": len(train_tokens)}
    report |= {
        "held_out_bytes": len(held_out),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
    }
    print(f"held out: {report['held_out_bits_per_byte']} bits/byte after {report['tokens']:,} tokens", flush=True)
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.95}
    save_hf_folder(model, arguments.out, generation={"eos_token_id": END, "pad_token_id": END, **sampling})
    save_tokenizer(arguments.out)
    (arguments.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"saved {arguments.out}: {size / 1e6:.1f} MB", flush=True)
    del model
    print(*samples(arguments.out, 400), sep="\n" + "-" * 79 + "\n", flush=True)
    shut_down()


if __name__ == "__main__":
    main()
