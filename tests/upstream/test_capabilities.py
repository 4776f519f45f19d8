"""`upstream/capabilities.py`: forms are found in sources."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.upstream import capabilities
from megatron_hybrid_prefix.upstream.capabilities import Forms


@pytest.fixture
def form_of(tmp_path, monkeypatch):
    """A function that makes a file of a megatron-core, and asks which form it has by a name."""

    def ask(path: str, text: str, name: str) -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        monkeypatch.setattr(capabilities, "CAPABILITIES", {"made up": Forms("new", name, "old")})
        return capabilities.form_of("made up")

    def forget() -> None:
        for function in (capabilities.form_of, capabilities._text):
            function.cache_clear()

    monkeypatch.setattr(capabilities, "megatron_folder", lambda: tmp_path)
    forget()
    yield ask
    forget()


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("class Pool:\n    def size(self): ...", "new"),
        ("        self.size = 1", "new"),
        ("size = 1", "new"),
        ("    size: int = 1", "new"),
        ("class size: ...", "new"),
        ("", "old"),
        ("# size", "old"),
        ("x = other.size", "old"),
        ("sizes = 1", "old"),
        ("self.size_of = 1", "old"),
    ],
)
def test_a_name_is_found_by_its_text(form_of, text, form):
    assert form_of("pool.py", text, "megatron.core.pool:Pool.size") == form


@pytest.mark.parametrize(
    ("path", "form"), [("ops/name.py", "new"), ("ops/name/__init__.py", "new"), ("ops/names.py", "old")]
)
def test_modules_and_packages_are_found(form_of, path, form):
    assert form_of(path, "", "megatron.core.ops.name") == form
