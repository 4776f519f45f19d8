"""`scripts/megatron_programs.sh`, without a checkout of Megatron-LM: what it compares, what it refuses, and its launcher for a CPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hybrid_prefix.upstream.version import megatron_folder
from scripts import megatron_programs as tool
from tests.engine.test_arguments import INFERENCE, MODEL
from tests.harness.limits import HANG_S
from tests.harness.workers.launch import environment, environments_of

# Writes an answer for each prompt, in place of a program of Megatron-LM. WITH_CACHE runs where the environment switches the cache on.
STAND_IN = """
import json, os, sys
out = sys.argv[sys.argv.index("--output-path") + 1]
prompts = [json.loads(line) for line in open(sys.argv[sys.argv.index("--prompt-file") + 1])]
answers, reused = {str(at): {"generated_tokens": [at, 7]} for at in range(len(prompts))}, EXPECTED
if os.environ.get("HYBRID_PREFIX_INSTALL") == "1":
    assert json.loads(os.environ["HYBRID_PREFIX_CONFIG"])["cache_gb"] > 0
    WITH_CACHE
    print(f"INFO: prefix cache: {reused} of 9999 prompt tokens reused (1%)")
json.dump(answers | {"throughput": 3.5}, open(out, "w"))
"""


def checkout(folder: Path, version: str = "0, 20, 0, ''") -> Path:
    """A folder with files of the names that a checkout has."""
    names = zip(("MAJOR", "MINOR", "PATCH", "PRE_RELEASE"), version.split(", "), strict=True)
    files = {path: "" for each in tool.PROGRAMS.values() if not Path(path := each.path).is_absolute()}
    files["megatron/core/package_info.py"] = "".join(f"{name} = {value}\n" for name, value in names)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("with_cache", "line"),
    [
        ("pass", "ok 6 of 6 answers equal, 1280 tokens reused of 1280"),
        ("answers['3']['generated_tokens'] = [3, 8]", "FAILED 5 of 6 answers equal, 1280 tokens reused of 1280"),
        ("del answers['5']", "FAILED 5 of 6 answers equal, 1280 tokens reused of 1280"),
        ("reused -= 64", "FAILED 6 of 6 answers equal, 1216 tokens reused of 1280"),
        ("raise KeyError('it broke')", "FAILED KeyError: 'it broke' (see "),
    ],
)
def test_what_is_compared(tmp_path, monkeypatch, with_cache, line):
    runs = tool.Runs(checkout(tmp_path / "checkout"), tmp_path, "cpu")
    program = tmp_path / "program.py"
    program.write_text(STAND_IN.replace("EXPECTED", "1280").replace("WITH_CACHE", with_cache))
    monkeypatch.setattr(runs, "command", lambda path, tp, flags, cached: [sys.executable, str(program), *flags])
    assert runs.compare("offline", 1).startswith(line)


def test_the_error_of_a_log(tmp_path):
    """The first one, whatever module it is of, and not torchrun's."""
    log, torchruns = tmp_path / "log", "torch.distributed.elastic.ChildFailedError: "
    for line in ("ValueError: two", "[rank1]: ValueError: two", "a_package.errors.ValueError: two"):
        log.write_text(f"{torchruns}\n  ValueError: not at the start\n{line}\nKeyError: 1\n")
        assert tool.error_in(log) == f"ValueError: two (see {log})"
    log.write_text("usage: program.py [--logits-load-ignore-errors]\nprogram.py: error: unrecognized arguments: 0\n")
    assert tool.error_in(log) == f"error: unrecognized arguments: 0 (see {log})"


def test_what_prompts_share():
    shared = list(range(10))
    assert tool.reusable([shared, [*shared, 11, 12], shared[:4], [5, *shared]], 4) == 0 + 8 + 0 + 0
    assert tool.reusable([shared, [*shared[:8], 9, 9], [*shared[:8], 9, 9, 1, 1, 1]], 4) == 8 + 8


@pytest.mark.parametrize(("version", "from_checkout"), [("0, 20, 0, ''", True), ("0, 19, 1, ''", False)])
def test_whose_megatron_core(tmp_path, version, from_checkout):
    """That of the checkout, if it is supported; else the installed one, and from the checkout what that lacks."""
    folder, installed = checkout(tmp_path, version), str(megatron_folder().parents[1])
    assert tool.megatron_path(folder) == ([str(folder)] if from_checkout else [installed, str(folder)])


def test_no_megatron_core_that_is_supported(tmp_path, monkeypatch):
    folder = checkout(tmp_path, "0, 19, 1, ''")
    monkeypatch.setattr(tool, "megatron_folder", lambda: folder / "megatron" / "core")
    with pytest.raises(
        ValueError, match=r"^megatron-core 0.19.1 of the checkout is not supported, nor is another [^\n]*$"
    ):
        tool.megatron_path(folder)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["{here}"], "{here} is no checkout of Megatron-LM that has these programs: it has no examples/inference/"),
        (["{checkout}", "dynamic", "dynamo"], "there is no program dynamo; there are: dynamic, "),
        (["{checkout}", "--tp", "2", "--device", "cuda"], "--tp 2: there are 0 GPUs"),
    ],
)
def test_what_is_refused_is_one_line(tmp_path, monkeypatch, capsys, argv, said):
    names = {"here": tmp_path, "checkout": checkout(tmp_path / "checkout")}
    monkeypatch.setattr(tool.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="2"):
        tool.main([word.format(**names) for word in argv])
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"megatron_programs.sh: error: {said.format(**names)}")


def test_programs_stand_anywhere_and_flags_last(tmp_path, monkeypatch):
    """What is after ``--`` goes to every program, the one that makes the checkpoint included, and overrides this script's."""
    made = []
    monkeypatch.setattr(tool.Runs, "save", lambda runs: made.append(runs))
    monkeypatch.setattr(tool.Runs, "compare", lambda runs, name, tp: f"ok {name}")
    options = [str(checkout(tmp_path / "checkout")), "--device", "cpu", "--tp", "1", "offline", "--keep", str(tmp_path)]
    assert tool.main([*options, "--", "--tp", "3", "--", "more"]) == 0
    (runs,) = made
    assert runs.command("program.py", 1, ["--load", "x"])[-6:] == ["--load", "x", "--tp", "3", "--", "more"]


def test_where_programs_run_as_they_are(tmp_path, monkeypatch):
    """On a GPU, and there without the cache only if megatron finds an attention that runs on every one."""
    for device, installed, cached, as_it_is in (
        ("cpu", True, True, False),
        ("cuda", True, False, True),
        ("cuda", False, True, True),
        ("cuda", False, False, False),
    ):
        monkeypatch.setattr(tool, "find_spec", lambda name, found=installed: found and name == "flash_attn_3")
        runs = tool.Runs(checkout(tmp_path / "checkout"), tmp_path, device)
        words = runs.command("program.py", 1, [], cached)
        assert any("program_launcher.py" in word for word in words) != as_it_is


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_training_may_run_make_in_a_wheel(tmp_path):
    """megatron.training runs make in the folder of megatron-core's data sets; a wheel has all compiled, and no Makefile."""
    for version, code in (("0, 19, 1, ''", 0), ("0, 20, 0, ''", 2)):
        runs = tool.Runs(checkout(tmp_path / version[:5], version), tmp_path, "cuda")
        (wheel := tmp_path / "datasets").mkdir(exist_ok=True)
        made = subprocess.run(["make", "-C", wheel], env=runs.environment(False), capture_output=True, check=False)
        assert made.returncode == code


PROGRAM = """
import sys
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args, initialize_megatron
from megatron.training.argument_utils import hybrid_config_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.models.hybrid import HybridModelBuilder

if __name__ == "__main__":
    parse_and_validate_args()
    initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = HybridModelBuilder(hybrid_config_from_args(get_args())).build_distributed_models(groups, wrap_with_ddp=False)
    print("made", {each.device.type for each in model[0].parameters()}, torch.ones(2, device="cuda").device, sys.path[0])
"""


@pytest.mark.multi
def test_the_launcher_for_a_cpu(tmp_path):
    """A program that asks for CUDA, and for layers of Transformer Engine, makes its model."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    flags = [*MODEL, *INFERENCE[:-2], "--micro-batch-size", "1", *tool.OF_A_CPU, "--no-gradient-accumulation-fusion"]
    result = subprocess.run(
        [sys.executable, tool.HARNESS / "program_launcher.py", program, *flags],
        env=environment() | environments_of(1)[0],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert f"made {{'cpu'}} cpu {tmp_path}" in result.stdout
