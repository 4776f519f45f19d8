"""Generate from a Megatron checkpoint with this cache. The model is described by `megatron.training` arguments.

It runs alone or under torchrun. All arguments of `megatron.training` work. One of them turns the cache on:

    torchrun --nproc-per-node 2 examples/megatron_checkpoint.py --load CHECKPOINT --use-checkpoint-args \\
        --tensor-model-parallel-size 2 --micro-batch-size 1 --tokenizer-type HuggingFaceTokenizer \\
        --tokenizer-model FOLDER --inference-dynamic-batching-prefix-caching \\
        --prompt "A long beginning, and one question" --prompt "A long beginning, and another one"

Without --inference-dynamic-batching-prefix-caching caching is off. Prompts are sent one after another, so that each can
reuse what earlier ones left in the cache; --batch sends them all at once. The table shows how many tokens of each
prompt were computed and reused.

There is no optimizer and no training data. Chunked prefill is off unless --enable-chunked-prefill is given. Without
Transformer Engine, megatron-core's own layers are built. Their checkpoints have other names for the norms than those of
Transformer Engine, which fuses each norm into the next linear layer.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from megatron_hybrid_prefix import add_hybrid_prefix_args, hybrid_prefix_config_from_args
from megatron_hybrid_prefix.console.answers import EngineRun, Request, print_report, totals
from megatron_hybrid_prefix.console.engine_options import positive_int
from megatron_hybrid_prefix.console.running import cache_figures, send, started_platform, stop_requested
from megatron_hybrid_prefix.console.terminal import (
    ArgumentParser,
    InputError,
    Interrupt,
    as_input_errors,
    as_main,
    check_writable,
    is_main_rank,
    output_console,
    save_json,
)
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.platform.cpu import HostForCuda

# Arguments of the platform, which must be started before megatron's model code is imported.
LAYOUT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
}


def add_own_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds this command's arguments and the cache's to megatron's. Parser errors become `InputError`."""

    def refuse(message: str) -> NoReturn:
        raise InputError(message)

    parser.error = refuse  # type: ignore[method-assign]
    add = add_hybrid_prefix_args(parser).add_argument_group("prompts and output").add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt, as text (repeatable)")
    add(
        "--prompt-tokens",
        action="append",
        default=[],
        metavar="IDS",
        help="a prompt as token ids: '5 17 3' (repeatable)",
    )
    add("--batch", action="store_true", help="send all prompts at once")
    add(
        "--num-tokens-to-generate", type=positive_int, default=32, metavar="N", help="length of an answer (default: 32)"
    )
    add("--json", type=Path, metavar="PATH", help="write all results as JSON")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu")
    return parser


def layout_of(argv: list[str]) -> argparse.Namespace:
    """Device and parallel sizes. Read first, because megatron's parser needs a running platform."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in LAYOUT:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    found, _ = parser.parse_known_args(argv)
    return argparse.Namespace(device=found.device, **{short: getattr(found, name) for name, short in LAYOUT.items()})


@contextmanager
def megatron_at_work(platform: Any) -> Iterator[None]:
    """A context for megatron.training: its prints go to stderr; without a GPU its ``device="cuda"`` means the CPU."""
    with redirect_stdout(sys.stderr), nullcontext() if platform.device.type == "cuda" else HostForCuda():
        yield


def parse(argv: list[str], platform: Any) -> argparse.Namespace:
    """Parses megatron's arguments and this command's.

    Raises:
        InputError: They are invalid.
    """
    # Megatron reads sys.argv, prints all arguments to stdout, and reports errors by assert.
    before, sys.argv = sys.argv, [sys.argv[0], *argv]
    try:
        with megatron_at_work(platform), as_input_errors(ValueError, FileNotFoundError, TypeError):
            from megatron.training.arguments import parse_and_validate_args  # it sets up logging, too

            args: argparse.Namespace = parse_and_validate_args(
                extra_args_provider=add_own_args, args_defaults={"micro_batch_size": 1}
            )
    except AssertionError as error:
        # Most of megatron's asserts have no message, so show the condition.
        why = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""
        raise InputError(f"megatron.training refused the arguments: {' '.join(why.split())}") from error
    finally:
        sys.argv = before
    args.gradient_accumulation_fusion = False  # needs an extension, and there are no gradients
    if platform.device.type == "cpu":  # torch.compile would start a C++ compiler, for seconds
        args.bias_dropout_fusion = args.bias_gelu_fusion = args.bias_swiglu_fusion = False
    args.no_load_optim = args.no_load_rng = args.exit_on_missing_checkpoint = True
    return args


def check(args: argparse.Namespace, layout: argparse.Namespace) -> None:
    """Checks the arguments before the model is built.

    Raises:
        InputError: They are invalid.
    """
    with as_input_errors(ValueError):
        hybrid_prefix_config_from_args(args)
    if args.hybrid_layer_pattern is None:
        raise InputError("give --hybrid-layer-pattern, or a checkpoint that has it and --use-checkpoint-args")
    for name, short in LAYOUT.items():
        if getattr(args, name) != getattr(layout, short):
            raise InputError(
                f"--{name.replace('_', '-')} must be given on the command line: it is not read from the checkpoint"
            )
    if args.load is None or not Path(args.load).is_dir():
        raise InputError("give --load, the folder of a Megatron checkpoint")
    if not args.prompt and not args.prompt_tokens:
        raise InputError("give --prompt or --prompt-tokens")
    if args.json is not None:
        check_writable(args.json)


def build_model(args: argparse.Namespace, platform: Any) -> Any:
    """Builds this rank's shard of the model, with random weights."""
    import torch
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.training.argument_utils import hybrid_config_from_args
    from megatron.training.models.hybrid import HybridModelBuilder

    from megatron_hybrid_prefix.models.build import local_layer_specs

    config = hybrid_config_from_args(args)
    if config.hybrid_stack_spec is None and args.transformer_impl != "inference_optimized":
        config.hybrid_stack_spec = hybrid_stack_spec
        if not platform.has_transformer_engine:
            config.hybrid_stack_spec = local_layer_specs(args.num_experts or 0)
            config.transformer.persist_layer_norm = False  # a kernel of Apex
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = HybridModelBuilder(config).build_model(groups).to(platform.device)
    if args.params_dtype != torch.float32:
        model = Float16Module(config.transformer, model)
    return model.requires_grad_(False).eval()


def load(model: Any, platform: Any) -> None:
    """Loads the weights of ``--load``.

    Raises:
        InputError: There is no checkpoint, or it is of another model.
    """
    from megatron.training.checkpointing import load_checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_hybrid_prefix.layers.kinds import invalidate_layers

    with megatron_at_work(platform):
        try:
            load_checkpoint([model], None, None)
        except (Exception, CheckpointException) as error:
            raise InputError(f"the checkpoint cannot be loaded: {type(error).__name__}: {error}") from error
        except SystemExit:
            raise InputError("--load: there is no checkpoint") from None
    invalidate_layers(model)


def read_prompts(args: argparse.Namespace, tokenizer: Any) -> list[Request]:
    """Reads the prompts as tokens.

    Raises:
        InputError: A prompt is empty, or has invalid token ids.
    """
    eod = getattr(tokenizer, "eod", None)
    sampling = {
        "num_tokens_to_generate": args.num_tokens_to_generate,
        "top_k": 1,
        "termination_id": -1 if eod is None else int(eod),
        "return_log_probs": True,
        "skip_prompt_log_probs": True,
    }
    found: list[tuple[str, list[int]]] = []
    for number, text in enumerate(args.prompt, 1):
        found.append((f"prompt {number}", list(tokenizer.tokenize(text))))
    for number, text in enumerate(args.prompt_tokens, 1):
        words = text.split()
        if not all(word.isdecimal() and int(word) < args.padded_vocab_size for word in words):
            raise InputError(f"--prompt-tokens: {text!r} must be token ids below {args.padded_vocab_size}")
        found.append((f"tokens {number}", [int(word) for word in words]))
    for label, tokens in found:
        if not tokens:
            raise InputError(f"{label} is empty")
    return [Request(label=label, tokens=tokens, sampling=sampling) for label, tokens in found]


def generate(engine: Any, requests: list[Request], batch: bool, should_stop: Callable[[], bool]) -> EngineRun:
    """Sends the requests, all at once or one after another."""
    from megatron_hybrid_prefix.upstream.names import SamplingParams

    started_s, results = time.perf_counter(), []
    for group in [requests] if batch else [[request] for request in requests]:
        sampling = [SamplingParams.deserialize(request.sampling) for request in group]
        results += send(engine, [request.tokens for request in group], sampling, should_stop)
    figures = cache_figures(engine)
    return EngineRun(
        name="off" if figures is None else "ours",
        requests=requests,
        results=results,
        wall_s=time.perf_counter() - started_s,
        prefix_stats=figures,
    )


def run(argv: list[str], interrupt: Interrupt) -> None:
    """Runs the script."""
    if "--help" in argv or "-h" in argv:  # without megatron's hundreds of options
        raw = argparse.RawDescriptionHelpFormatter
        add_own_args(argparse.ArgumentParser(description=__doc__, formatter_class=raw)).print_help()
        return
    layout = layout_of(argv)
    with started_platform(layout) as platform:
        args = parse(argv, platform)
        check(args, layout)
        run_on(platform, args, interrupt)


def run_on(platform: Any, args: argparse.Namespace, interrupt: Interrupt) -> None:
    """Builds the model and the engine, generates, prints and writes the report."""
    from megatron.training import get_tokenizer
    from megatron.training.initialize import initialize_megatron

    from megatron_hybrid_prefix.mcore import build_engine_from_args
    from megatron_hybrid_prefix.mcore.runner import check_fits, release_engine

    with megatron_at_work(platform):
        # Skip mpu: the process groups exist already, and the rest of it compiles helpers for training data.
        initialize_megatron(allow_no_cuda=True, skip_mpu_initialization=True)
        with as_input_errors(AssertionError, ValueError, PlatformError):
            model = build_model(args, platform)
    load(model, platform)
    tokenizer = get_tokenizer()
    requests = read_prompts(args, tokenizer)
    with as_input_errors(ValueError, PlatformError):
        engine = build_engine_from_args(model, args, tokenizer=tokenizer)
    try:
        for request in requests:
            with as_input_errors(ValueError, prefix=f"{request.label}: "):
                check_fits(engine, len(request.tokens), request.sampling["num_tokens_to_generate"])
        result = generate(engine, requests, args.batch, lambda: stop_requested(platform, interrupt))
    finally:
        release_engine(engine)
    if not is_main_rank():
        return
    console = output_console()
    console.print(platform.describe(), markup=False, soft_wrap=True)
    print_report(console, [result], [])
    answers = [asdict(answer) for answer in result.results]
    save_json(console, args.json, {"totals": totals(result), "prefix_stats": result.prefix_stats, "requests": answers})


main = as_main(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
