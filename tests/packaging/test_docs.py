"""Documents: the files that they name exist, links lead somewhere, and what `docs/extending.md` shows runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.limits import HANG_S
from tests.harness.selection import mostly_slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_hybrid_prefix"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTENDING = ROOT / "docs" / "extending.md"
ENDINGS = (".py", ".sh", ".md", ".toml", ".txt", ".json", ".jsonl", ".png")
# Named, and not of this repository: a route of the server, a file of megatron's, traces.
ELSEWHERE = {
    "/metrics",
    "megatron/core/package_info.py",
    "trace.jsonl",
    "FAST25-release/traces/conversation_trace.jsonl",
}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TRACE = "".join(
    f'{{"timestamp": {n}, "input_length": 1024, "output_length": 1, "hash_ids": [{n % 3}, {n}]}}\n' for n in range(9)
)


def named_files(text: str) -> list[str]:
    """What stands in backticks outside of code blocks and looks like a file, a folder or a pattern of files."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return [span for span in spans if re.fullmatch(r"[\w.*/-]+", span) and ("/" in span or span.endswith(ENDINGS))]


def exists(name: str, folder: Path) -> bool:
    return any(any(base.glob(name)) for base in (ROOT, PACKAGE, folder))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(document):
    names = set(named_files(document.read_text(encoding="utf-8"))) - ELSEWHERE
    assert [name for name in sorted(names) if not exists(name, document.parent)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(document):
    targets = re.findall(r"\]\(([^)#\s]+)", FENCE.sub("", document.read_text(encoding="utf-8")))
    inside = {target for target in targets if "://" not in target}
    assert [target for target in sorted(inside) if not (document.parent / target).exists()] == []


def test_a_file_that_is_gone_is_noticed():
    text = "`index/store.py`, `tests/*.md` and `a / b`, `--flag`\n```bash\n`not/this.py`\n```\n`policy/gone.py`"
    names = named_files(text)
    assert names == ["index/store.py", "tests/*.md", "policy/gone.py"]
    assert [exists(name, ROOT) for name in names] == [True, False, False]


def sections() -> dict[str, list[tuple[str, str]]]:
    """Code blocks of `docs/extending.md` by heading: (language, text)."""
    parts = re.split(r"^## (.+)$", EXTENDING.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {title: FENCE.findall(body) for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def run_section(blocks: list[tuple[str, str]], folder: Path) -> str:
    """Writes the Python blocks to the files that their first lines name, runs the commands; returns what they print."""
    for language, text in blocks:
        if language == "python":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
    (folder / "trace.jsonl").write_text(TRACE)
    commands = [
        f'python() {{ PYTHONPATH="$PYTHONPATH:{ROOT}" "{sys.executable}" "$@"; }}',
        'hybrid-prefix() { python -m megatron_hybrid_prefix "$@"; }',
        *(text for language, text in blocks if language == "bash"),
    ]
    done = subprocess.run(
        ["bash", "-euc", "\n".join(commands)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("title", mostly_slow(sections(), "An eviction policy"))
def test_what_extending_shows_runs(title, tmp_path):
    blocks = sections()[title]
    printed = run_section(blocks, tmp_path)
    if title == "An eviction policy":
        assert "oldest_first" in printed and "lru" in printed
    else:
        assert printed == "".join(text for language, text in blocks if language == "text")


def test_extending_has_its_four_parts():
    assert list(sections()) == [
        "An eviction policy",
        "A layer kind",
        "A tier behind the host",
        "Another megatron-core",
    ]
    assert all({"python", "bash"} <= {language for language, _ in blocks} for blocks in sections().values())
