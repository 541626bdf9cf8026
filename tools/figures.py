"""Fill the tables of the documents with the results in `benchmarks/results`.

Usage: ``python tools/figures.py [--write]``

A document holds each table between two fences, ``<!-- table: NAME -->`` and ``<!-- end -->``. With
``--write``, the text between them is replaced; without it, the program lists the documents that are
out of date and exits with 1. `TABLES` says which result stands in which cell.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FENCED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Table(NamedTuple):
    """A table: what its rows and columns are called, and where their figures are.

    `rows` maps the label of a row to what replaces ``{}`` in the keys of its cells. `columns` maps
    the heading of a column to a key of `value` and the format of its figures. `missing` lists the
    keys that were not measured; their cells stay empty.
    """

    heading: str
    rows: Mapping[str, str]
    columns: Mapping[str, tuple[str, str]]
    missing: Collection[str] = ()


MS, COUNT = "{:,.1f} ms", "{:,.0f}"
_SINGLE = "single-16-cores: regions/reader={}&side=256&way=random/"
_REGIONS = "gpu-h200: viewport/tile=256&size=%d&reader={}/median_ms"
_WALK = "walk: costs_ms/20/modes/{}/"
_FRAMES = "frames-h200: summary/window={}&series=%s"
_ZOOM = "zoom-16-cores: summary/window={}/%s_ms_p50"
_JPEG2000 = "jpeg2000-h200: batches/codec={}&decoder=%s/gigapixels_a_second"


def _window(side: str, mode: str) -> str:
    return f"display-h200: summary/window={side}&series={{}}&mode={mode}/exact_ms_p50"


TABLES = {
    "viewport": Table(
        "reader",
        {
            "napari-wsigpu": "napari-wsigpu",
            "napari-wsigpu, from its cache": "napari-wsigpu, warm",
            "FastSlide 0.8 (not exact)": "FastSlide",
            "tiffslide 3.0": "tiffslide",
            "tifffile as Zarr": "tifffile as zarr",
            "OpenSlide 4.0": "OpenSlide",
            "napari-wsi 1.3": "napari-wsi",
        },
        {
            "JPEG": ("viewport-cpu: codecs/jpeg/readers/{}/median_ms", MS),
            "JPEG 2000": ("viewport-cpu: codecs/jpeg2000/readers/{}/median_ms", MS),
        },
    ),
    "single": Table(
        "reader",
        {
            "napari-wsigpu": "ours",
            "napari-wsigpu as OpenSlide": "ours, compat.openslide",
            "cuCIM 26.10": "cuCIM",
            "OpenSlide 4.0": "OpenSlide",
            "tiffslide 3.0": "tiffslide",
            "FastSlide 0.8 (not exact)": "FastSlide",
        },
        {
            "CPU time per region": (_SINGLE + "cpu us", "{:,.0f} µs"),
            "regions per second, 16 threads": (_SINGLE + "16 threads", COUNT),
        },
    ),
    "patches": Table(
        "patches per second",
        {
            "napari-wsigpu, to the GPU": "ours, to device, batch 256",
            "napari-wsigpu, GPU to host": "ours, GPU to host, batch 256",
            "napari-wsigpu, CPU": "ours, CPU, batch 256",
            "cuCIM 26.10, 16 CPU workers": "cuCIM",
            "FastSlide 0.8": "FastSlide",
            "OpenSlide 4.0": "OpenSlide",
        },
        {
            f"{side} x {side}": (
                f"patches-h200: random/size={side}/readers/reader={{}}/median",
                COUNT,
            )
            for side in (256, 512)
        },
    ),
    "compressions": Table(
        "patches per second",
        {
            "JPEG": "jpeg",
            "restart intervals of 2048 x 8, as in NDPI": "jpeg intervals",
            "JPEG 2000": "jpeg2000",
            "HTJ2K": "htj2k",
            "deflate": "deflate",
            "LZW": "lzw",
            "zstd": "zstd",
            "PackBits": "packbits",
            "uncompressed": "none",
            "LERC": "lerc",
            "WebP": "webp",
            "JPEG XL": "jpegxl",
        },
        {
            heading: (f"compressions-h200: kinds/kind={{}}/{key}", COUNT)
            for heading, key in (("to the GPU", "gpu"), ("CPU, 16 cores", "cpu"))
        },
    ),
    "datasets": Table(
        "patches per second",
        {
            "napari-wsigpu": "ours, threads",
            "cuCIM 26.10": "cuCIM, processes, averaged there",
            "OpenSlide 4.0": "OpenSlide, processes, averaged there",
        },
        {
            heading: (f"datasets-h200: rows/case=cuda, {order}&loader={{}}/median", COUNT)
            for heading, order in (
                ("grid, in order", "in order"),
                ("grid, shuffled", "shuffled"),
                ("random positions", "at random places"),
            )
        },
    ),
    "walk": Table(
        "levels shown by",
        {
            "napari-wsigpu": "ours",
            "napari, blocking": "blocking",
            "napari, asynchronous": "async",
            "Dask arrays": "dask",
        },
        {
            "slice, 95th percentile": (_WALK + "slice_p95_ms", COUNT + " ms"),
            "longest stall": (_WALK + "stall_ms", COUNT + " ms"),
            "blank canvas": (_WALK + "blank_mean_percent", "{:.0f} %"),
            "exact after": (_WALK + "to_exact_ms", COUNT + " ms"),
        },
    ),
    "regions": Table(
        "reader",
        {
            "napari-wsigpu": "ours, auto, to host",
            "napari-wsigpu, to the GPU": "ours, auto, to device",
            "cuCIM 26.10, 16 CPU workers": "cuCIM, 16 workers",
            "cuCIM 26.10, cuda": "cuCIM, cuda",
            "OpenSlide 4.0": "OpenSlide",
        },
        {f"{side} x {side}": (_REGIONS % side, MS) for side in (1024, 2048, 4096)},
    ),
    "window": Table(
        "until exact",
        {
            "jump, zoom 1": "jump 1",
            "jump, zoom 0.4": "jump 0.4",
            "step of 512 pixels, zoom 1": "step 512 1",
            "notch of the wheel, zoom 1": "wheel 1",
        },
        {
            f"{width} x {height}, {name}": (_window(f"[{width}, {height}]", mode), MS)
            for width, height in ((1920, 1200), (3840, 2160))
            for name, mode in (("napari-wsigpu", "ours"), ("blocking", "blocking"))
        },
    ),
    "frames": Table(
        "canvas",
        {
            f"{width} x {height}, {name}": f"[{width}, {height}]&mode={mode}"
            for width, height in ((1920, 1200), (3700, 1900))
            for name, mode in (
                ("napari-wsigpu", "ours"),
                ("blocking", "blocking"),
                ("no slide", "empty"),
            )
        },
        {
            "jump": (_FRAMES % "jump 1/exact_ms_p50", MS),
            "jump, 95th percentile": (_FRAMES % "jump 1/exact_ms_p95", MS),
            "free pan, frames per second": (_FRAMES % "pan 1/frames_per_s", "{:.0f}"),
        },
    ),
    "zoom": Table(
        "canvas, at zoom 0.4",
        {
            f"{width} x {height}, {name}": f"[{width}, {height}]&mode={mode}"
            for width, height in ((1920, 1200), (3700, 1900))
            for name, mode in (("napari-wsigpu", "ours"), ("blocking", "blocking"))
        },
        {
            "first picture": (_ZOOM % "first", MS),
            "exact": (_ZOOM % "exact", MS),
        },
    ),
    "jpeg2000": Table(
        "tiles in a batch",
        {
            **{
                f"{count}, {side} x {side}": f"JPEG 2000&tile={side}&tiles={count}"
                for count, side in ((81, 256), (256, 256), (1024, 256), (16, 1024), (8, 2048))
            },
            **{
                f"{count}, 256 x 256, HTJ2K": f"HTJ2K&tile=256&tiles={count}"
                for count in (81, 256, 1024)
            },
        },
        {
            name: (_JPEG2000 % decoder, "{:.2f}")
            for name, decoder in (
                ("our kernels", "ours"),
                ("nvJPEG2000", "nvJPEG2000"),
                ("imagecodecs, 16 cores", "imagecodecs"),
            )
        },
    ),
    "jpeg2000-kernels": Table(
        "tiles in a batch",
        {
            f"{count}, {side} x {side}": f"tile={side}&tiles={count}"
            for count, side in ((81, 256), (1024, 256), (16, 1024), (8, 2048))
        },
        {
            name: (f"jpeg2000-kernels-h200: rows/kernels={name}&{{}}/gigapixels_a_second", "{:.2f}")
            for name in ("before", "after")
        },
    ),
    "gpus": Table(
        "GPUs",
        {"1": "1", "2": "2", "4": "4"},
        {
            "stains of 12 slides by Dask": ("dask-gpu-h200-x4: gpu/seconds/{}", "{:.1f} s"),
            "patches per second in PyTorch": (
                "dataset-ranks-h200-x2: rows/gpus={}/median",
                COUNT,
            ),
        },
        missing=["dataset-ranks-h200-x2: rows/gpus=4/median"],
    ),
    "remote": Table(
        "reader",
        {
            "napari-wsigpu": "napari-wsigpu",
            "napari-wsigpu, second time": "napari-wsigpu, second time",
            "tiffslide over fsspec": "tiffslide over fsspec",
        },
        {
            "first view": ("remote: readers/{}/first view/seconds", "{:.2f} s"),
            "requests": ("remote: readers/{}/first view/requests", COUNT),
            "downloaded": ("remote: readers/{}/first view/megabytes", "{:.1f} MB"),
        },
    ),
    "embed": Table(
        "network",
        {"ResNet-50, half precision": "embed"},
        {
            "tiles per second": ("embed-h200: {}/tiles_per_second", COUNT),
            "network busy": ("embed-h200: {}/busy", "{:.1%}"),
        },
    ),
    "outlines": Table(
        "100 000 outlines of 20 vertices",
        {
            "read from GeoJSON": "read",
            "made a layer of labels": "labels",
            "made a layer of shapes": "shapes",
            "view of the labels drawn": "view",
        },
        {"two cores": ("outlines-cpu: steps/{}/wall_s", "{:.2f} s")},
    ),
    "channels": Table(
        "40 channels in a window drawn by the CPU",
        {
            f"{name}, {visible} visible": f"mode={mode}&visible={visible}"
            for name, mode in (("one composite", "ours"), ("a layer per channel", "layers"))
            for visible in (8, 40)
        },
        {
            heading: (f"channels: medians/{{}}/{key}", COUNT + " ms")
            for heading, key in (
                ("opening", "open_ms"),
                ("first picture", "first_ms"),
                ("exact after", "exact_ms"),
                ("contrast", "contrast_ms"),
            )
        },
    ),
    "channels-gpu": Table(
        "visible channels on 3700 x 1900 pixels",
        {f"{visible} of 40": f"visible={visible}" for visible in (8, 40)},
        {
            heading: (f"channels-h200: medians/{{}}/{key}", MS)
            for heading, key in (
                ("first picture", "first_ms"),
                ("exact after", "exact_ms"),
                ("contrast", "contrast_ms"),
            )
        },
    ),
    "outlines-window": Table(
        "20 000 shapes in a window drawn by the CPU",
        {
            "added from GeoJSON": "add",
            "camera move without outlines, 95th percentile": "move p95, no outlines",
            "camera move, 95th percentile": "move p95",
            "all selected": "select",
            "all classified": "classify",
        },
        {
            f"{said}": (f"outlines-window: {name}/{{}}/wall_s", "{:.2f} s")
            for name, said in (("napari", "napari draws"), ("plugin", "the plugin draws"))
        },
    ),
    "grids": Table(
        "regions per second, to the GPU",
        {"256 x 256, as stored": "grid/size=256", "224 x 224, averaged": "grid/size=224"}
        | {"224 x 224 at random, averaged": "mpp/size=224"},
        {"one H200": ("patches-h200: {}/readers/reader=ours, to device/median", COUNT)},
    ),
}


def value(key: str) -> float:
    """Look up a result.

    Parameters
    ----------
    key : str
        ``FILE: NAME/NAME/...``: a file of results without its ending, and the names that lead to
        the figure in it. A name such as ``tile=256&size=1024`` selects the entry of a list that has
        these values.

    Raises
    ------
    KeyError
        If no entry or several entries match.
    """
    file, _, path = key.partition(": ")
    found = _results(file)
    for name in path.split("/"):
        if isinstance(found, list):
            conditions = dict(pair.split("=", 1) for pair in name.split("&"))
            entries = [
                entry
                for entry in found
                if all(str(entry.get(field)) == text for field, text in conditions.items())
            ]
            if len(entries) != 1:
                raise KeyError(f"{len(entries)} entries match {name} in {key}")
            [found] = entries
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise KeyError(f"{name} is not in {key}")
    if not isinstance(found, int | float):
        raise KeyError(f"{key} is not a number")
    return float(found)


@cache
def _results(file: str) -> object:
    content: object = json.loads((RESULTS / f"{file}.json").read_text("utf-8"))
    return content


def render(table: Table) -> str:
    """Return a table in Markdown, with our own rows in bold."""
    lines = [(table.heading, *table.columns), ("---", *("--:" for _ in table.columns))]
    for label, filler in table.rows.items():
        mark = "**" if label.startswith("napari-wsigpu") else ""
        keys = ((key.format(filler), form) for key, form in table.columns.values())
        cells = ("" if key in table.missing else form.format(value(key)) for key, form in keys)
        lines.append(tuple(f"{mark}{text}{mark}" for text in (label, *cells)))
    return "".join(f"|{'|'.join(cells)}|\n" for cells in lines)


def filled(text: str) -> str:
    """Return a document with the current content of its tables."""
    return FENCED.sub(lambda fence: f"{fence[1]}{render(TABLES[fence[2]])}{fence[3]}", text)


def documents() -> list[Path]:
    """List all documents that can hold tables."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: list[str]) -> int:
    """Write the tables, or report the documents whose tables are out of date."""
    stale = [
        path for path in documents() if filled(path.read_text("utf-8")) != path.read_text("utf-8")
    ]
    for path in stale:
        print(path.relative_to(ROOT))
        if "--write" in arguments:
            path.write_text(filled(path.read_text("utf-8")), "utf-8")
    return int(bool(stale) and "--write" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
