"""Runs Megatron-LM's own inference programs without and with the cache, and compares: see ``scripts/megatron_programs.sh``.

Nothing of a program changes: the environment switches the cache on, as ``hybrid-prefix env`` prints it. A program gets a checkpoint of a
tiny model with random weights, and prompts of two groups that share their beginnings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import torch
from tokenizers import Tokenizer

from megatron_hybrid_prefix.support.environment import CONFIG_VARIABLE, INSTALL_VARIABLE, ON, python_path
from megatron_hybrid_prefix.upstream.version import SUPPORTED, MegatronVersion, megatron_folder, version_in
from tests.harness.tokenizer_folder import make_folder
from tests.harness.workers.launch import torchrun

ROOT = Path(__file__).resolve().parents[1]
HARNESS = ROOT / "tests" / "harness"
MODEL = shlex.split(
    "--model-provider hybrid --hidden-size 64 --num-attention-heads 4 --hybrid-layer-pattern M*-M*- --mamba-num-heads 8 "
    "--mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 4 --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --seed 7 "
    "--tokenizer-type HuggingFaceTokenizer --no-gradient-accumulation-fusion"
)
# What a CPU lacks, beside what `tests/harness/program_launcher.py` replaces.
OF_A_CPU = shlex.split(
    "--distributed-backend gloo --no-persist-layer-norm --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion"
)
INFERENCE = shlex.split(
    "--inference-dynamic-batching-buffer-size-gb 0.05 --inference-dynamic-batching-max-requests 4 "
    "--inference-dynamic-batching-max-tokens 2048 --mamba-inference-ssm-states-dtype fp32 --mamba-inference-conv-states-dtype fp32"
)
ANSWER = 12  # tokens
# On Hopper without these megatron asks FlashAttention 4 for what it refuses; with the cache this package asks.
FLASH_ATTENTION = ("flash_attn_2_cuda", "flash_attn_3", "flashattn_hopper")
CHAT = "user: {}\nassistant:"  # as the template of `tokenizer_folder.py` has it
LIMIT_S = 300.0  # of a program; on a CPU most take 10
ADVANCED = "examples/inference/advanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of Megatron-LM.

    Attributes:
        path: In the checkout, or absolute.
        flags: Its own.
        kind: ``file``: writes the answers to ``--output-path``. ``server``: has an HTTP API. ``prints``: prints no answers.
        rounds: How often it sends all prompts, each time to an empty cache.
        emptied: Numbers of the prompts before which the cache is emptied.
        form: What a prompt becomes; "{}" stands for it.
        more_tokens: How much longer a sequence may be than the longest prompt; None: as long as the model allows.
    """

    path: str
    flags: str = ""
    kind: str = "file"
    rounds: int = 1
    emptied: tuple[int, ...] = ()
    form: str = "{}"
    more_tokens: int | None = None


PROGRAMS = {
    "dynamic": Program(path=f"{ADVANCED}/gpt_dynamic_inference.py", flags="--inference-repeat-n 3", rounds=3),
    "suspended": Program(
        path=f"{ADVANCED}/gpt_dynamic_inference.py", flags="--suspend-resume-interval 7", emptied=(4,)
    ),
    "coordinator": Program(path=f"{ADVANCED}/gpt_dynamic_inference_with_coordinator.py"),
    "offline": Program(path="examples/inference/offline_inference.py"),
    "offline-coordinator": Program(path="examples/inference/offline_inference.py", flags="--use-coordinator"),
    "offline-async": Program(path="examples/inference/offline_inference.py", flags="--use-coordinator --async-mode"),
    "text-server": Program(path="tools/run_dynamic_text_generation_server.py", kind="server"),
    "inference-server": Program(path="examples/inference/launch_inference_server.py", kind="server"),
    "performance": Program(
        path="tools/run_inference_performance_test.py",
        flags="--engine-type dynamic --num-input-tokens 100 --inference-max-requests 4",
        kind="prints",
    ),
    "megatron-local": Program(path=str(HARNESS / "megatron_local.py"), rounds=2, form=f"<s>{CHAT}", more_tokens=24),
}


def problem_of(checkout: Path) -> str | None:
    """Why the programs of a folder cannot be run, or None."""
    missing = [each.path for each in PROGRAMS.values() if not (checkout / each.path).is_file()]
    if missing:
        return f"{checkout} is no checkout of Megatron-LM that has these programs: it has no {missing[0]}"
    return None


def megatron_path(checkout: Path) -> list[str]:
    """Folders for ``PYTHONPATH``: the checkout, and before it the installed megatron-core if that of the checkout is not supported.

    Raises:
        ValueError: Neither is supported.
    """
    of_checkout = MegatronVersion(version=version_in(checkout / "megatron" / "core"))
    if of_checkout.is_supported:
        return [str(checkout)]
    folder = megatron_folder()
    if folder is None or not MegatronVersion(version=version_in(folder)).is_supported:
        raise ValueError(
            f"{of_checkout} of the checkout is not supported, nor is another installed; supported is {SUPPORTED}"
        )
    return [str(folder.parents[1]), str(checkout)]


def make_prompts(block_tokens: int) -> list[str]:
    """Six prompts: two groups of three that share their first five blocks and some tokens."""
    words = (
        "keys values blocks states prompts tokens caches layers heads experts ranks requests answers slots pages hits"
    )
    draw = random.Random(5)

    def text(count: int) -> str:
        return " ".join(draw.choice(words.split()) for _ in range(count))

    return [f"{shared} {text(8)}" for shared in [text(block_tokens * 3 // 2) for _ in range(2)] for _ in range(3)]


def port_for_later() -> int:
    """A free port that no connection is given meanwhile: a server takes it seconds later, when its model is loaded."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port from 20000 to 32000")


def reusable(prompts: Sequence[Sequence[int]], block_tokens: int) -> int:
    """Tokens of whole blocks that each prompt shares with an earlier one."""
    found = 0
    for number, prompt in enumerate(prompts):
        shared = 0
        for other in prompts[:number]:
            differs = (at for at, (one, two) in enumerate(zip(prompt, other, strict=False)) if one != two)
            shared = max(shared, next(differs, min(len(prompt), len(other))))
        found += min(shared, len(prompt) - 1) // block_tokens * block_tokens
    return found


class Runs:
    """Runs programs on one machine.

    Args:
        checkout: Of Megatron-LM.
        folder: For the model, prompts, answers and logs.
        device: "cpu" or "cuda".
        flags: Of Megatron-LM, added to those of all programs, the one that makes the checkpoint included.
    """

    def __init__(self, checkout: Path, folder: Path, device: str, flags: Sequence[str] = ()) -> None:
        self.checkout, self.folder, self.device, self.flags = checkout, folder, device, flags
        self.block_tokens = 256 if device == "cuda" else 64  # flash-attention wants blocks of 256
        self.prompts = make_prompts(self.block_tokens)
        self.tokenizer = Tokenizer.from_file(str(make_folder(folder / "tokenizer") / "tokenizer.json"))
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in self.prompts))
        self.megatron = megatron_path(checkout)

    def environment(self, cached: bool) -> dict[str, str]:
        """What a program gets. ``cached`` is the one difference of two runs."""
        given = {name: value for name, value in os.environ.items() if not name.startswith("HYBRID_PREFIX_")}
        given |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        others = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(ROOT))]
        path = os.pathsep.join([*self.megatron, *others, str(ROOT)])  # last: a clone has tests and examples, too
        if self.device == "cpu":
            given["CUDA_VISIBLE_DEVICES"] = ""
        if len(self.megatron) > 1:  # megatron.training runs make in the wheel, where all is compiled and no Makefile is
            given["MAKEFLAGS"] = "--eval=default:"
        if cached:
            given |= {INSTALL_VARIABLE: ON, CONFIG_VARIABLE: '{"cache_gb": 0.05}'}
            path = python_path(path)
        return given | {"PYTHONPATH": path}

    def command(self, path: str, tp: int, flags: Sequence[str], cached: bool = False) -> list[str]:
        """The command of a program, with the launcher before it where it cannot run as it is."""
        as_it_is = self.device == "cuda" and (cached or any(map(find_spec, FLASH_ATTENTION)))
        launcher = [] if as_it_is else [str(HARNESS / "program_launcher.py")]
        common = [*MODEL, *(OF_A_CPU if self.device == "cpu" else ["--bf16"]), "--tensor-model-parallel-size", str(tp)]
        common += ["--tokenizer-model", str(self.folder / "tokenizer")]
        return [*torchrun(tp), *launcher, str(self.checkout / path), *common, *flags, *self.flags]

    @contextmanager
    def started(self, command: list[str], cached: bool, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A program while it runs; it is ended at the end."""
        with log.open("wb") as out:
            process = subprocess.Popen(command, env=self.environment(cached), stdout=out, stderr=subprocess.STDOUT)
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)  # torchrun ends its ranks, which are in other sessions
                process.wait(60)

    def tokens(self, form: str) -> list[list[int]]:
        """The prompts in a form, as tokens."""
        return [self.tokenizer.encode(form.format(prompt)).ids for prompt in self.prompts]

    def save(self) -> None:
        """Makes the checkpoint that all programs load.

        Raises:
            RuntimeError: It could not be made.
        """
        flags = ["--save", str(self.folder / "checkpoint"), "--save-interval", "1"]
        log = self.folder / "save.log"
        with self.started(self.command(str(HARNESS / "megatron_save.py"), 1, flags), False, log) as process:
            if process.wait(LIMIT_S):
                raise RuntimeError(f"no checkpoint: {error_in(log)}")

    def answers(self, name: str, tp: int, cached: bool) -> tuple[list[Any], int]:
        """What a program answers, and how many prompt tokens the cache reused.

        Raises:
            RuntimeError: It failed, or took too long.
        """
        program = PROGRAMS[name]
        log = self.folder / f"{name}-tp{tp}-{'on' if cached else 'off'}.log"
        longest = max(map(len, self.tokens(program.form))) + program.more_tokens if program.more_tokens else 2048
        flags = [*INFERENCE, "--inference-dynamic-batching-block-size", str(self.block_tokens), *program.flags.split()]
        flags += ["--load", str(self.folder / "checkpoint"), "--inference-max-seq-length", str(longest)]
        flags += ["--num-tokens-to-generate", str(ANSWER)]
        out, port = log.with_suffix(".json"), port_for_later()
        if program.kind == "file":
            flags += ["--prompt-file", str(self.folder / "prompts.jsonl"), "--incoming-requests-per-sec", "-1"]
            flags += ["--termination-id", "-1", "--output-path", str(out)]
        elif program.kind == "server":
            flags += ["--host", "127.0.0.1", "--port", str(port)]
        with self.started(self.command(program.path, tp, flags, cached), cached, log) as process:
            try:
                if program.kind == "server":
                    found = self.ask(f"http://127.0.0.1:{port}", process)
                elif process.wait(LIMIT_S):
                    raise RuntimeError(error_in(log))
                elif program.kind == "file":
                    entries = json.loads(out.read_text()).values()
                    found = [each["generated_tokens"] for each in entries if isinstance(each, dict)]
                else:
                    found = re.findall(r"'num_output_tokens': (\d+)", log.read_text())
            except (subprocess.TimeoutExpired, openai.OpenAIError) as error:
                raise RuntimeError(f"{type(error).__name__}: {error_in(log)}") from None
        return found, sum(map(int, re.findall(r"prefix cache: (\d+) of \d+ prompt tokens reused", log.read_text())))

    def ask(self, url: str, process: subprocess.Popen[bytes]) -> list[str]:
        """What a server answers to the openai client: to each prompt, and to the last one as a chat, twice."""
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)
        until = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < until:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):
                break
            time.sleep(0.5)
        wanted = {"model": "any", "max_tokens": ANSWER, "temperature": 0}
        found = [client.completions.create(prompt=prompt, **wanted).choices[0].text for prompt in self.prompts]
        chat = [{"role": "user", "content": self.prompts[-1]}]
        answers = [client.chat.completions.create(messages=chat, **wanted).choices[0] for _ in range(2)]
        return found + [answer.message.content for answer in answers]

    def compare(self, name: str, tp: int) -> str:
        """One line: what came out of a program without and with the cache. Starts with ``ok`` if all is as it should be."""
        try:
            (off, _), (on, reused) = (self.answers(name, tp, cached) for cached in (False, True))
        except RuntimeError as error:
            return f"FAILED {error}"
        program = PROGRAMS[name]
        equal = sum(a == b for a, b in zip(off, on, strict=False))
        if program.kind == "prints":
            right = len(off) > 0 and off == on and not reused
            return (
                f"{'ok' if right else 'FAILED'} {len(on)} answers as long as without the cache; prompts share nothing"
            )
        tokens, ends = self.tokens(program.form), [0, *program.emptied, len(self.prompts)]
        parts = [tokens[start:end] for start, end in pairwise(ends)]
        if program.kind == "server":
            parts.append(self.tokens(CHAT)[-1:] * 2)
        expected = program.rounds * sum(reusable(part, self.block_tokens) for part in parts)
        right = len(off) == len(on) > 0 and (equal == len(off) or self.device == "cuda") and reused == expected
        return (
            f"{'ok' if right else 'FAILED'} {equal} of {len(off)} answers equal, {reused} tokens reused of {expected}"
        )


def error_in(log: Path) -> str:
    """The first error in a log, in one line: those after it are often of other ranks, which lost this one."""
    named = r"(?:\w+\.)*(?=\w*(?:Error|Exception)\w*: )|\w+\.py: (?=error: )"  # of Python, or of argparse
    lines = re.findall(rf"^(?:\[rank\d+\]: )?(?:{named})(.*)", log.read_text(errors="replace"), re.MULTILINE)
    return f"{next((line for line in lines if 'ChildFailedError' not in line), 'no error')} (see {log})"


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    given, flags = (given[: (at := given.index("--"))], given[at + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(
        prog="megatron_programs.sh",
        allow_abbrev=False,
        epilog="After --: flags of Megatron-LM for all programs, such as -- --transformer-impl inference_optimized.",
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="of Megatron-LM")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"some of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument(
        "--tp",
        type=int,
        action="append",
        help="tensor-parallel size, repeatable (default: 1, and 2 unless there is one GPU)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="an empty folder for logs and answers")
    options = parser.parse_intermixed_args(given)  # programs may stand after options
    checkout = options.checkout.resolve()
    unknown = [name for name in options.programs if name not in PROGRAMS]
    if unknown:
        parser.error(f"there is no program {unknown[0]}; there are: {', '.join(PROGRAMS)}")
    if problem := problem_of(checkout):
        parser.error(problem)
    gpus = torch.cuda.device_count()
    device = options.device or ("cuda" if gpus else "cpu")
    sizes = options.tp or ([1] if device == "cuda" and gpus == 1 else [1, 2])
    if device == "cuda" and max(sizes) > gpus:
        parser.error(f"--tp {max(sizes)}: there are {gpus} GPUs")
    with tempfile.TemporaryDirectory() as own:
        folder = options.keep or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        failed = 0
        try:
            runs = Runs(checkout, folder.resolve(), device, flags)
            runs.save()
        except (ValueError, RuntimeError) as error:
            parser.error(str(error))
        for tp in sizes:
            for name in options.programs or PROGRAMS:
                line = runs.compare(name, tp)
                failed += not line.startswith("ok")
                print(f"{name:20} tp={tp} {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
