"""Documents: the files that they name exist, links lead somewhere, drawings are those of their sources, and what
`docs/extending.md` shows runs as it stands there."""

from __future__ import annotations

import hashlib
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.limits import HANG_S
from tests.harness.selection import mostly_slow
from tests.packaging.documents import DOCS, DOCUMENTS, ROOT, anchors, fences, relative, without_fences

PACKAGE = ROOT / "megatron_hybrid_prefix"
EXTENDING = DOCS / "extending.md"
ENDINGS = (".py", ".sh", ".md", ".toml", ".txt", ".json", ".jsonl", ".png")
# Named, and not of this repository: routes of the server, files of megatron's and of users, traces.
ELSEWHERE = {
    "/admin", "/admin/reset_cache", "/detokenize", "/health", "/health_generate", "/inference/v1/generate", "/metrics",
    "/tokenize", "/tokenizer_info", "/v1/chat/completions", "/v1/chat/completions/tokens", "/v1/completions",
    "/v1/messages", "/v1/models", "/v1/responses", "/version", "megatron/core/package_info.py", "config.json", "config.toml", "generation_config.json",
    "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "session.json", "agents.jsonl", "trace.jsonl", "hf_quant_config.json",
    "FAST25-release/traces/conversation_trace.jsonl",
}  # fmt: skip
# Readable at the width of a page of GitHub; the README may have this many lines.
README_LINES = 110

TRACE = "".join(
    f'{{"timestamp": {n}, "input_length": 1024, "output_length": 1, "hash_ids": [{n % 3}, {n}]}}\n' for n in range(9)
)


def named_files(text: str) -> list[str]:
    """What stands in backticks outside of code blocks and looks like a file, a folder or a pattern of files."""
    spans = re.findall(r"`([^`\n]+)`", without_fences(text))
    return [span for span in spans if re.fullmatch(r"[\w.*/-]+", span) and ("/" in span or span.endswith(ENDINGS))]


def exists(name: str, folder: Path) -> bool:
    return any(any(base.glob(name)) for base in (ROOT, PACKAGE, folder))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_file_that_is_named_exists(document):
    names = set(named_files(document.read_text(encoding="utf-8"))) - ELSEWHERE
    assert [name for name in sorted(names) if not exists(name, document.parent)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_link_leads_somewhere(document):
    assert broken_links(document, document.read_text(encoding="utf-8")) == []


def broken_links(document: Path, text: str) -> list[str]:
    """Links of a document to files that do not exist, or to headings that these do not have."""
    targets = set(re.findall(r"\]\(([^)\s]+)", without_fences(text)))
    return [target for target in sorted(targets) if "://" not in target and not leads_somewhere(document, target)]


def leads_somewhere(document: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = document.parent / name if name else document
    return file.exists() and (not anchor or anchor in anchors(file.read_text(encoding="utf-8")))


def test_a_link_that_leads_nowhere_is_noticed():
    text = "[a](sizing.md#cost) [b](sizing.md#no) ![c](images/no.png) [d](https://example.org/#x) [e](#no)"
    assert broken_links(DOCS / "index.md", text) == ["#no", "images/no.png", "sizing.md#no"]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


@pytest.mark.parametrize("source", sorted(DOCS.glob("images/*.dot")), ids=lambda path: path.name)
def test_a_drawing_was_made_from_its_source(source):
    svg = source.with_suffix(".svg").read_text(encoding="utf-8")
    assert is_made_from(svg, source.read_text(encoding="utf-8")), "run scripts/draw.sh"
    assert not is_made_from(svg, source.read_text(encoding="utf-8").replace("label", "Label", 1))


def is_made_from(svg: str, source: str) -> bool:
    """Whether the SVG has the digest of the source, and shows each of its labels."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    shown = {html.unescape(text).strip() for text in re.findall(r"<text\b[^>]*>([^<]*)</text>", svg)}
    labels = re.findall(r'label="([^"]*)"', source)
    lines = {line.strip() for label in labels for line in re.split(r"\\[nlr]", label)} - {""}
    return f"sha256 {digest} " in svg and len(lines) > 5 and lines <= shown


def test_a_file_that_is_gone_is_noticed():
    text = "`tiers/device.py`, `tests/*.md` and `a / b`, `--flag`\n```bash\n`not/this.py`\n```\n`policy/gone.py`"
    names = named_files(text)
    assert names == ["tiers/device.py", "tests/*.md", "policy/gone.py"]
    assert [exists(name, ROOT) for name in names] == [True, False, False]


def sections() -> dict[str, list[tuple[str, str]]]:
    """Code blocks of `docs/extending.md` by heading: (language, text)."""
    parts = re.split(r"^## (.+)$", EXTENDING.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {title: fences(body) for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def run_section(blocks: list[tuple[str, str]], folder: Path) -> str:
    """Writes the Python blocks to the files named in their first lines, and runs the commands. Returns their output."""
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
    assert list(sections()) == ["An eviction policy", "A layer kind", "A tier below the host", "Another megatron-core"]
    assert all({"python", "bash"} <= {language for language, _ in blocks} for blocks in sections().values())
