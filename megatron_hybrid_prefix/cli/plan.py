"""Plan memory for prefix caching of a hybrid model: bytes of states and KV, and what a budget holds.

examples:
    hybrid-prefix plan --hf ./NVIDIA-Nemotron-Nano-9B-v2 --gpu-gb 80 --tp 2
    hybrid-prefix plan nemotron-h-8b --cache-gb 40 --host-gb 64
    hybrid-prefix plan arguments.yaml --cache-gb 40 --tp 2 --num-speculative-tokens 3 --json plan.json

MODEL is a preset, a YAML or JSON file of Megatron arguments, or a Hugging Face config.json (or its folder). Budgets are
in GiB per rank.

--cache-gb: the budget that KV, checkpoints and states of running requests share. --mamba-gb limits the checkpoints in it.
--host-gb adds a host tier. What it reuses of recorded requests: hybrid-prefix replay.

--gpu-gb in place of --cache-gb, with --hf or a preset: what each of --tp GPUs of this size has left beside the weights.
10 % of a GPU stay free for activations. A folder needs config.json only; of one in fp8, the size of its files is shown.

A conversation that is kept has its KV and a checkpoint, and a state more while it runs.

Needs neither a GPU nor torch.

exit code: 0; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.table import Table

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.console import engine_options as options
from megatron_hybrid_prefix.console import terminal
from megatron_hybrid_prefix.console.hf import folder_of
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, as_main
from megatron_hybrid_prefix.lab.budget import Plan, Usage, left_bytes, parameter_count, plan_budget, weight_bytes
from megatron_hybrid_prefix.lab.capacity import Sizes, sizes_from
from megatron_hybrid_prefix.lab.memory import GIB, bytes_of, floor_gib, page_words
from megatron_hybrid_prefix.models.config import PRESETS

GB = 10**9
SCORE_BYTES = 12  # of a prompt's token: float32 log-probs of it and of the most probable token, and the id of that

# --- Command ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """The command's parser."""
    parser = terminal.command_parser(__doc__)
    text = "a preset, a file of Megatron arguments (YAML, JSON), or a config.json"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    options.add_options(parser, "--hf", "--tp", "--state-dtype", "--checkpoint-dtype", title="model")
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
    text = "memory of one GPU, in GB (10^9 bytes), such as 80, in place of --cache-gb"
    add("--gpu-gb", type=options.positive_float, metavar="X", help=text)
    text = "tokens of a conversation that is kept (default: %(default)s)"
    add("--conversation-tokens", type=options.positive_int, default=8192, metavar="N", help=text)
    text = "KV blocks hold the routes of experts, too: as of hybrid-prefix serve, or moe_enable_routing_replay"
    add("--enable-return-routed-experts", action="store_true", help=text)
    options.add_options(parser, "--json")
    return parser


def usage_of(args: argparse.Namespace) -> Usage:
    """What the memory is for."""
    return Usage(
        block_tokens=args.block_size_tokens,
        conversation_tokens=args.conversation_tokens,
        max_requests=args.max_requests,
        drafts=args.num_speculative_tokens,
        host_bytes=bytes_of(args.host_gb or 0, GIB, "--host-gb"),
    )


def rows_of(sizes: Sizes, plan: Plan, usage: Usage) -> list[tuple[str, str]]:
    """Rows of the table."""
    layout, padding = plan.layout, plan.block_padding_bytes
    padded = f", {padding:,} of them padding" if padding else ""
    rows = [
        ("one state", f"{sizes.state_bytes:,} bytes"),
        ("... takes as much memory as the KV of", f"{sizes.state_bytes / sizes.kv_token_bytes:,.0f} tokens"),
        (f"one KV block of {usage.block_tokens} tokens", f"{layout.block_bytes:,} bytes{padded}"),
        (page_words(layout), f"{layout.padding_bytes / layout.page_bytes:.1%} unused"),
        ("KV blocks, if there were no states", f"{layout.total_blocks:,}"),
        ("most cached states", f"{plan.cached_states:,}"),
        (f"conversations of {usage.conversation_tokens:,} tokens with a checkpoint each", f"{plan.conversations:,}"),
    ]
    if sizes.checkpoint_dtype:
        rows.insert(2, (f"... as a checkpoint in {sizes.checkpoint_dtype}", f"{sizes.checkpoint_bytes:,} bytes"))
    if usage.host_bytes:
        rows.append(("... on the host, beside them", f"{plan.host_conversations:,}"))
        rows.append(("states on the host, if it holds no KV", f"{plan.host_states:,}"))
    rows.append(("rings of a running request", f"{plan.ring_bytes:,} bytes, set aside for {usage.max_requests}"))
    if sizes.open_ring_bytes is not None:
        rows.append(("... with exact='bits'", f"{sizes.open_ring_bytes:,} bytes"))
    if sizes.next_logits_bytes is not None:
        rows.append(("log-probs of prompts (host), per checkpoint", f"{sizes.next_logits_bytes:,} bytes"))
        rows.append(("... per token, with one token of the highest probability", f"{SCORE_BYTES} bytes"))
    return rows


def check_model(args: argparse.Namespace) -> Sizes:
    """Checks that there is one model, and one of a budget and a GPU, and returns its sizes. Raises InputError if not."""
    if (args.model is None) == (args.hf is None):
        raise InputError("give MODEL or --hf DIR, and only one of them")
    sizes = sizes_from(args.model, args, tp=args.tp, state_dtype=args.state_dtype)
    assert sizes is not None  # there is a model
    if args.enable_return_routed_experts and not sizes.config.has_experts:
        raise InputError("--enable-return-routed-experts: needs --hf or a preset, with experts")
    sizes = replace(sizes, routes=args.enable_return_routed_experts, checkpoint_dtype=args.checkpoint_dtype)
    if (args.cache_gb is None) == (args.gpu_gb is None):
        raise InputError("give --cache-gb or --gpu-gb, and only one of them")
    if args.gpu_gb is not None and args.hf is None and args.model not in PRESETS:
        raise InputError("--gpu-gb: needs --hf or a preset, since a file does not say how many weights there are")
    with terminal.as_input_errors(ValueError):
        sizes.check_blocks(args.block_size_tokens)
    return sizes


def rows_of_fp8(args: argparse.Namespace) -> tuple[list[tuple[str, str]], int | None]:
    """A row for a folder with weights in fp8, and the bytes of its files; None: it has none, or other weights."""
    folder = folder_of(args)
    if folder is None or not folder.blocks:
        return [], None
    what = "... in the files, in fp8 with scales, of all ranks"
    try:
        return [(what, f"{folder.weight_bytes / GIB:.1f} GiB")], folder.weight_bytes
    except ValueError as error:  # raised again where weights are needed
        return [(what, str(error))], None


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    options.check_output(args)
    sizes, usage = check_model(args), usage_of(args)
    rows, file_bytes = rows_of_fp8(args)
    weights = f"{weight_bytes(sizes.config, sizes.tp) / GIB:.1f} GiB"
    if rows or args.gpu_gb is not None:
        what = f"weights, {parameter_count(sizes.config) / 1e9:.3g} B parameters in {sizes.config.dtype}"
        rows = [(what, weights), *rows]
    if args.gpu_gb is None:
        given, cache_bytes = f"--cache-gb {args.cache_gb:g}", bytes_of(args.cache_gb, GIB, "--cache-gb")
    else:
        given, gpu_bytes = f"--gpu-gb {args.gpu_gb:g}", bytes_of(args.gpu_gb, GB, "--gpu-gb")
        cache_bytes = left_bytes(sizes.config, sizes.tp, gpu_bytes)
        given += f" leaves {floor_gib(cache_bytes)} GiB beside {weights} of weights"
        rows.append(("left for the cache", f"--cache-gb {floor_gib(cache_bytes)}"))
    options.check_cap(args.mamba_gb, cache_bytes / GIB)
    mamba_bytes = None if args.mamba_gb is None else bytes_of(args.mamba_gb, GIB, "--mamba-gb")
    with terminal.as_input_errors(ValueError, prefix=f"{given}: "):
        plan = plan_budget(sizes, usage, cache_bytes=cache_bytes, mamba_bytes=mamba_bytes)
    least_bytes = sizes.checkpoint_bytes + sizes.kv_block_bytes(usage.block_tokens)  # padding stays on the device
    if 0 < usage.host_bytes < least_bytes:
        raise InputError(f"--host-gb {args.host_gb:g}: a state and a KV block take {least_bytes / GIB:.4f} GiB")
    title = f"{terminal.printable(sizes.name)}, tp={sizes.tp}"
    table = Table("what", "how much", title=title, title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for row in [*rows, *rows_of(sizes, plan, usage)]:
        table.add_row(*row)
    console = terminal.output_console()
    console.print(table)
    report = {
        "version": __version__,
        "command": terminal.command_line(argv),
        "model": sizes.name,
        "tp": sizes.tp,
        "weight_bytes": weight_bytes(sizes.config, sizes.tp) if rows else None,
        "file_bytes": file_bytes,
        "cache_bytes": cache_bytes,
        "mamba_bytes": mamba_bytes,
        "host_bytes": usage.host_bytes,
        "checkpoint_bytes": sizes.checkpoint_bytes,
        "kv_token_bytes": sizes.kv_token_bytes,
        "next_logits_bytes": sizes.next_logits_bytes,
        "live_request_bytes": sizes.state_bytes + plan.ring_bytes,
        "plan": asdict(plan),
    }
    terminal.save_json(console, args.json, report)


main = as_main(run)
