"""Replay a question session about this project's own source, caching off and upstream's, and compare.

The shared context is real text: the package's own files, in bytes. The model's weights are random, so the answers are
noise; what is shown is the cache: which prompt tokens were computed and which reused, how long the first token took,
and whether the tokens and log-probs are those of caching off.

The turns have different lengths, so that prompts end anywhere in a block. The last turn asks for turn 5 again, and the
context is cut so that this prompt ends 2 tokens behind a block boundary: upstream 0.19 then continues from a wrong
convolution window, which the comparison shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_hybrid_prefix.cli import generate
from megatron_hybrid_prefix.console.prompts import Reader
from megatron_hybrid_prefix.console.terminal import (
    ArgumentParser,
    Interrupt,
    as_input_errors,
    check_writable,
    is_main_rank,
    run_command,
    write_json,
)
from megatron_hybrid_prefix.tokenizer import ByteTokenizer

PACKAGE = Path(__file__).resolve().parents[1]
CONTEXT_FILES = ("mcore/entrypoints/build.py", "mcore/runner.py")
CONTEXT_BYTES = 8000  # cut by less than a block so that the repeated prompt ends where it should
BLOCK_TOKENS = 256
TAIL_TOKENS = 2
ANSWER_TOKENS = 24
SYSTEM = "You answer questions about the source code that follows, briefly and with the names that it uses."
QUESTIONS = (
    "Which function builds the engine, and what does it take?",
    "How does the runner find out how many prompt tokens were computed and how many were skipped? Name the counter "
    "that it reads, and say why the engine's own number of cached tokens is not used.",
    "Why?",
    "What happens to a request that does not fit into the key-value blocks? Say which exception is raised, what its "
    "message tells the user to change, and whether the other requests of the same batch go on.",
    "And when a user presses Ctrl-C in the middle of a batch?",
)


def make_conversation() -> dict[str, object]:
    """The session, with the context cut to the length that the repeated prompt needs."""
    text = "".join(f"# {name}\n{(PACKAGE / name).read_text(encoding='utf-8')}\n" for name in CONTEXT_FILES)
    context = text.encode("ascii", errors="replace").decode()[:CONTEXT_BYTES]  # one byte, one token a character
    repeated_tokens = _prompt_tokens(context)
    context = context[: len(context) - (repeated_tokens - TAIL_TOKENS) % BLOCK_TOKENS]
    assert _prompt_tokens(context) % BLOCK_TOKENS == TAIL_TOKENS
    return _conversation(context)


def _conversation(context: str) -> dict[str, object]:
    return {"system": SYSTEM, "context": context, "turns": [*QUESTIONS, {"regenerate": True}]}


def _prompt_tokens(context: str) -> int:
    """Tokens of the last prompt: the session is read the way `generate` reads it."""
    reader = Reader(tokenizer=ByteTokenizer(), vocab_size=ByteTokenizer().vocab_size, add_bos=False, sampling={})
    conversation = reader.conversation(_conversation(context), "demo")
    return len(conversation.play(lambda request: [0] * ANSWER_TOKENS)[-1].tokens)


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> None:
    """Write the session to a file and hand it to `generate`."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results (default: %(default)s)")
    parser.add_argument("--preset", help="default: tiny on CPU, small on GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a device")
    args = parser.parse_args(argv)
    with as_input_errors(OSError, prefix=f"cannot make {args.out}: "):
        args.out.mkdir(parents=True, exist_ok=True)
    session = args.out / "demo_session.json"
    check_writable(session)
    write_json(session, make_conversation())
    if is_main_rank():
        print("A question session about this project's source, with caching off, upstream's cache and this one's.")
        print("The weights are random, so the answers are noise; what is shown is the cache.")
        print(f"The last turn sends a prompt again that ends {TAIL_TOKENS} tokens behind a block boundary, where")
        print("upstream 0.19 is known to give other log-probs than without a cache.", flush=True)
    options = ["--conversation", session, "--preset", args.preset or default_preset(args.device)]
    options += ["--compare", "off,upstream,ours", "--num-tokens-to-generate", ANSWER_TOKENS, "--ignore-eos"]
    options += ["--block-size-tokens", BLOCK_TOKENS, "--json", args.out / "demo.json", "--plot", args.out / "demo.png"]
    options += ["--device", args.device] if args.device else []
    generate.run([str(option) for option in options], interrupt)


def default_preset(device: str | None) -> str:
    """A model that the device runs in seconds."""
    import torch

    return "small" if device != "cpu" and torch.cuda.is_available() else "tiny"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns its exit code."""
    return run_command(lambda interrupt: run(argv, interrupt))
