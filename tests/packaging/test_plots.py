"""Plots: one palette, lines that coincide can be told apart, and the script draws every plot of the documents."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from megatron_hybrid_prefix.bench.stats import number_text
from megatron_hybrid_prefix.console import plots

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_hybrid_prefix"
DOCS = ROOT / "docs"


def script():
    spec = importlib.util.spec_from_file_location("plot_docs", ROOT / "scripts" / "plot_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- palette -----------------------------------------------------------------------------------------------------------


def lightness(colour: str) -> float:
    """Relative luminance, 0 to 1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_only_one_module_knows_colours_of_plots():
    own = PACKAGE / "console" / "plots.py"
    others = [path for path in [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")] if path != own]
    found = [path.name for path in others if re.search(r"import matplotlib|tab:|#[0-9A-Fa-f]{6}\b", path.read_text())]
    assert found == []


def test_colours_can_be_told_apart_in_a_grey_print():
    for one, other in combinations(plots.ENGINE_STYLES.values(), 2):
        assert abs(lightness(one.colour) - lightness(other.colour)) > 0.1
    assert len({*plots.OTHER_COLOURS, *(style.colour for style in plots.ENGINE_STYLES.values())}) == 5


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (126.3, "126"), (11.96, "12"), (4.578, "4.58"), (17760.4, "17,760"), (9.999, "10"), (0.0123, "0.0123"), (6, "6")],
)  # fmt: skip
def test_figures_have_three_digits(value, text):
    assert number_text(value, 3) == text


# -- the documents' plots ----------------------------------------------------------------------------------------------


def test_every_plot_of_the_documents_is_drawn_by_the_script(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "images").mkdir()
    for path in (DOCS / "data").glob("*.json"):
        (tmp_path / "data" / path.name).write_text(path.read_text())
    drawn = {path.relative_to(tmp_path) for path in script().draw(tmp_path)}
    kept = {path.relative_to(DOCS) for folder in ("", "images") for path in (DOCS / folder).glob("*.png")}
    assert drawn == kept and Path("images/first_token.png") in drawn
    assert all((tmp_path / path).stat().st_size > 1000 for path in drawn)


def test_a_new_measurement_is_taken_over(tmp_path):
    data = json.loads((DOCS / "data" / "demo_cpu.json").read_text())
    (tmp_path / "data").mkdir()
    (tmp_path / "demo.json").write_text(json.dumps(data | {"hardware": {"cores": 2}, "source": "this run"}))
    script().take(tmp_path / "demo.json", tmp_path)
    assert json.loads((tmp_path / "data" / "demo_cpu.json").read_text()) == data
