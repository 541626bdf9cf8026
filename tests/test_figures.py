"""The figures and charts of the documents come from `benchmarks/results`."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "tools").exists():
    pytest.skip("these are the tests of a checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))
import charts  # noqa: E402
import figures  # noqa: E402

sys.path.pop(0)
PERFORMANCE = ROOT / "docs" / "performance.md"
MEASURED = re.compile(
    r"(?<![\w.])(\d[\d,.]*)\s*(ms|s|x(?!\s*\d)|%|MB|GB|requests|patches|regions|[mg]\w+pixels)(?!\w)"
)
# Conditions of a measurement, not results.
CONDITIONS = {"1 GB", "20 ms", "50 ms", "50 gigapixels"}


@pytest.mark.parametrize("path", figures.documents(), ids=lambda path: path.name)
def test_tables_hold_the_current_results(path):
    text = path.read_text("utf-8")
    assert figures.filled(text) == text, "run `python tools/figures.py --write`"


def test_every_table_stands_in_a_document():
    text = "".join(path.read_text("utf-8") for path in figures.documents())
    assert {name for _, name, _ in figures.FENCED.findall(text)} == set(figures.TABLES)


def test_a_stale_table_is_replaced():
    text = "Before\n\n<!-- table: gpus -->\n|17 s|\n<!-- end -->\n\nAfter\n"
    filled = figures.filled(text)
    assert "17" not in filled
    assert filled.startswith("Before\n\n<!-- table: gpus -->\n|GPUs|")
    assert filled.endswith("|\n<!-- end -->\n\nAfter\n")


@pytest.mark.parametrize(
    "key", ["walk: no", "gpu-h200: viewport/tile=256/median_ms", "walk: slide"]
)
def test_unknown_and_ambiguous_keys_are_errors(key):
    with pytest.raises(KeyError):
        figures.value(key)


def test_every_result_file_is_used():
    used = {
        key.partition(":")[0]
        for table in figures.TABLES.values()
        for key, _ in table.columns.values()
    }
    assert used == {path.stem for path in figures.RESULTS.glob("*")}


def test_results_are_json_with_a_record_of_the_machine():
    for path in figures.RESULTS.glob("*"):
        record = json.loads(path.read_text("utf-8"))
        assert "environment" in record or "machine" in record, path.name


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_figures_in_sentences_stand_in_a_table_too(name):
    """A sentence quotes a generated figure as the table shows it."""
    prose = re.sub(r"(?ms)^```.*?^```$", "", (ROOT / name).read_text("utf-8"))
    prose = figures.FENCED.sub("", prose)
    shown = "".join(figures.render(table) for table in figures.TABLES.values())
    quoted = {f"{number} {unit}" for number, unit in MEASURED.findall(prose)}
    assert {text for text in quoted - CONDITIONS if text.split()[0] not in shown} == set()


def test_figures_on_the_front_page_are_those_of_the_tables():
    text = (ROOT / "README.md").read_text("utf-8")
    section = text[text.index("## How fast it is") :].partition("\n## ")[0]
    shown = "".join(figures.render(table) for table in figures.TABLES.values())
    cells = set(re.findall(r"[\d.,]*\d", shown))
    found = set(re.findall(r"\d+,\d{3}|\d+\.\d(?= ms)", section))
    assert len(found) >= 4
    assert found <= cells


def test_the_page_of_figures_is_short():
    assert len(PERFORMANCE.read_text("utf-8").split()) <= 900


@pytest.mark.parametrize("name", charts.CHARTS)
def test_charts_show_the_current_results(name):
    drawn = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text("utf-8")
    assert drawn == charts.draw(charts.CHARTS[name]), "run `python tools/charts.py`"
