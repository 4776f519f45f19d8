"""Serve a hybrid model over HTTP with the OpenAI API and this package's prefix cache.

examples:
    hybrid-prefix serve --preset tiny --port 8000
    hybrid-prefix serve --hf ./NVIDIA-Nemotron-Nano-9B-v2 --cache-gb 100
    hybrid-prefix serve --preset nemotron-h-8b --load CHECKPOINT --tokenizer FOLDER --cuda-graphs 8 --max-requests 64
    torchrun --nproc-per-node 8 -m megatron_hybrid_prefix serve --tp 2 ...   # 4 replicas of 2 GPUs

routes:
    POST /v1/completions, /v1/chat/completions   streamed or not; for the `openai` client
    POST /inference/v1/generate                  token ids in, token ids out, as vLLM's
    POST /tokenize, /detokenize; GET /tokenizer_info   as vLLM's
    GET  /v1/models, /version, /health, /health_generate, /metrics   /metrics is for Prometheus
    POST /admin/reset_cache, /admin/explain      empties the prefix cache; what a request would reuse, and why not more

/admin is off unless the variable HYBRID_PREFIX_ADMIN_TOKEN has the token that these requests send.

A response says in usage.prompt_tokens_details.cached_tokens how many prompt tokens were skipped.

Requests have OpenAI's fields, vLLM's for sampling ("top_k", "min_p", ...), and for the cache "cache_salt", "cache_read",
"cache_write", "cache_breakpoints", "cache_session", "cache_uses" and "cache_pin"; docs/server.md lists them. Unknown fields are ignored, and named once in the log.

--api-keys: each line of the file is "NAME KEY". Requests with keys of different names share nothing.

Under torchrun, --tp x --pp ranks form a replica. Megatron's data-parallel coordinator sends each request to the replica that
has most of its prefix; other requests take turns. Requests with one "prompt_cache_key" go to one replica.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qsl, urlsplit

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.console import engine_options as options
from megatron_hybrid_prefix.console import running, terminal
from megatron_hybrid_prefix.console.hf import build_model, default_sampling, tokenizer_folder, tokenizer_of
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, Stopped, as_main
from megatron_hybrid_prefix.serve.chat_template import load_chat_form
from megatron_hybrid_prefix.support.private_folder import others_read, warn_if_others_read

ADMIN_TOKEN = "HYBRID_PREFIX_ADMIN_TOKEN"
LOG_LEVELS = [level + form for form in ("", ",json") for level in ("debug", "info", "warning", "error")]
NEEDS = ("starlette", "uvicorn", "prometheus_client", "pydantic", "transformers")
NEEDS_OF_REPLICAS = ("zmq", "msgpack")
_CONNECT_S = 60.0


def make_parser() -> ArgumentParser:
    """The command's parser."""
    parser = terminal.command_parser(__doc__)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=options.whole_number,
        default=8000,
        help="port to listen on; 0: any free port (default: %(default)s)",
    )
    text = "model name in the API (default: that of --preset, or the folder of --hf)"
    add("--served-model-name", metavar="NAME", help=text)
    add("--api-keys", type=Path, metavar="FILE", help="require an API key; each line of FILE is 'NAME KEY'")
    text = "go on if others can read the file of --api-keys, or a secret_file of --shared (default: refuse it)"
    add("--allow-readable-keys", action="store_true", help=text)
    text = "most waiting answers; further requests get 429 (default: %(default)s)"
    add("--max-waiting", type=options.whole_number, default=256, metavar="N", help=text)
    text = "most answers that run or wait for one name of --api-keys; further requests get 429 (default: no limit)"
    add("--max-per-tenant", type=options.positive_int, metavar="N", help=text)
    text = "seconds that the body of a request may take (default: %(default)s)"
    add("--read-timeout", type=options.positive_float, default=60.0, metavar="S", help=text)
    text = "seconds that a step of the engine may take before /health says 503 (default: %(default)s)"
    add("--step-timeout", type=options.positive_float, default=300.0, metavar="S", help=text)
    text = "seconds that open requests may go on after SIGTERM or Ctrl-C (default: %(default)s)"
    add("--drain-time", type=seconds, default=5.0, metavar="S", help=text)
    text = "least level of log lines: replies are 'info', without prompts, those to probes 'debug'; with ',json' lines are JSON "
    text += "(default: %(default)s)"
    add("--log-level", choices=LOG_LEVELS, default="info", metavar="LEVEL[,json]", help=text)
    text = "largest request body in MiB; larger ones get 413 (default: %(default)s)"
    add("--max-body-mb", type=options.positive_float, default=16.0, metavar="MIB", help=text)

    group = parser.add_argument_group("model")
    options.add_options(group, *options.MODEL_OPTIONS, "--load", *options.TEXT_OPTIONS)
    text = "Jinja chat template (default: that of the --tokenizer or --hf folder, else a plain format; none with --hf)"
    group.add_argument("--chat-template", type=Path, metavar="FILE", help=text)

    group = parser.add_argument_group("engine")
    options.add_options(
        group,
        "--max-sequence-length",
        "--num-speculative-tokens",
        *(name for name in options.ENGINE_OPTIONS if name != "--chunked-prefill"),
        "--checkpoint-dtype",
    )
    add = group.add_argument
    text = "share of the hits, 0 to 1, to compute without the cache, too, and compare (default: %(default)s)"
    add("--verify-hits", type=share, default=0.0, metavar="SHARE", help=text)
    add("--no-cache", action="store_true", help="compute every prompt whole, and keep no state: for comparisons")
    text = "allow 'prompt_logprobs', and 'echo' with 'logprobs'; takes memory for the logits of all tokens of a step, and so much "
    text += "host memory at most for those of cached prompts, so that prompts that want them can skip tokens (default: %(const)s)"
    add("--prompt-log-probs", nargs="?", type=options.positive_float, const=0.25, metavar="GIB", help=text)
    text = "return 'routed_experts' in choices: which experts each token went through, as vLLM does"
    add("--enable-return-routed-experts", action="store_true", help=text)
    parser.set_defaults(chunked_prefill=True)
    return parser


def seconds(text: str) -> float:
    """An argparse type: a number of seconds, 0 or more."""
    return 0.0 if text in ("0", "0.0") else options.positive_float(text, "a number, 0 or above")


def share(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    value = seconds(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is above 1")
    return value


def check_needs() -> None:
    """Raises InputError if a package is missing."""
    needs = NEEDS + (NEEDS_OF_REPLICAS if terminal.has_other_ranks() else ())
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not installed: pip install 'megatron-hybrid-prefix[serve]'")


def check_options(args: argparse.Namespace) -> Any:
    """Checks everything that needs neither torch nor a device. Returns the model's configuration."""
    with terminal.as_input_errors(ValueError, prefix="--shared: "):
        shared = dict(parse_qsl(urlsplit(args.shared or "").query))
    for path in map(Path, filter(None, (args.api_keys, shared.get("secret_file")))):
        if not args.allow_readable_keys and others_read(path):
            raise InputError(f"others can read the keys in {path}: chmod 600 it, or give --allow-readable-keys")
    config = options.check_engine_options(args)
    if args.no_cache:
        given = ("mamba_gb", "host_gb", "shared", "verify_hits")
        for name in (name for name in given if getattr(args, name)):
            raise InputError(f"--no-cache: leaves nothing for --{name.replace('_', '-')} to do")
    if args.enable_return_routed_experts and not config.has_experts:
        raise InputError("--enable-return-routed-experts: the model has no experts")
    if args.port > 65535:
        raise InputError(f"--port: {args.port} is above 65535")
    args.host = args.host.removeprefix("[").removesuffix("]")  # as an IPv6 address stands in a URL
    if not _can_be_sent(os.environ.get(ADMIN_TOKEN, "")):
        raise InputError(f"{ADMIN_TOKEN}: only visible ASCII characters can be sent in a header")
    return config


def _can_be_sent(key: str) -> bool:
    return key.isascii() and key.isprintable()


def read_keys(path: Path | None) -> dict[str, str]:
    """Tenant names by API key. Raises InputError if a line is not "NAME KEY", or a key appears twice."""
    keys: dict[str, str] = {}
    if path is not None:
        warn_if_others_read(path)
    for number, line in enumerate(terminal.read_text(path).splitlines() if path is not None else (), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[1] in keys:
            raise InputError(f"{path}:{number}: expected 'NAME KEY', each key once")
        if not _can_be_sent(words[1]):
            raise InputError(f"{path}:{number}: only visible ASCII characters of a key can be sent in a header")
        keys[words[1]] = words[0]
    if path is not None and not keys:
        raise InputError(f"{path}: no API keys in it")
    return keys


def cache_config(args: argparse.Namespace, budgets: options.Budgets) -> HybridPrefixConfig:
    """The cache's settings. With ``--no-cache`` no state is cached, and each request is told to use none."""
    return replace(
        budgets.prefix,
        mamba_gb=0.0 if args.no_cache else args.mamba_gb,
        state_dtype=args.state_dtype,
        verify_hits=args.verify_hits,
        prompt_log_probs_gb=0.0 if args.no_cache else args.prompt_log_probs or 0.0,
    )


def make_engine(model: Any, tokenizer: Any, platform: Any, args: argparse.Namespace) -> Any:
    """Builds the engine for the options, and warms it up. Raises InputError if it cannot be built."""
    fields = options.engine_fields(args, platform.device.type, 0, args.max_sequence_length)
    fields["prefix"] = cache_config(args, running.budgets_of(args, platform))
    fields["materialize_only_last_token_logits"] = not args.prompt_log_probs
    return running.made_engine("the engine", model, fields, tokenizer)


def listen(host: str, port: int) -> socket.socket:
    """Binds the socket. Connections are refused until the server is ready.

    Raises:
        InputError: The address is not available.
    """
    from megatron_hybrid_prefix.serve.http_server import bound_socket

    with terminal.as_input_errors(OSError, OverflowError, UnicodeError, prefix=f"cannot listen on {host}:{port}: "):
        return bound_socket(host, port)


def url_of(host: str, port: int) -> str:
    """The server's URL; an IPv6 address stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def end_at_once(number: int, _: object) -> NoReturn:
    """A handler until the server has its own: one line. The kernel would not end the first process of a container at all."""
    if terminal.is_main_rank():
        logging.warning("%s before the server was ready: it ends", signal.Signals(number).name)
    os._exit(128 + number)


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    check_needs()
    from megatron_hybrid_prefix.serve.front import start_logging

    level, _, form = args.log_level.partition(",")
    start_logging(level, as_json=form == "json")
    config = check_options(args)
    keys = read_keys(args.api_keys)
    tokenizer = tokenizer_of(args, config.vocab_size)
    sampling = default_sampling(args)
    chat = load_chat_form(args.chat_template, tokenizer_folder(args), plain=args.hf is None)
    with ExitStack() as stack:
        listener = stack.enter_context(listen(args.host, args.port)) if terminal.is_main_rank() else None
        signal.signal(signal.SIGTERM, end_at_once)
        platform = stack.enter_context(running.started_platform(args))
        terminal.output_console().print(platform.describe(), markup=False, soft_wrap=True)
        running.budgets_of(args, platform)  # before weights are read
        model = build_model(args, config, platform)
        engine = make_engine(model, tokenizer, platform, args)
        if running.stop_requested(platform, interrupt):
            raise Stopped
        if listener is None:
            from megatron_hybrid_prefix.serve.ranks import serve_with_others

            serve_with_others(engine, args.drain_time)
        name = args.served_model_name or args.preset
        url = url_of(*listener.getsockname()[:2])

        def on_start() -> None:
            print(f"serving {name} on {url}", flush=True)
            if interrupt.requested:  # Ctrl-C before uvicorn installed its handlers
                os.kill(os.getpid(), signal.SIGTERM)

        from megatron_hybrid_prefix.serve.app import make_app
        from megatron_hybrid_prefix.serve.front import is_loopback

        app_of = partial(
            make_app,
            engine,
            tokenizer,
            model=name,
            vocab_size=config.vocab_size,
            chat=chat,
            default_sampling=sampling,
            add_bos=args.add_bos,
            caches=not args.no_cache,
            max_waiting=args.max_waiting,
            body_bytes=int(args.max_body_mb * 2**20),
            keys=keys,
            max_per_tenant=args.max_per_tenant,
            read_s=args.read_timeout,
            step_s=args.step_timeout,
            is_private=is_loopback(listener.getsockname()[0]),
            admin_token=os.environ.get(ADMIN_TOKEN) or None,
            on_start=on_start,
        )
        if platform.world_size == 1:
            serve_http(app_of(), listener, args)
            return 0
        serve_replicas(app_of, engine, platform, listener, args)


def serve_http(app: Any, listener: socket.socket, args: argparse.Namespace) -> None:
    """Serves until Ctrl-C or SIGTERM. Open requests then get ``--drain-time`` seconds to finish."""
    from megatron_hybrid_prefix.serve.http_server import HttpServer

    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again after it has stopped
    options: dict[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False}
    HttpServer(app, drain_s=args.drain_time, **options).run(sockets=[listener])
    if app.state.backend.is_running:
        # The interpreter cannot end with a thread in the middle of a step.
        logging.warning("a step of the engine still runs; the process ends without it")
        logging.shutdown()
        os._exit(0)


def serve_replicas(
    app_of: Callable[..., Any], engine: Any, platform: Any, listener: socket.socket, args: argparse.Namespace
) -> NoReturn:
    """Serves on rank 0 of several ranks, and stops the others at the end. The process ends with this call."""
    from megatron_hybrid_prefix.mcore.ranks.coordinator import CoordinatorProcess
    from megatron_hybrid_prefix.serve.ranks import RankEngine, leave, own_address
    from megatron_hybrid_prefix.serve.replicas import ReplicaLoop

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    ended_well = False
    coordinator = CoordinatorProcess(engine, own_address())
    try:
        rank = RankEngine(engine, coordinator.port)
        rank.wait_until_connected()
        coordinator.wait_until_ready(_CONNECT_S)
        make_backend = partial(ReplicaLoop, rank, coordinator, platform.dp, on_failure=stop)
        app = app_of(make_backend=make_backend, replicas=platform.dp)
        serve_http(app, listener, args)
        ended_well = app.state.backend.ended_well
    except Exception:
        logging.exception("the server ends")
    finally:
        coordinator.stop()
    leave(0 if ended_well else 1)  # other ranks may hang, and the interpreter would wait for them


main = as_main(run)
