"""No module of the package imports itself through others, not even for types or inside of a function."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def module_names(package: Path) -> dict[str, Path]:
    """Files of a package by the name of their module."""
    names = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(package: Path) -> dict[str, set[str]]:
    """What each module of a package imports of it, anywhere in its file."""
    names = module_names(package)
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = name.split(".")[: None if path.name == "__init__.py" else -1]
                    base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [base])])
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    found.add(inner if inner in names else base)
        found &= names.keys() - {name}
    return graph


def test_no_import_goes_in_a_circle():
    graph = imports(ROOT / "megatron_hybrid_prefix")
    assert sum(map(len, graph.values())) > 2 * len(graph) > 0
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    "line",
    [
        "from made_up.low import a",
        "from made_up import low",
        "import made_up.low",
        "from .low import a",
        "from . import low",
        "if TYPE_CHECKING:\n    from made_up.low import a",
        "def f():\n    from made_up.low import a",
    ],
)
def test_a_circle_is_found(line, tmp_path):
    package = tmp_path / "made_up"
    package.mkdir()
    for name, text in {"__init__": "", "low": "from made_up.middle import b", "middle": "import made_up.high"}.items():
        (package / f"{name}.py").write_text(text)
    (package / "high.py").write_text("")
    TopologicalSorter(imports(package)).prepare()
    (package / "high.py").write_text(line)
    with pytest.raises(CycleError):
        TopologicalSorter(imports(package)).prepare()


def test_no_two_classes_share_a_name():
    places: dict[str, list[str]] = {}
    for name, path in module_names(ROOT / "megatron_hybrid_prefix").items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
