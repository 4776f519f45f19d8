"""Convert a Hugging Face folder to a Megatron distributed checkpoint, which any TP, PP and EP can load.

examples:
    hybrid-prefix convert --hf ./Nemotron-H-8B --out ./Nemotron-H-8B-mcore
    hybrid-prefix generate "Hello" --preset nemotron-h-8b --load ./Nemotron-H-8B-mcore --tokenizer ./Nemotron-H-8B
    torchrun --nproc-per-node 2 -m megatron_hybrid_prefix convert --hf ./Nemotron-H-8B --out ./Nemotron-H-8B-mcore --tp 2

The model is built on this machine, so its weights have to fit: on the GPU, or in host memory with --device cpu. --load needs
a model of the same dimensions; hybrid_model.json in the new folder has them. --hf itself needs no conversion.

exit code: 0; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from megatron_hybrid_prefix.console import running, terminal
from megatron_hybrid_prefix.console.engine_options import add_options
from megatron_hybrid_prefix.console.hf import build_model, choose_model
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, as_main

GB = 1e9


def make_parser() -> ArgumentParser:
    """The command's parser."""
    parser = terminal.command_parser(__doc__)
    add_options(parser, "--hf", "--tp", "--pp", "--device")
    text = "folder for the checkpoint: a new or an empty one"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    parser.set_defaults(preset=None)
    return parser


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    if args.hf is None:
        raise InputError("convert needs --hf DIR")
    config = choose_model(args, "")
    terminal.check_folder(args.out, "--out")
    with terminal.as_input_errors(ValueError):
        config.check_parallel(tp=args.tp, pp=args.pp)
    with running.started_platform(args) as platform:
        from megatron_hybrid_prefix import models

        started_s = time.perf_counter()
        model = build_model(args, config, platform)
        loaded_s = time.perf_counter()
        with terminal.as_input_errors(ValueError, OSError):
            models.save_checkpoint(model, args.out)
        saved_s = time.perf_counter()
        if terminal.is_main_rank():
            files = [path for path in args.out.rglob("*") if path.is_file()]
            size_gb = sum(path.stat().st_size for path in files) / GB
            text = f"wrote {args.out}: {size_gb:.3g} GB in {len(files)} files; {loaded_s - started_s:.1f} s to load, "
            terminal.output_console().print(f"{text}{saved_s - loaded_s:.1f} s to save", markup=False, soft_wrap=True)


main = as_main(run)
