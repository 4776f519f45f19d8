"""Plan memory for prefix caching of a hybrid model: what a budget holds, and which budget to raise first.

examples:
    hybrid-prefix plan --hf ./NVIDIA-Nemotron-Nano-9B-v2 --gpu-gb 80
    hybrid-prefix plan nemotron-h-8b --mamba-gb 20 --buffer-gb 20
    hybrid-prefix plan nemotron-h-8b --cache-gb 40 --trace trace.jsonl
    hybrid-prefix plan arguments.yaml --mamba-gb 20 --buffer-gb 20 --tp 2 --speculative-tokens 3
    hybrid-prefix plan config.json --mamba-gb 20 --buffer-gb 20 --trace trace.jsonl --json plan.json

MODEL is a preset, a YAML or JSON file of Megatron arguments, or a Hugging Face config.json (or its folder). Budgets are
in GiB per rank.

--hf and --gpu-gb without budgets: what fits GPUs of this size at each tensor-parallel size, and which budgets to give. A
conversation that is kept has its KV and a checkpoint. 10 % of a GPU stay free for activations. The folder needs
config.json only. --hf with budgets is like MODEL.

--cache-gb: one budget that KV, checkpoints and states of running requests share, and the fixed split of as many bytes: 25 %
for states, or with --trace the best split of ten.

--prefill-tokens-per-s: from how many tokens on it is faster to load a prefix from a shared tier (--shared of serve) than
to compute it, by what the disk or the network gives each rank. It is the value for min_tokens in the URL.

With --trace, the recorded requests are replayed at this budget (as by hybrid-prefix replay). Then each budget is raised
by the same amount in turn, and the one that gains most is recommended. The time of loading from the host is not
counted.

Needs neither a GPU nor torch.

exit code: 0; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.console.engine_options import positive_float, positive_int, whole_number
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
    progress,
    run_command,
    write_json,
)
from megatron_hybrid_prefix.lab.capacity import Sizes, sizes_of, sizes_of_config
from megatron_hybrid_prefix.lab.fit import fits, parameter_count
from megatron_hybrid_prefix.lab.memory import GIB
from megatron_hybrid_prefix.lab.one_budget import ADVISED_STATE_SHARE, advised_split, one_budget, reuse_of_one_budget
from megatron_hybrid_prefix.lab.one_budget import advice as advice_of_split
from megatron_hybrid_prefix.lab.replay import Policy, ceiling_tokens, replay
from megatron_hybrid_prefix.lab.traces import Trace, read_trace
from megatron_hybrid_prefix.models.config import PRESETS, get_preset
from megatron_hybrid_prefix.policy.registry import (
    DEFAULT_EVICTION_POLICY,
    eviction_policy_names,
    present_eviction_policy,
)

GB = 10**9
LOAD_RATES = (1, 2, 4, 8, 16, 32)  # GB/s for one rank: a network, disks, the page cache
RAISED_BY = 0.25  # each budget in turn is raised by this share of all budgets together
WORTH_IT = 0.001  # least gain to recommend, as a share of the prompt tokens
SCORE_BYTES = 12  # of a prompt's token: float32 log-probs of it and of one likeliest token, and the id of that
KNOBS = {"state_bytes": "--mamba-gb", "host_bytes": "--host-gb", "kv_bytes": "--buffer-gb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes per rank: states on the device, states and KV on the host, and KV with the states of running requests."""

    state_bytes: int
    host_bytes: int
    kv_bytes: int

    @property
    def all_bytes(self) -> int:
        """Sum of all budgets."""
        return self.state_bytes + self.host_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a budget holds: counts, and bytes of the running requests' states."""

    device_states: int
    host_states: int
    kv_blocks: int
    live_bytes: int
    history_tokens: int


def plan_of(budget: Budget, sizes: Sizes, args: argparse.Namespace) -> Plan:
    """Computes what ``budget`` holds.

    Raises:
        InputError: The states of the running requests alone exceed the budget.
    """
    live_bytes = args.max_requests * sizes.live_bytes(args.speculative_tokens)
    block_bytes = sizes.kv_block_bytes(args.block_size_tokens)
    # One block is megatron's dummy.
    blocks = (budget.kv_bytes - live_bytes) // block_bytes - 1
    if blocks < 1:
        raise InputError(
            f"--buffer-gb {budget.kv_bytes / GIB:g}: too small. States of {args.max_requests} running requests take "
            f"{live_bytes / GIB:.2f} GiB, and one KV block {block_bytes / GIB:.4f} GiB: raise it or lower "
            f"--max-requests"
        )
    return Plan(
        device_states=budget.state_bytes // sizes.state_bytes,
        host_states=budget.host_bytes // sizes.state_bytes,
        kv_blocks=blocks,
        live_bytes=live_bytes,
        history_tokens=blocks * args.block_size_tokens,
    )


def host_options(budget: Budget, sizes: Sizes, block_tokens: int) -> dict[str, int]:
    """Host tier options for a replay with blocks of ``block_tokens``. A page is 1/8 of the smaller kind of entry."""
    kv_bytes, state_bytes = sizes.kv_block_bytes(block_tokens), sizes.state_bytes
    page_bytes = max(1, min(kv_bytes, state_bytes) // 8)
    return {
        "host_pages": budget.host_bytes // page_bytes,
        "host_kv_pages": ceil_div(kv_bytes, page_bytes),
        "host_state_pages": ceil_div(state_bytes, page_bytes),
    }


def expected_reuse(trace: Trace, budget: Budget, sizes: Sizes, args: argparse.Namespace, interrupt: Interrupt) -> float:
    """Share of the trace's prompt tokens that a cache with this budget reuses.

    Raises:
        Stopped: Ctrl-C was pressed.
    """

    def on_request(done: int) -> None:
        if interrupt.requested:
            raise Stopped

    plan = plan_of(budget, sizes, args)
    host = host_options(budget, sizes, trace.block_tokens)
    return replay(
        trace,
        Policy(name=args.eviction, eviction=args.eviction, options=host),
        state_slots=plan.device_states,
        kv_blocks=max(1, plan.history_tokens // trace.block_tokens),
        on_request=on_request,
    ).reused_token_fraction


def break_even_tokens(sizes: Sizes, gb_per_s: float, tokens_per_s: float) -> int | None:
    """Fewest tokens of a prefix whose KV and state load in less time than they are computed; None: never.

    Args:
        sizes: Bytes on one rank.
        gb_per_s: What the rank reads, in 10^9 bytes per second.
        tokens_per_s: Prompt tokens that the ranks of a model compute per second.
    """
    gain_bytes = gb_per_s * GB / tokens_per_s - sizes.kv_token_bytes  # of a token
    return None if gain_bytes <= 0 else int(sizes.state_bytes / gain_bytes) + 1


def advice(gains: dict[str, float], reuse: float, ceiling: float, raised_gib: float) -> str:
    """Which budget to raise first, given the gain of each one when raised by ``raised_gib``."""
    name, gain = max(gains.items(), key=lambda item: item[1])
    if gain < WORTH_IT:
        return (
            f"{reuse:.1%} of the prompt tokens are reused, {ceiling:.1%} is the limit: {raised_gib:.1f} GiB more gain "
            "nothing"
        )
    return f"raise {KNOBS[name]} first: {raised_gib:.1f} GiB more reuse {gain:.1%} more of the prompt tokens"


def blind_advice(plan: Plan, sizes: Sizes, budget: Budget) -> str:
    """Which budget to raise first, or how to split both, if nothing is known about the requests."""
    if plan.device_states < 1:
        return f"raise --mamba-gb first: it is less than one checkpoint ({sizes.state_bytes / GIB:.3f} GiB)"
    blocks = plan.kv_blocks / plan.device_states
    if blocks < 1:
        return "raise --buffer-gb first: there are fewer KV blocks than checkpoints, and each checkpoint needs a block"
    both = budget.state_bytes + budget.kv_bytes
    return (
        f"one checkpoint per {blocks:.0f} KV blocks, {budget.state_bytes / both:.0%} for states. A good start is "
        f"{advised_split(both, ADVISED_STATE_SHARE)}; add --trace to learn which budget to raise"
    )


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
        help="GiB for KV, checkpoints and states of running requests together, instead of --mamba-gb and --buffer-gb",
    )
    add("--mamba-gb", type=positive_float, help="GiB for state checkpoints on the GPU")
    add("--buffer-gb", type=positive_float, help="GiB for KV blocks and the states of running requests")
    add("--host-gb", type=positive_float, help="GiB of pinned host memory for evicted KV and states (default: none)")
    add("--block-size-tokens", type=positive_int, default=256, help="tokens per KV block (default: %(default)s)")
    add("--max-requests", type=positive_int, default=64, help="most running requests (default: %(default)s)")
    add(
        "--speculative-tokens",
        type=whole_number,
        default=0,
        help="draft tokens of speculative decoding (default: %(default)s)",
    )
    add = parser.add_argument_group("what fits (--hf or a preset, without budgets; --cache-gb)").add_argument
    add("--gpu-gb", type=positive_float, metavar="X", help="memory of one GPU, in GB (10^9 bytes), such as 80")
    add(
        "--conversation-tokens",
        type=positive_int,
        default=8192,
        metavar="N",
        help="tokens of a conversation that is kept (default: %(default)s)",
    )
    add = parser.add_argument_group("a shared folder").add_argument
    add(
        "--prefill-tokens-per-s",
        type=positive_float,
        metavar="X",
        help="prompt tokens that the model computes per second: those of a long prompt over the time to its first token; "
        "needs --mamba-gb and --buffer-gb",
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
        type=present_eviction_policy,
        choices=eviction_policy_names(),
        default=DEFAULT_EVICTION_POLICY,
        help="eviction policy (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results as JSON")
    return parser


def measured(
    args: argparse.Namespace, sizes: Sizes, budget: Budget, interrupt: Interrupt
) -> tuple[dict[str, Any], str]:
    """Replays the trace. Returns the reuse at this budget, the gain of raising each budget, and the advice."""
    trace = read_trace(args.trace, limit=args.limit)
    ceiling = sum(ceiling_tokens(trace)) / trace.prompt_tokens
    step = max(int(budget.all_bytes * RAISED_BY), sizes.state_bytes)
    with progress(["replays"], 1 + len(KNOBS)) as done:
        reuse = expected_reuse(trace, budget, sizes, args, interrupt)
        done("replays", 1)
        gains: dict[str, float] = {}
        for number, name in enumerate(KNOBS, 2):
            raised = replace(budget, **{name: getattr(budget, name) + step})
            gains[name] = expected_reuse(trace, raised, sizes, args, interrupt) - reuse
            done("replays", number)
    found = {
        "requests": len(trace.requests),
        "prompt_tokens": trace.prompt_tokens,
        "reused_token_fraction": reuse,
        "ceiling_fraction": ceiling,
        "raised_by_bytes": step,
        "gains": {KNOBS[name]: gain for name, gain in gains.items()},
    }
    return found, advice(gains, reuse, ceiling, step / GIB)


def break_even(args: argparse.Namespace, sizes: Sizes) -> dict[int, int | None]:
    """`break_even_tokens` by GB/s; empty without ``--prefill-tokens-per-s``."""
    tokens_per_s = args.prefill_tokens_per_s
    return {} if tokens_per_s is None else {rate: break_even_tokens(sizes, rate, tokens_per_s) for rate in LOAD_RATES}


def print_report(
    console: Console, args: argparse.Namespace, sizes: Sizes, plan: Plan, reuse: dict[str, Any] | None
) -> None:
    """Prints sizes, what the budget holds, and the expected reuse."""
    table = Table(title=f"{printable(sizes.name)}, tp={sizes.tp}", title_justify="left", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("how much", justify="right", no_wrap=True)
    block_bytes = sizes.kv_block_bytes(args.block_size_tokens)
    drafts = f" and {args.speculative_tokens} drafts" if args.speculative_tokens else ""
    rows: list[tuple[str, str]] = [
        ("one checkpoint", f"{sizes.state_bytes:,} bytes"),
        (f"one KV block of {args.block_size_tokens} tokens", f"{block_bytes:,} bytes"),
        (f"states of one running request{drafts}", f"{sizes.live_bytes(args.speculative_tokens):,} bytes"),
        ("one checkpoint takes as much memory as the KV of", f"{sizes.state_bytes / sizes.kv_token_bytes:,.0f} tokens"),
        ("checkpoints on the device", f"{plan.device_states:,}"),
        ("checkpoints on the host, if it holds no KV", f"{plan.host_states:,}"),
        (f"states of {args.max_requests} running requests", f"{plan.live_bytes / GIB:.2f} GiB"),
        ("KV blocks", f"{plan.kv_blocks:,}"),
        ("tokens in the KV blocks", f"{plan.history_tokens:,}"),
    ]
    if sizes.next_logits_bytes is not None:
        rows.append(("log-probs of prompts (host), per checkpoint", f"{sizes.next_logits_bytes:,} bytes"))
        rows.append(("... per token, with one likeliest token", f"{SCORE_BYTES} bytes"))
    for rate, tokens in break_even(args, sizes).items():
        worth = "never" if tokens is None else f"{tokens:,} tokens"
        rows.append((f"loading from a shared tier at {rate} GB/s pays from", worth))
    if reuse is not None:
        rows.append(("expected reuse of prompt tokens", f"{reuse['reused_token_fraction']:.4f}"))
        rows.append(("reuse with unlimited memory", f"{reuse['ceiling_fraction']:.4f}"))
        step_gib = reuse["raised_by_bytes"] / GIB
        rows += [(f"{step_gib:.1f} GiB more for {knob}", f"{gain:+.4f}") for knob, gain in reuse["gains"].items()]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def run_fits(argv: Sequence[str], args: argparse.Namespace) -> int:
    """What fits a GPU of ``--gpu-gb``, and the command with these budgets. Returns the exit code."""
    folder = folder_of(args)
    with as_input_errors(ValueError):
        config = get_preset(args.model) if folder is None else folder.config
    name = args.model if folder is None else folder.name
    found = fits(
        config,
        gpu_bytes=int(args.gpu_gb * GB),
        conversation_tokens=min(args.conversation_tokens, config.max_sequence_length),
        block_tokens=args.block_size_tokens,
        max_requests=args.max_requests,
        state_dtype=args.state_dtype,
    )
    parameters = parameter_count(config)
    table = Table(title=f"{printable(name)}, {parameters / 1e9:.3g} B parameters, {config.dtype}", title_justify="left")
    for column in ("GPUs (--tp)", "weights per GPU", "left for states and KV", "conversations kept", "budgets"):
        table.add_column(column, justify="left" if column == "budgets" else "right")
    for fit in found:
        options = "does not fit"
        if fit.conversations:
            options = f"--mamba-gb {_floor(fit.state_bytes)} --buffer-gb {_floor(fit.kv_bytes)}"
        left = f"{max(0, fit.left_bytes) / GIB:.1f} GiB"
        table.add_row(str(fit.tp), f"{fit.weight_bytes / GIB:.1f} GiB", left, f"{fit.conversations:,}", options)
    console = output_console()
    console.print(table)
    smallest = next((fit for fit in found if fit.conversations), None)
    if smallest is None:
        text = (
            f"no GPU of {args.gpu_gb:g} GB holds 1/{max((fit.tp for fit in found), default=1)} of this model and one "
        )
        text += f"conversation of {args.conversation_tokens:,} tokens"
    else:
        ranks = "" if smallest.tp == 1 else f"torchrun --nproc-per-node {smallest.tp} -m megatron_hybrid_prefix.cli."
        model = f"--preset {name}" if folder is None else f"--hf {shlex.quote(str(args.hf))}"
        text = f"{ranks}serve {model} --tp {smallest.tp} --mamba-gb {_floor(smallest.state_bytes)}"
        text = f"{'' if ranks else 'hybrid-prefix '}{text} --buffer-gb {_floor(smallest.kv_bytes)}"
        text += f" --max-requests {args.max_requests} --block-size-tokens {args.block_size_tokens}"
        text += f" --state-dtype {args.state_dtype}" if args.state_dtype else ""
    console.print(text, markup=False, soft_wrap=True)
    if args.json is not None:
        report = {"version": __version__, "command": command_line(argv), "model": name, "advice": text}
        write_json(args.json, report | {"parameters": parameters, "fits": [asdict(fit) for fit in found]})
        console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    return 0


def run_one_budget(argv: Sequence[str], args: argparse.Namespace, sizes: Sizes, interrupt: Interrupt) -> int:
    """What ``--cache-gb`` holds, and what it reuses. Returns the exit code."""
    cache_bytes = int(args.cache_gb * GIB)
    live_bytes = args.max_requests * sizes.live_bytes(args.speculative_tokens)
    with as_input_errors(ValueError, prefix=f"--cache-gb {args.cache_gb:g}: "):
        plan = one_budget(
            sizes,
            cache_bytes=cache_bytes,
            block_tokens=args.block_size_tokens,
            conversation_tokens=args.conversation_tokens,
            live_bytes=live_bytes,
        )
    reuse, ceiling = None, None
    if args.trace:
        trace = read_trace(args.trace, limit=args.limit)
        ceiling = sum(ceiling_tokens(trace)) / trace.prompt_tokens

        def on_request(done: int) -> None:
            if interrupt.requested:
                raise Stopped

        reuse = reuse_of_one_budget(trace, sizes, cache_bytes, args.eviction, on_request)
    layout, text = plan.layout, advice_of_split(cache_bytes, reuse)
    table = Table(title=f"{printable(sizes.name)}, tp={sizes.tp}", title_justify="left", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("how much", justify="right", no_wrap=True)
    rows = [
        ("one state", f"{layout.state_bytes:,} bytes"),
        (f"one KV block of {args.block_size_tokens} tokens", f"{layout.block_bytes:,} bytes"),
        ("a state takes", f"{layout.page_blocks} KV blocks, {layout.padding_bytes / layout.page_bytes:.1%} unused"),
        ("KV blocks, if there were no states", f"{layout.total_blocks:,}"),
        ("states, if there were no KV", f"{layout.pages:,}"),
        (f"conversations of {args.conversation_tokens:,} tokens with a checkpoint each", f"{plan.conversations:,}"),
        (f"with {ADVISED_STATE_SHARE:.0%} for states, fixed: checkpoints", f"{plan.split_states:,}"),
        (f"... KV blocks beside {args.max_requests} running requests", f"{plan.split_blocks:,}"),
    ]
    if reuse is not None:
        raised = f"{cache_bytes * RAISED_BY / GIB:.1f} GiB more"
        rows += [
            ("expected reuse of prompt tokens, shared", f"{reuse['shared']:.4f}"),
            (f"... {raised}", f"{reuse['shared_raised'] - reuse['shared']:+.4f}"),
            ("reuse with unlimited memory", f"{ceiling:.4f}"),
        ]
        rows += [(f"fixed, {share:.0%} for states", f"{found:.4f}") for share, found in reuse["splits"].items()]
    for row in rows:
        table.add_row(*row)
    console = output_console()
    console.print(table)
    console.print(text, markup=False, soft_wrap=True)
    if args.json is not None:
        report = {
            "version": __version__,
            "command": command_line(argv),
            "model": sizes.name,
            "tp": sizes.tp,
            "cache_bytes": cache_bytes,
            "checkpoint_bytes": layout.state_bytes,
            "kv_block_bytes": layout.block_bytes,
            "page_blocks": layout.page_blocks,
            "padding_bytes": layout.padding_bytes,
            "kv_blocks": layout.total_blocks,
            "states": layout.pages,
            "conversations": plan.conversations,
            "expected_reuse": reuse and reuse | {"splits": {f"{s:g}": x for s, x in reuse["splits"].items()}},
            "ceiling_fraction": ceiling,
            "advice": text,
        }
        write_json(args.json, report)
        console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    return 0


def _floor(count: int) -> str:
    """Bytes as GiB with two digits, not rounded up."""
    return f"{count * 100 // GIB / 100:g}"


def check_model(args: argparse.Namespace) -> bool:
    """Checks that there is one model, and budgets or a GPU. Returns whether to show what fits.

    Raises:
        InputError: An option is missing, or one too many.
    """
    if (args.model is None) == (args.hf is None):
        raise InputError("give MODEL or --hf DIR, and only one of them")
    budgets = [name for name in ("mamba_gb", "buffer_gb") if getattr(args, name) is not None]
    if args.cache_gb is not None:
        if args.prefill_tokens_per_s is not None:
            raise InputError("--prefill-tokens-per-s: needs --mamba-gb and --buffer-gb")
        if budgets or args.gpu_gb is not None or args.host_gb is not None:
            raise InputError("--cache-gb: does not go with --mamba-gb, --buffer-gb, --host-gb and --gpu-gb")
        return False
    if len(budgets) == 2 and args.gpu_gb is None:
        return False
    if (
        args.gpu_gb is None
        or budgets
        or args.trace
        or args.prefill_tokens_per_s
        or (args.hf is None and args.model not in PRESETS)
    ):
        raise InputError(
            "give --cache-gb, or --mamba-gb and --buffer-gb, or --gpu-gb alone (with --hf or a preset) to learn which"
        )
    return True


def run(argv: Sequence[str], interrupt: Interrupt) -> int:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    if args.json is not None:
        check_writable(args.json)
    if check_model(args):
        return run_fits(argv, args)
    folder = folder_of(args)
    if folder is None:
        sizes = sizes_of(args.model, tp=args.tp, state_dtype=args.state_dtype)
    else:
        with as_input_errors(ValueError):
            sizes = sizes_of_config(folder.name, folder.config, tp=args.tp, state_dtype=args.state_dtype)
    with as_input_errors(ValueError):
        sizes.check_blocks(args.block_size_tokens)
    if args.cache_gb is not None:
        return run_one_budget(argv, args, sizes, interrupt)
    budget = Budget(
        state_bytes=int(args.mamba_gb * GIB),
        host_bytes=int((args.host_gb or 0) * GIB),
        kv_bytes=int(args.buffer_gb * GIB),
    )
    plan = plan_of(budget, sizes, args)
    reuse, text = None, blind_advice(plan, sizes, budget)
    if args.trace:
        reuse, text = measured(args, sizes, budget, interrupt)
    console = output_console()
    print_report(console, args, sizes, plan, reuse)
    console.print(text, markup=False, soft_wrap=True)
    if args.json is not None:
        report = {
            "version": __version__,
            "command": command_line(argv),
            "model": sizes.name,
            "tp": sizes.tp,
            "checkpoint_bytes": sizes.state_bytes,
            "kv_block_bytes": sizes.kv_block_bytes(args.block_size_tokens),
            "next_logits_bytes": sizes.next_logits_bytes,
            "live_request_bytes": sizes.live_bytes(args.speculative_tokens),
            "device_states": plan.device_states,
            "host_states": plan.host_states,
            "kv_blocks": plan.kv_blocks,
            "history_tokens": plan.history_tokens,
            "break_even_tokens": break_even(args, sizes) or None,
            "expected_reuse": reuse,
            "advice": text,
        }
        write_json(args.json, report)
        console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code."""
    return run_command(lambda interrupt: run(sys.argv[1:] if argv is None else argv, interrupt))
