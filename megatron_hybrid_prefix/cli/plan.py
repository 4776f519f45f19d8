"""Plan memory for prefix caching of a hybrid model: what a budget holds, and which budget to raise first.

examples:
    hybrid-prefix plan --hf ./NVIDIA-Nemotron-Nano-9B-v2 --gpu-gb 80
    hybrid-prefix plan nemotron-h-8b --cache-gb 40 --host-gb 64
    hybrid-prefix plan arguments.yaml --cache-gb 40 --tp 2 --speculative-tokens 3
    hybrid-prefix plan config.json --cache-gb 40 --trace trace.jsonl --json plan.json

MODEL is a preset, a YAML or JSON file of Megatron arguments, or a Hugging Face config.json (or its folder). Budgets are
in GiB per rank.

--gpu-gb with --hf or a preset: what fits GPUs of this size at each tensor-parallel size, and which budget to give. A
conversation that is kept has its KV and a checkpoint. 10 % of a GPU stay free for activations. A folder needs config.json
only.

--cache-gb: the budget that KV, checkpoints and states of running requests share. --mamba-gb limits the checkpoints in it.
--host-gb adds a host tier.

--prefill-tokens-per-s: from how many tokens on it is faster to load a prefix from a shared tier (--shared of serve) than
to compute it, by what the disk or the network gives each rank. It is the value for min_tokens in the URL.

With --trace, the recorded requests are replayed at this budget (as by hybrid-prefix replay). Then each option is raised by
the same amount in turn, and the one that gains most is recommended. The time of loading from the host is not counted.

Needs neither a GPU nor torch.

exit code: 0; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.config import add_removed_flags
from megatron_hybrid_prefix.console.engine_options import check_cap, positive_float, positive_int, whole_number
from megatron_hybrid_prefix.console.hf import add_hf_option, folder_of
from megatron_hybrid_prefix.console.terminal import (
    ArgumentParser,
    InputError,
    Interrupt,
    Stopped,
    as_input_errors,
    check_writable,
    command_line,
    output_console,
    printable,
    run_command,
    write_json,
)
from megatron_hybrid_prefix.lab.break_even import GB, break_even, break_even_rows
from megatron_hybrid_prefix.lab.budget import advice, expected_reuse, plan_budget
from megatron_hybrid_prefix.lab.capacity import Sizes, sizes_of, sizes_of_config
from megatron_hybrid_prefix.lab.fit import fits, parameter_count
from megatron_hybrid_prefix.lab.memory import GIB, Memory, bytes_of, floor_gib
from megatron_hybrid_prefix.lab.plan_report import print_fits, print_plan
from megatron_hybrid_prefix.lab.replay import TooLargeError
from megatron_hybrid_prefix.lab.traces import read_trace
from megatron_hybrid_prefix.models.config import PRESETS, get_preset
from megatron_hybrid_prefix.policy.registry import DEFAULT_EVICTION_POLICY, eviction_policy_names

# --- Command ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """The command's parser."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=summary, epilog=rest, formatter_class=raw, allow_abbrev=False)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a preset, a file of Megatron arguments (YAML, JSON), or a config.json",
    )
    add = parser.add_argument_group("model").add_argument
    add_hf_option(add)
    add("--tp", type=positive_int, default=1, metavar="N", help="tensor-parallel size (default: %(default)s)")
    add(
        "--state-dtype", choices=("float32", "bfloat16"), help="dtype of the matrix states (default: each layer kind's)"
    )
    add = parser.add_argument_group("budget per rank").add_argument
    add(
        "--cache-gb",
        type=positive_float,
        help="GiB for KV, checkpoints and states of running requests together",
    )
    add("--mamba-gb", type=positive_float, help="most GiB of checkpoints in --cache-gb (default: no limit)")
    add("--host-gb", type=positive_float, help="GiB of pinned host memory for evicted KV and states (default: none)")
    add("--block-size-tokens", type=positive_int, default=256, help="tokens per KV block (default: %(default)s)")
    add("--max-requests", type=positive_int, default=64, help="most running requests (default: %(default)s)")
    add(
        "--speculative-tokens",
        type=whole_number,
        default=0,
        help="draft tokens of speculative decoding (default: %(default)s)",
    )
    add = parser.add_argument_group("what fits").add_argument
    add(
        "--gpu-gb",
        type=positive_float,
        metavar="X",
        help="memory of one GPU, in GB (10^9 bytes), such as 80, instead of --cache-gb; needs --hf or a preset",
    )
    add(
        "--conversation-tokens",
        type=positive_int,
        default=8192,
        metavar="N",
        help="tokens of a conversation that is kept, for --gpu-gb and --cache-gb (default: %(default)s)",
    )
    add = parser.add_argument_group("a shared folder").add_argument
    add(
        "--prefill-tokens-per-s",
        type=positive_float,
        metavar="X",
        help="prompt tokens that the model computes per second: those of a long prompt over the time to its first token; "
        "not with --gpu-gb",
    )
    add = parser.add_argument_group("expected reuse").add_argument
    add(
        "--trace",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="files of recorded requests, see hybrid-prefix replay --help",
    )
    add("--limit", type=positive_int, metavar="N", help="only the first N requests by time")
    add(
        "--eviction",
        choices=eviction_policy_names(),
        default=DEFAULT_EVICTION_POLICY,
        help="eviction policy (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results as JSON")
    add_removed_flags(parser, {"--buffer-gb": "use --cache-gb"})
    return parser


def stop_of(interrupt: Interrupt) -> Callable[[int], None]:
    """What a replay calls from time to time. It raises `Stopped` after Ctrl-C."""

    def on_request(done: int) -> None:
        if interrupt.requested:
            raise Stopped

    return on_request


def run_fits(argv: Sequence[str], args: argparse.Namespace) -> int:
    """What fits a GPU of ``--gpu-gb``, and the command with this budget. Returns the exit code."""
    folder = folder_of(args)
    with as_input_errors(ValueError):
        config = get_preset(args.model) if folder is None else folder.config
    name = args.model if folder is None else folder.name
    conversation_tokens = min(args.conversation_tokens, config.max_sequence_length)
    found = fits(
        config,
        gpu_bytes=bytes_of(args.gpu_gb, GB, "--gpu-gb"),
        conversation_tokens=conversation_tokens,
        block_tokens=args.block_size_tokens,
        max_requests=args.max_requests,
        drafts=args.speculative_tokens,
        state_dtype=args.state_dtype,
    )
    parameters = parameter_count(config)
    console = output_console()
    title = f"{printable(name)}, {parameters / 1e9:.3g} B parameters, {config.dtype}"
    print_fits(console, found, title, conversation_tokens)
    smallest = next((fit for fit in found if fit.plan is not None), None)
    if smallest is None or smallest.plan is None:
        text = (
            f"no GPU of {args.gpu_gb:g} GB holds 1/{max((fit.tp for fit in found), default=1)} of this model and one "
            f"conversation of {conversation_tokens:,} tokens"
        )
    else:
        text = "hybrid-prefix"
        if smallest.tp > 1:
            text = f"torchrun --nproc-per-node {smallest.tp} -m megatron_hybrid_prefix"
        text += " serve " + (f"--preset {name}" if folder is None else f"--hf {shlex.quote(str(args.hf))}")
        text += f" --tp {smallest.tp} --cache-gb {floor_gib(smallest.cache_bytes)}"
        text += f" --max-requests {args.max_requests} --block-size-tokens {args.block_size_tokens}"
        text += f" --speculative-tokens {args.speculative_tokens}" if args.speculative_tokens else ""
        text += f" --state-dtype {args.state_dtype}" if args.state_dtype else ""
    console.print(text, markup=False, soft_wrap=True)
    if args.json is not None:
        report = {"version": __version__, "command": command_line(argv), "model": name, "advice": text}
        write_json(args.json, report | {"parameters": parameters, "fits": [asdict(fit) for fit in found]})
        console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    return 0


def run_budget(argv: Sequence[str], args: argparse.Namespace, sizes: Sizes, interrupt: Interrupt) -> int:
    """What the budgets hold, and what they reuse. Returns the exit code."""
    cache_bytes = bytes_of(args.cache_gb, GIB, "--cache-gb")
    mamba_bytes = None if args.mamba_gb is None else bytes_of(args.mamba_gb, GIB, "--mamba-gb")
    host_bytes = bytes_of(args.host_gb or 0, GIB, "--host-gb")
    block_bytes = sizes.kv_block_bytes(args.block_size_tokens)
    with as_input_errors(ValueError, prefix=f"--cache-gb {args.cache_gb:g}: "):
        plan = plan_budget(
            sizes,
            cache_bytes=cache_bytes,
            mamba_bytes=mamba_bytes,
            block_tokens=args.block_size_tokens,
            conversation_tokens=args.conversation_tokens,
            max_requests=args.max_requests,
            drafts=args.speculative_tokens,
            host_bytes=host_bytes,
        )
    least_bytes = sizes.state_bytes + block_bytes  # padding stays on the device
    if 0 < host_bytes < least_bytes:
        raise InputError(f"--host-gb {args.host_gb:g}: a state and a KV block take {least_bytes / GIB:.4f} GiB")
    reuse, text = None, "add --trace to learn which budget to raise first"
    if args.trace:
        trace = read_trace(args.trace, limit=args.limit)
        memory = Memory(
            cache_bytes=cache_bytes - (plan.own_bytes if args.speculative_tokens else 0),
            block_bytes=sizes.kv_block_bytes(trace.block_tokens),
            state_bytes=sizes.state_bytes,
            mamba_bytes=mamba_bytes,
        )
        with as_input_errors(TooLargeError):
            reuse = expected_reuse(
                trace, memory, host_bytes=host_bytes, eviction=args.eviction, on_request=stop_of(interrupt)
            )
        text = advice(reuse)
    pays = break_even(sizes.kv_token_bytes, sizes.state_bytes, args.prefill_tokens_per_s)
    console = output_console()
    print_plan(
        console,
        sizes,
        plan,
        host_bytes=host_bytes,
        block_tokens=args.block_size_tokens,
        conversation_tokens=args.conversation_tokens,
        max_requests=args.max_requests,
        drafts=args.speculative_tokens,
        more_rows=break_even_rows(pays),
        reuse=reuse,
    )
    console.print(text, markup=False, soft_wrap=True)
    if args.json is not None:
        layout = plan.layout
        report = {
            "version": __version__,
            "command": command_line(argv),
            "model": sizes.name,
            "tp": sizes.tp,
            "cache_bytes": cache_bytes,
            "mamba_bytes": mamba_bytes,
            "host_bytes": host_bytes,
            "checkpoint_bytes": sizes.state_bytes,
            "kv_block_bytes": layout.block_bytes,
            "kv_block_padding_bytes": plan.block_padding_bytes,
            "next_logits_bytes": sizes.next_logits_bytes,
            "live_request_bytes": sizes.live_bytes(args.speculative_tokens),
            "page_blocks": layout.page_blocks,
            "page_states": layout.page_states,
            "padding_bytes": layout.padding_bytes,
            "kv_blocks": layout.total_blocks,
            "states": plan.cached_states,
            "conversations": plan.conversations,
            "host_states": plan.host_states,
            "host_conversations": plan.host_conversations,
            "break_even_tokens": pays or None,
            "expected_reuse": reuse,
            "advice": text,
        }
        write_json(args.json, report)
        console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    return 0


def check_model(args: argparse.Namespace) -> None:
    """Checks that there is one model, and a budget or a GPU.

    Raises:
        InputError: An option is missing, or one too many.
    """
    if (args.model is None) == (args.hf is None):
        raise InputError("give MODEL or --hf DIR, and only one of them")
    if args.cache_gb is not None:
        if args.gpu_gb is not None:
            raise InputError("--cache-gb: does not go with --gpu-gb")
        check_cap(args.mamba_gb, args.cache_gb)
    elif (
        args.gpu_gb is None
        or args.mamba_gb is not None
        or args.host_gb is not None
        or args.trace
        or args.prefill_tokens_per_s
        or (args.hf is None and args.model not in PRESETS)
    ):
        raise InputError("give --cache-gb, or --gpu-gb alone (with --hf or a preset) to learn which")


def run(argv: Sequence[str], interrupt: Interrupt) -> int:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    if args.json is not None:
        check_writable(args.json)
    check_model(args)
    if args.cache_gb is None:
        return run_fits(argv, args)
    folder = folder_of(args)
    if folder is None:
        sizes = sizes_of(args.model, tp=args.tp, state_dtype=args.state_dtype)
    else:
        with as_input_errors(ValueError):
            sizes = sizes_of_config(folder.name, folder.config, tp=args.tp, state_dtype=args.state_dtype)
    with as_input_errors(ValueError):
        sizes.check_blocks(args.block_size_tokens)
    return run_budget(argv, args, sizes, interrupt)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code."""
    return run_command(lambda interrupt: run(sys.argv[1:] if argv is None else argv, interrupt))
