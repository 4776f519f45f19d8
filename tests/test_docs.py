"""Documents: the files that they name exist, and the links in them lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_hybrid_prefix"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ENDINGS = (".py", ".sh", ".md", ".toml", ".txt", ".json", ".jsonl", ".png")
# Named, and not of this repository: a route of the server, a file of megatron's, traces.
ELSEWHERE = {
    "/metrics",
    "megatron/core/package_info.py",
    "trace.jsonl",
    "FAST25-release/traces/conversation_trace.jsonl",
}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
