"""Draw the charts of the documents from the results in `benchmarks/results`.

Usage: ``python tools/charts.py``
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

from figures import value

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
OURS, OTHERS = "#7b3fb5", "#9aa0a6"
LABELS, BARS, ROW, TOP = 214, 340, 26, 56  # pixels


class Chart(NamedTuple):
    """A bar chart: `bars` maps the label of a bar to what replaces ``{}`` in the key."""

    title: str
    subtitle: str
    unit: str
    key: str
    bars: dict[str, str]


CHARTS = {
    "viewport": Chart(
        "A 1536 x 1024 viewport on the CPU: milliseconds, less is better",
        "JPEG slide of 32 768 x 32 768, two cores, empty caches, median of 30",
        "ms",
        "viewport-cpu: codecs/jpeg/readers/{}/median_ms",
        {
            "napari-wsigpu": "napari-wsigpu",
            "FastSlide (not exact)": "FastSlide",
            "tiffslide": "tiffslide",
            "tifffile as Zarr": "tifffile as zarr",
            "OpenSlide": "OpenSlide",
            "napari-wsi": "napari-wsi",
        },
    ),
    "patches": Chart(
        "Random patches of 256 x 256 on an H200 with 16 cores: per second, more is better",
        "JPEG slide of 65 536 x 65 536, empty caches, median of 3",
        "",
        "patches-h200: random/size=256/readers/reader={}/median",
        {
            "napari-wsigpu, to the GPU": "ours, to device, batch 256",
            "napari-wsigpu, GPU to host": "ours, GPU to host, batch 256",
            "napari-wsigpu, CPU": "ours, CPU, batch 256",
            "cuCIM, 16 CPU workers": "cuCIM",
            "OpenSlide": "OpenSlide",
        },
    ),
    "regions": Chart(
        "A 4096 x 4096 region to host memory on an H200: milliseconds, less is better",
        "JPEG slide of 65 536 x 65 536, tiles of 256 x 256, median of 64 (of the last two 15)",
        "ms",
        "gpu-h200: viewport/tile=256&size=4096&reader={}/median_ms",
        {
            "napari-wsigpu": "ours, auto, to host",
            "cuCIM, 16 CPU workers": "cuCIM, 16 workers",
            "cuCIM, cuda": "cuCIM, cuda",
            "OpenSlide": "OpenSlide",
        },
    ),
    "walk": Chart(
        "Panning and zooming in napari: main-thread time per slice, less is better",
        "95th percentile with 20 ms added to the decoding of each tile, two cores",
        "ms",
        "walk: costs_ms/20/modes/{}/slice_p95_ms",
        {
            "napari-wsigpu": "ours",
            "napari, blocking": "blocking",
            "Dask arrays": "dask",
        },
    ),
}


def draw(chart: Chart) -> str:
    """Return a chart as SVG."""
    figures = {name: value(chart.key.format(reader)) for name, reader in chart.bars.items()}
    most = max(figures.values())
    height = TOP + ROW * len(figures) + 8
    width = LABELS + BARS + 90
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(chart.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="21" font-weight="bold" fill="#202124">{escape(chart.title)}</text>',
        f'<text x="10" y="40" font-size="12" fill="#5f6368">{escape(chart.subtitle)}</text>',
    ]
    for row, (name, figure) in enumerate(figures.items()):
        y, length = TOP + ROW * row, BARS * figure / most
        color = OURS if name.startswith("napari-wsigpu") else OTHERS
        shown = f"{figure:,.{1 if figure < 100 else 0}f} {chart.unit}".strip()
        lines += [
            f'<text x="{LABELS - 8}" y="{y + 15}" text-anchor="end" fill="#202124">'
            f"{escape(name)}</text>",
            f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="{ROW - 6}" fill="{color}"/>',
            f'<text x="{LABELS + length + 6:.1f}" y="{y + 15}" fill="#202124">{shown}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write all charts to `PICTURES`."""
    for name, chart in CHARTS.items():
        (PICTURES / f"{name}.svg").write_text(draw(chart), "utf-8")


if __name__ == "__main__":
    main()
