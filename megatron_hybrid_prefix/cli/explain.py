"""Ask a running server what a request would reuse of its prefix cache, and why not more. Nothing changes there.

examples:
    hybrid-prefix explain "Once upon a time"
    hybrid-prefix explain --request chat.json --url http://gpu1:8000 --json
    journalctl -u app | jq -c .body | tail -1 | hybrid-prefix explain --request -

--request has the body of a request as the server got it: of /v1/chat/completions if it has "messages", else of /v1/completions.
The server needs --admin-token, and so does this command. Each replica has a cache of its own, and says what that one has.

exit code: 0; 2 for bad input, or if the server cannot be reached or refuses; 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.cli.serve import ADMIN_TOKEN
from megatron_hybrid_prefix.console import terminal
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, as_main

_WAIT_S = 60.0


def make_parser() -> ArgumentParser:
    """The command's parser."""
    parser = terminal.command_parser(__doc__)
    add = parser.add_argument
    add("prompt", nargs="?", help="text of a completion's prompt")
    add(
        "--request",
        type=Path,
        metavar="FILE",
        help="JSON body of a request, in place of the prompt; '-': standard input",
    )
    add("--salt", metavar="TEXT", help="the request's cache_salt")
    add("--tenant", metavar="NAME", help="name of the request's API key, if the server has --api-keys")
    add("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add("--admin-token", metavar="TOKEN", help=f"the server's admin token (default: ${ADMIN_TOKEN})")
    add("--json", action="store_true", help="print the server's answer, with all numbers")
    return parser


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    if (args.prompt is None) == (args.request is None):
        raise InputError("give a prompt or --request FILE")
    request: Any = {"prompt": args.prompt}
    if args.request is not None:
        request = terminal.read_json(args.request)
    if not isinstance(request, dict):
        raise InputError(f"--request: {args.request} has no JSON object")
    if args.salt is not None:
        request["cache_salt"] = args.salt
    body = {"request": request} | ({} if args.tenant is None else {"tenant": args.tenant})
    answer = ask(args.url, args.admin_token or os.environ.get(ADMIN_TOKEN, ""), body)
    if args.json:
        print(json.dumps(answer, indent=1))
        return
    for name, found in answer["replicas"].items():
        if len(answer["replicas"]) > 1:
            print(f"replica {name}:")
        for sentence in found.get("sentences") or [found["error"]]:
            print(terminal.printable(sentence))


def ask(url: str, token: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of the server's route ``/admin/explain``.

    Raises:
        InputError: The server cannot be reached, or refuses; one line says why.
    """
    if not token:
        raise InputError(f"--admin-token: the server's admin token is needed; or set {ADMIN_TOKEN}")
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    with terminal.as_input_errors(ValueError, prefix="--url: "):
        request = urllib.request.Request(f"{url.rstrip('/')}/admin/explain", json.dumps(body).encode(), headers)
    if not request.type.startswith("http"):
        raise InputError(f"--url: {url} must begin with http:// or https://")
    try:
        with urllib.request.urlopen(request, timeout=_WAIT_S) as reply:
            answer: dict[str, Any] = json.load(reply)
    except urllib.error.HTTPError as error:
        raise InputError(f"{url} refuses: {_message(error)}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{url} does not answer: {error}") from None
    return answer


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says, or its status if it is no server of this package."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, TypeError, LookupError):
        return f"status {error.code}, which is no answer of hybrid-prefix serve"


main = as_main(run)
