"""The figures and charts of the documents are those that were measured."""

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
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "performance.md"]
MEASURED = re.compile(
    r"(?<![\w.])(\d[\d,.]*)\s*(ms|s|x(?!\s*\d)|%|MB|GB|requests|patches|regions|[mg]\w+pixels)(?!\w)"
)
# What slides there are, how things were measured, and by what: no results.
SETTINGS = {
    "50 gigapixels",
    *("1 GB", "15 regions", "64 regions"),
    *("0 ms", "5 ms", "20 ms", "80 ms", "20 s"),
    "6 ms",  # a loop of Python beside each measurement
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_figures_are_those_that_were_measured(path):
    assert figures.wrong(path.read_text("utf-8")) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_figures_name_their_source(path):
    text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text("utf-8"))
    uncited = figures.CITED.sub("", text)
    assert [
        found[0] for found in MEASURED.finditer(uncited) if f"{found[1]} {found[2]}" not in SETTINGS
    ] == []


def test_no_setting_is_left_over():
    text = " ".join(path.read_text("utf-8") for path in DOCUMENTS)
    assert {f"{found[1]} {found[2]}" for found in MEASURED.finditer(text)} >= SETTINGS


def test_every_cell_of_a_table_names_its_source():
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cited = [figures.CITED.sub("", row) for row in rows if "<!--" in row]
    assert len(cited) > 30
    assert [row for row in cited if re.search(r"\d", "|".join(row.split("|")[2:]))] == []


def test_a_wrong_figure_is_found():
    source = "viewport-cpu: codecs/jpeg/readers/napari-wsigpu/median_ms"
    assert figures.wrong(f"**5.2 ms**<!-- {source} -->") == []
    [said] = figures.wrong(f"5.3 ms<!-- {source} -->")
    assert said.startswith("5.3 is 5.2 in viewport-cpu")


@pytest.mark.parametrize("name", charts.CHARTS)
def test_charts_are_drawn_from_what_was_measured(name):
    drawn = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text("utf-8")
    assert drawn == charts.draw(charts.CHARTS[name])
