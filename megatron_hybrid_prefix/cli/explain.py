"""Ask a running server what a request would reuse of its prefix cache, and why not more. Nothing changes there.

examples:
    hybrid-prefix explain "Once upon a time"
    hybrid-prefix explain --request chat.json --url http://gpu1:8000 --json
    journalctl -u app | jq -c .body | tail -1 | hybrid-prefix explain --request -

--request has the body of a request as the server got it: of /v1/chat/completions if it has "messages", else of /v1/completions.
The server needs an admin token (HYBRID_PREFIX_ADMIN_TOKEN), and so does this command. Each replica has a cache of its own, and says what that one has.

exit code: 0; 2 for bad input, or if the server cannot be reached or refuses; 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.cli.serve import ADMIN_TOKEN
from megatron_hybrid_prefix.console import terminal
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, as_main
from megatron_hybrid_prefix.metrics import NotReused

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
        for sentence in [found["error"]] if "error" in found else sentences(found):
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


_REFUSED = {
    "cache_read": "The request reuses nothing: cache_read is false.",
    "prompt_log_probs_gb": "The request asks for the log-probs of its prompt, and prompt_log_probs_gb=0 keeps none.",
    "verify_hits": "Every hit is computed again, to compare: verify_hits is 1.",
    None: "There is no room for a cached state: raise mamba_gb, or the memory.",
}
_WHY = {
    NotReused.BELOW_ONE_BLOCK: "The prompt is no longer than a block of {block_tokens} tokens, and its last token is computed.",
    NotReused.EPOCH: "The weights epoch is {epoch}: what was cached before it is gone.",
    NotReused.KV_GONE: "KV after token {kv:,} was evicted.",
    NotReused.OTHER_SALT: "Its start is cached with another salt or adapter: only requests with the same ones share.",
    NotReused.NO_SUCH_PREFIX: "Block {block} is on no tier: no earlier prompt had it, or it was evicted long ago.",
}
_TIERS = {"device": "the device", "host": "the host", "shared": "the shared tier"}


def sentences(found: dict[str, Any]) -> list[str]:
    """An `Explanation` in words: what is reused, what there is, why not more, and what later prompts find.

    Args:
        found: Its fields.
    """
    resume, step, kv = found["resume_tokens"], found["block_tokens"], max(found["kv_tokens"].values())
    most, reason = found["limit_tokens"] // step * step, found["reason"]
    reused = f"from the state on {_TIERS[found['tier']]}" if resume else "nothing"
    said = [f"{resume:,} of the {found['prompt_tokens']:,} prompt tokens would be reused: {reused}."]
    if found["refused_by"] or not found["most_states"]:
        said.append(_REFUSED[found["refused_by"]])
    elif resume < most or reason is not None:
        said += [
            f"KV goes to token {depth:,} on {_TIERS[tier]}." for tier, depth in found["kv_tokens"].items() if depth
        ]
        if kv > most:
            said.append(f"Tokens after {found['limit_tokens']:,} are always computed.")
        elif kv < most and reason not in _WHY:
            reason = NotReused.KV_GONE if found["seen_tokens"] > kv else NotReused.NO_SUCH_PREFIX
        if reason in _WHY:
            said.append(_WHY[reason].format(kv=kv, block=kv // step + 1, **found))
        said += _about_states(found, min(kv, most))
    if not found["writes"]:
        said.append("This request would keep nothing: cache_write is false.")
    elif kept := found["kept_tokens"]:
        said.append(f"This request would keep {_states(kept)}: prompts that begin alike resume there.")
    return said


def _about_states(found: dict[str, Any], usable: int) -> Iterator[str]:
    """Why the request does not resume deeper, where KV is: up to ``usable``."""
    resume, least, scored = found["resume_tokens"], found["least_load_tokens"], found["scored_tokens"]
    deeper = {tier: [at for at in places if resume < at <= usable] for tier, places in found["state_tokens"].items()}
    for tier, places in deeper.items():
        if not places:
            continue
        reason = "the device has no room to load it now"
        if scored is not None and places[-1] not in scored:
            reason = "the log-probs of the prompt before it are not kept, and the request asks for them"
        elif tier == "shared" and places[-1] - resume < least:
            reason = f"a load that saves fewer than {least:,} tokens does not begin"
        yield f"The state at {places[-1]:,} is on {_TIERS[tier]}, but {reason}."
    if evicted := [at for at in found["evicted_tokens"] if at > resume]:
        yield f"Evicted: {_states(evicted)}."
    if writing := [at for at in found["writing_tokens"] if at > resume]:
        yield f"A running forward writes {_states(writing)}."
    if resume < usable and not any(deeper.values()) and not evicted and not writing:
        yield f"Between {resume:,} and {usable:,} no state was kept, or it was evicted."


def _states(places: Sequence[int]) -> str:
    """States, at most the last four."""
    return f"the state{'s' * (len(places) > 1)} at {', '.join(f'{place:,}' for place in places[-4:])}"


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says, or its status if it is no server of this package."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, TypeError, LookupError):
        return f"status {error.code}, which is no answer of hybrid-prefix serve"


main = as_main(run)
