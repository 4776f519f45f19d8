"""`upstream/capabilities.py`: forms are found in sources, and rows of other forms do not apply."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.upstream import capabilities


@pytest.fixture
def megatron(tmp_path, monkeypatch):
    """A function that makes a megatron-core of these files, and asks for a capability of it."""

    def ask(files: dict[str, str], forms: dict[str, tuple[str, ...]]) -> str:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(capabilities, "CAPABILITIES", {"made up": forms})
        return capabilities.form_of("made up")

    def forget() -> None:
        for function in (capabilities.form_of, capabilities._of_other_forms, capabilities._text):
            function.cache_clear()

    monkeypatch.setattr(capabilities, "megatron_folder", lambda: tmp_path)
    forget()
    yield ask
    forget()


@pytest.mark.parametrize(
    "text",
    [
        "class Pool:\n    def size(self): ...",
        "        self.size = 1",
        "size = 1",
        "    size: int = 1",
        "class size: ...",
    ],
)
def test_a_name_is_found_by_its_text(megatron, text):
    forms = {"new": ("megatron.core.pool:Pool.size",), "old": ("megatron.core.pool:Pool.count",)}
    assert megatron({"pool.py": text}, forms) == "new"


@pytest.mark.parametrize("text", ["", "# size", "x = other.size", "sizes = 1", "self.size_of = 1"])
def test_another_text_is_not_the_name(megatron, text):
    forms = {"new": ("megatron.core.pool:Pool.size",), "old": ("megatron.core.pool:Pool.count",)}
    assert megatron({"pool.py": text}, forms) == "old"


def test_modules_and_packages_are_found(megatron):
    forms = {"package": ("megatron.core.ops.new",), "module": ("megatron.core.ops.old",), "none": ()}
    assert megatron({"ops/old.py": "", "ops/new/__init__.py": ""}, forms) == "package"
    capabilities.form_of.cache_clear()
    assert megatron({"ops/old.py": ""}, {"package": ("megatron.core.ops.newer",), **dict(list(forms.items())[1:])}) == (
        "module"
    )
    capabilities.form_of.cache_clear()
    assert megatron({}, {"package": ("megatron.core.ops.newer",), "none": ()}) == "none"


def test_names_of_other_forms_do_not_apply(megatron):
    forms = {"new": ("megatron.core.ops.new", "megatron.core.pool:Pool.size"), "old": ("megatron.core.ops.old",)}
    megatron({"ops/old.py": ""}, forms)
    for symbol in ("megatron.core.ops.new", "megatron.core.ops.new.scan.kernel", "megatron.core.pool.Pool.size"):
        assert not capabilities.applies(symbol)
    for symbol in ("megatron.core.ops.newest", "megatron.core.ops.old.scan", "megatron.core.pool.Pool.sizes"):
        assert capabilities.applies(symbol)


def test_the_installed_megatron_has_all_names_of_its_forms(platform):
    """Also of those that only decide: the first name of each form."""
    for capability, form in capabilities.forms().items():
        names = capabilities.CAPABILITIES[capability][form]
        assert [name for name in names if not capabilities.is_there(name)] == [], capability
