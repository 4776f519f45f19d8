"""Plots: one palette, lines that coincide can be told apart, and the plots of the documents show the figures of the tables."""

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
    for folder in ("images", "bench-h200"):
        (tmp_path / folder).mkdir()
    for path in (DOCS / "data").glob("*.json"):
        (tmp_path / "data" / path.name).write_text(path.read_text())
    drawn = {path.relative_to(tmp_path) for path in script().draw(tmp_path)}
    kept = {path.relative_to(DOCS) for folder in ("", "bench-h200", "images") for path in (DOCS / folder).glob("*.png")}
    assert drawn == kept and Path("images/first_token.png") in drawn
    assert all((tmp_path / path).stat().st_size > 1000 for path in drawn)


def test_the_figures_are_those_of_the_report():
    """Each label of the data is a row of the report's tables, with the same medians to four digits."""
    rows: dict[tuple[str, str], list[str]] = {}
    section = ""
    for line in (DOCS / "bench-h200" / "report.md").read_text().splitlines():
        section = line[3:] if line.startswith("## ") else section
        label, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[section, label] = cells[:3]
    data = json.loads((DOCS / "data" / "bench_h200.json").read_text())["scenarios"]
    assert len(data) == 9
    for name, result in data.items():
        for metric in result["metrics"].values():
            shown = [metric["median"].get(engine) for engine in ("off", "upstream", "ours")]
            told = [float(cell.replace(",", "")) if cell else None for cell in rows[name, metric["label"]]]
            for cell, value in zip(told, shown, strict=True):
                assert cell == (None if value is None else pytest.approx(value, rel=1e-3)), (name, metric["label"])


def test_a_new_measurement_is_taken_over(tmp_path):
    data = json.loads((DOCS / "data" / "bench_h200.json").read_text())
    whole = {"command": "bench all", "scenarios": {}}
    for name, result in data["scenarios"].items():
        noise = {"never_shown_ms": {"label": "x", "median": {"off": 1.0}, "samples": {"off": [1.0] * 1000}}}
        whole["scenarios"][name] = {"result": result | {"metrics": noise | result["metrics"]}}
    (tmp_path / "data").mkdir()
    (tmp_path / "bench.json").write_text(json.dumps(whole))
    script().take(tmp_path / "bench.json", tmp_path)
    taken = json.loads((tmp_path / "data" / "bench_h200.json").read_text())
    assert taken["scenarios"] == data["scenarios"]
