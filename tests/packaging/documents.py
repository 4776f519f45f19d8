"""Documents as text: which there are, their blocks of code, the commands that they show, the names of their headings."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted(DOCS.glob("*.md")),
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}\S.*\n?)+", re.MULTILINE)
COMMANDS = ("hybrid-prefix ", "torchrun ", "scripts/", "python ", "pip ")


def relative(path: Path) -> str:
    """A file's name in the repository."""
    return str(path.relative_to(ROOT))


def fences(text: str) -> list[tuple[str, str]]:
    """Blocks of code between fences: (language, text), also those inside of a list."""
    return [(language, textwrap.dedent(body)) for _, language, body in FENCE.findall(text)]


def without_fences(text: str) -> str:
    """The text without these blocks."""
    return FENCE.sub("", text)


def commands(text: str) -> list[str]:
    """The lines of a document's blocks that are commands for a shell; a line that goes on in the next one is one command."""
    indented = [textwrap.dedent(block) for block in INDENTED.findall(without_fences(text))]
    blocks = [body for language, body in fences(text) if language in ("bash", "sh")] + indented
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [line for line in lines if line.startswith(COMMANDS)]


def anchors(text: str) -> set[str]:
    """What a link to a heading of the document may say after ``#``, as GitHub names them."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", without_fences(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
