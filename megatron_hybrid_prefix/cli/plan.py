"""Plan memory for prefix caching of a hybrid model: what a budget holds, and which budget to raise first.

examples:
    hybrid-prefix plan --hf ./NVIDIA-Nemotron-Nano-9B-v2 --gpu-gb 80
    hybrid-prefix plan nemotron-h-8b --cache-gb 40 --host-gb 64
    hybrid-prefix plan arguments.yaml --cache-gb 40 --tp 2 --num-speculative-tokens 3
    hybrid-prefix plan config.json --cache-gb 40 --trace trace.jsonl --json plan.json

MODEL is a preset, a YAML or JSON file of Megatron arguments, or a Hugging Face config.json (or its folder). Budgets are
in GiB per rank.

--gpu-gb with --hf or a preset: what fits GPUs of this size at each tensor-parallel size, and the smallest one that keeps
--conversations. One that is kept has its KV and a checkpoint, and a state more while it runs. 10 % of a GPU stay free for
activations. A folder needs config.json only.

--cache-gb: the budget that KV, checkpoints and states of running requests share. --mamba-gb limits the checkpoints in it.
--host-gb adds a host tier. With --conversations the smallest budget that keeps them is named.

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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.console import engine_options as options
from megatron_hybrid_prefix.console import terminal
from megatron_hybrid_prefix.console.hf import folder_of
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, as_main
from megatron_hybrid_prefix.lab.budget import Usage, advice, expected_reuse, least_cache_gb, plan_budget
from megatron_hybrid_prefix.lab.capacity import Sizes, sizes_from
from megatron_hybrid_prefix.lab.fit import GB, break_even, break_even_rows, fits, parameter_count
from megatron_hybrid_prefix.lab.memory import GIB, Memory, bytes_of, floor_gib
from megatron_hybrid_prefix.lab.plan_report import print_fits, print_plan
from megatron_hybrid_prefix.lab.replay import TooLargeError
from megatron_hybrid_prefix.lab.traces import read_trace
from megatron_hybrid_prefix.models.config import PRESETS, get_preset
from megatron_hybrid_prefix.policy.registry import DEFAULT_EVICTION_POLICY, eviction_policy_names

# --- Command ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """The command's parser."""
    parser = terminal.command_parser(__doc__)
    text = "a preset, a file of Megatron arguments (YAML, JSON), or a config.json"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    options.add_options(parser, "--hf", "--tp", "--state-dtype", title="model")
    group = parser.add_argument_group("budget per rank")
    memory = {"help": "GiB for KV, checkpoints and states of running requests together"}
    shared = (
        "--cache-gb",
        "--mamba-gb",
        "--host-gb",
        "--block-size-tokens",
        "--max-requests",
        "--num-speculative-tokens",
    )
    options.add_options(group, *shared, cache_gb=memory, max_requests={"default": 64})
    add = parser.add_argument_group("what fits").add_argument
    text = "memory of one GPU, in GB (10^9 bytes), such as 80, instead of --cache-gb; needs --hf or a preset"
    add("--gpu-gb", type=options.positive_float, metavar="X", help=text)
    text = "tokens of a conversation that is kept, for --gpu-gb and --cache-gb (default: %(default)s)"
    add("--conversation-tokens", type=options.positive_int, default=8192, metavar="N", help=text)
    text = "conversations that must be kept (default: with --gpu-gb as many as --max-requests)"
    add("--conversations", type=options.positive_int, metavar="N", help=text)
    add = parser.add_argument_group("a shared folder").add_argument
    text = "prompt tokens that the model computes per second: those of a long prompt over the time to its first token; "
    text += "not with --gpu-gb"
    add("--prefill-tokens-per-s", type=options.positive_float, metavar="X", help=text)
    add = parser.add_argument_group("expected reuse").add_argument
    text = "files of recorded requests, see hybrid-prefix replay --help"
    add("--trace", nargs="+", type=Path, metavar="TRACE", help=text)
    add("--limit", type=options.positive_int, metavar="N", help="only the first N requests by time")
    text = "eviction policy (default: %(default)s)"
    add("--eviction", choices=eviction_policy_names(), default=DEFAULT_EVICTION_POLICY, help=text)
    options.add_options(parser, "--json")
    return parser


def usage_of(args: argparse.Namespace, conversation_tokens: int) -> Usage:
    """What the memory is for."""
    return Usage(
        block_tokens=args.block_size_tokens,
        conversation_tokens=conversation_tokens,
        max_requests=args.max_requests,
        drafts=args.num_speculative_tokens,
        host_bytes=bytes_of(args.host_gb or 0, GIB, "--host-gb"),
    )


def run_fits(argv: Sequence[str] | None, args: argparse.Namespace) -> int:
    """What fits a GPU of ``--gpu-gb``, and the command with this budget. Returns the exit code."""
    folder = folder_of(args)
    with terminal.as_input_errors(ValueError):
        config = get_preset(args.model) if folder is None else folder.config
    name = args.model if folder is None else folder.name
    conversation_tokens = min(args.conversation_tokens, config.max_sequence_length)
    usage = usage_of(args, conversation_tokens)
    gpu_bytes = bytes_of(args.gpu_gb, GB, "--gpu-gb")
    found = fits(config, usage, gpu_bytes=gpu_bytes, state_dtype=args.state_dtype)
    parameters = parameter_count(config)
    console = terminal.output_console()
    title = f"{terminal.printable(name)}, {parameters / 1e9:.3g} B parameters, {config.dtype}"
    print_fits(console, found, title, usage)
    wanted = args.conversations or args.max_requests
    kept = {fit.tp: 0 if fit.plan is None else fit.plan.conversations for fit in found}
    smallest = next((fit for fit in found if kept[fit.tp] >= wanted), None)
    if smallest is None:
        text = (
            f"no GPU of {args.gpu_gb:g} GB holds 1/{max(kept, default=1)} of this model and {wanted:,} conversations of "
            f"{conversation_tokens:,} tokens, at most {max(kept.values(), default=0):,}: lower --conversations"
        )
    else:
        text = "hybrid-prefix"
        if smallest.tp > 1:
            text = f"torchrun --nproc-per-node {smallest.tp} -m megatron_hybrid_prefix"
        text += " serve " + (f"--preset {name}" if folder is None else f"--hf {shlex.quote(str(args.hf))}")
        text += f" --tp {smallest.tp} --cache-gb {floor_gib(smallest.cache_bytes)}"
        text += f" --max-requests {args.max_requests} --block-size-tokens {args.block_size_tokens}"
        text += f" --state-dtype {args.state_dtype}" if args.state_dtype else ""
    console.print(text, markup=False, soft_wrap=True)
    report = {"version": __version__, "command": terminal.command_line(argv), "model": name, "advice": text}
    report |= {"parameters": parameters, "fits": [asdict(fit) for fit in found]}
    terminal.save_json(console, args.json, report)
    return 0


def run_budget(argv: Sequence[str] | None, args: argparse.Namespace, sizes: Sizes, interrupt: Interrupt) -> int:
    """What the budgets hold, and what they reuse. Returns the exit code."""
    cache_bytes = bytes_of(args.cache_gb, GIB, "--cache-gb")
    mamba_bytes = None if args.mamba_gb is None else bytes_of(args.mamba_gb, GIB, "--mamba-gb")
    usage = usage_of(args, args.conversation_tokens)
    with terminal.as_input_errors(ValueError, prefix=f"--cache-gb {args.cache_gb:g}: "):
        plan = plan_budget(sizes, usage, cache_bytes=cache_bytes, mamba_bytes=mamba_bytes)
    least_bytes = sizes.state_bytes + sizes.kv_block_bytes(usage.block_tokens)  # padding stays on the device
    if 0 < usage.host_bytes < least_bytes:
        raise InputError(f"--host-gb {args.host_gb:g}: a state and a KV block take {least_bytes / GIB:.4f} GiB")
    reuse, text = None, "add --trace to learn which budget to raise first"
    if args.conversations is not None:
        named = f"--cache-gb {least_cache_gb(plan, usage, args.conversations):g} is the smallest that keeps"
        if mamba_bytes is not None and mamba_bytes // sizes.state_bytes < args.conversations:
            named = f"with --mamba-gb {args.mamba_gb:g} no --cache-gb keeps"
        text = f"{named} {args.conversations:,} conversations of {usage.conversation_tokens:,} tokens"
    if args.trace:
        trace = read_trace(args.trace, limit=args.limit)
        memory = Memory(
            cache_bytes=cache_bytes - (plan.own_bytes if args.num_speculative_tokens else 0),
            block_bytes=sizes.kv_block_bytes(trace.block_tokens),
            state_bytes=sizes.state_bytes,
            mamba_bytes=mamba_bytes,
        )
        with terminal.as_input_errors(TooLargeError):
            reuse = expected_reuse(
                trace,
                memory,
                host_bytes=usage.host_bytes,
                eviction=args.eviction,
                on_request=lambda done: interrupt.check(),
            )
        text = advice(reuse) if args.conversations is None else f"{text}; {advice(reuse)}"
    pays = break_even(sizes.kv_token_bytes, sizes.state_bytes, args.prefill_tokens_per_s)
    console = terminal.output_console()
    print_plan(console, sizes, plan, usage, more_rows=break_even_rows(pays), reuse=reuse)
    console.print(text, markup=False, soft_wrap=True)
    report = {
        "version": __version__,
        "command": terminal.command_line(argv),
        "model": sizes.name,
        "tp": sizes.tp,
        "cache_bytes": cache_bytes,
        "mamba_bytes": mamba_bytes,
        "host_bytes": usage.host_bytes,
        "checkpoint_bytes": sizes.state_bytes,
        "next_logits_bytes": sizes.next_logits_bytes,
        "live_request_bytes": sizes.live_bytes(args.num_speculative_tokens),
        "plan": asdict(plan),
        "break_even_tokens": pays or None,
        "expected_reuse": reuse,
        "advice": text,
    }
    terminal.save_json(console, args.json, report)
    return 0


def check_model(args: argparse.Namespace) -> Sizes:
    """Checks that there is one model, and a budget or a GPU, and returns its sizes. Raises InputError if not."""
    if (args.model is None) == (args.hf is None):
        raise InputError("give MODEL or --hf DIR, and only one of them")
    sizes = sizes_from(args.model, args, tp=args.tp, state_dtype=args.state_dtype)
    assert sizes is not None  # there is a model
    if args.cache_gb is not None:
        if args.gpu_gb is not None:
            raise InputError("--cache-gb: does not go with --gpu-gb")
        options.check_cap(args.mamba_gb, args.cache_gb)
    elif (
        args.gpu_gb is None
        or args.mamba_gb is not None
        or args.host_gb is not None
        or args.trace
        or args.prefill_tokens_per_s
        or (args.hf is None and args.model not in PRESETS)
    ):
        raise InputError("give --cache-gb, or --gpu-gb alone (with --hf or a preset) to learn which")
    return sizes


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    options.check_output(args)
    sizes = check_model(args)
    if args.cache_gb is None:
        return run_fits(argv, args)
    with terminal.as_input_errors(ValueError):
        sizes.check_blocks(args.block_size_tokens)
    return run_budget(argv, args, sizes, interrupt)


main = as_main(run)
