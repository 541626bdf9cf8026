"""The recipes of CONTRIBUTING.md, followed in a copy of the package: a new file and a line each."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import napari_wsigpu
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from tests.conftest import has_display
from tests.writers import slides, tiffbytes

PACKAGE = Path(napari_wsigpu.__file__).parent
ASCII = 2
INVERTED = 65001

VENDOR = '''
"""Slides of Acme."""

from napari_wsigpu.formats.tiff import tiff


def probe(file):
    return file.pages.first.software.startswith("Acme")


def parse(file, source):
    pages = tiff.pages(file)
    levels = [tiff.page_level(page, source.path) for page in pages]
    return tiff.slide_layout(source, "acme", levels, pages[0], {})
'''
COMPRESSION = '''
"""Bytes, each of which is stored as what it lacks to 255."""


def unpack_inverted(data, sizes):
    return bytes(255 - byte for byte in data[: sizes[0]])
'''
STORAGE = '''
"""A file that is read at once."""

from pathlib import Path

from napari_wsigpu.storage.source import ViewSource


class WholeSource(ViewSource):
    def __init__(self, path):
        self._data = memoryview(Path(path).read_bytes())

    def read(self, ranges):
        return [self._data[offset : offset + length] for offset, length in ranges]

    def release(self):
        pass

    def close(self):
        pass
'''
DECODER = '''
"""What shows where each tile lies instead of what it holds."""

import numpy as np


class Done:
    def wait(self):
        return {}

    def cancel(self):
        pass


class PlaceDecoder:
    name = "place"
    threads = 1

    def refusal(self, level):
        return None

    def schedule(self, batch, slots, deliver):
        grid = batch.level.grid
        for index, (row, column) in enumerate(batch.tiles.tolist()):
            shape = grid.tile_height, grid.tile_width, batch.level.channels
            slots.pixels[index] = np.full(shape, 10 * row + column, batch.level.dtype)
            deliver([index])
        return Done()

    def release(self):
        pass
'''
DOCK = '''
"""Who made the scanner."""

from magicgui.widgets import Container, Label

from napari_wsigpu.widgets.dock.slide_dock import SlideDock


class ScannerDock(SlideDock):
    def __init__(self, napari_viewer):
        super().__init__(napari_viewer, "No slide is open.")
        self.vendor = Label()
        self.add_details(Container(widgets=[self.vendor]))
        self.follow()

    def show_slide(self, slide):
        self.vendor.value = "" if slide is None else slide.vendor
'''
COMMAND = """    - id: napari-wsigpu.scanner
      title: Scanner
      python_name: napari_wsigpu.widgets.scanner:ScannerDock
"""
WIDGET = """    - command: napari-wsigpu.scanner
      display_name: Scanner
"""
SHOW_DOCK = """
import json, sys
from napari.components import ViewerModel
from npe2 import PluginManager
from qtpy.QtWidgets import QApplication
application = QApplication([])
manager = PluginManager.instance()
manager.discover()
[item] = [each for each in manager.iter_widgets() if each.display_name == "Scanner"]
viewer = ViewerModel()
dock = item.get_callable()(napari_viewer=viewer)
said = [dock.vendor.value, dock.empty.native.isHidden()]
viewer.open(sys.argv[1], plugin="napari-wsigpu")
print(json.dumps([*said, dock.vendor.value, dock.empty.native.isHidden()]))
"""
SHOW = """
import json, sys
from napari_wsigpu import open_slide
with open_slide(sys.argv[1], "cpu") as slide:
    source = type(slide._source).__name__
    print(json.dumps([slide.vendor, source, slide.levels[0][...].tolist()]))
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the package, and what adds a file and lines to it."""
    copy = tmp_path / "src" / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def add(name, text, *, to, lines):
        (copy / name).write_text(text)
        path = copy / to
        found = path.read_text("utf-8")
        for before, line in lines.items():
            assert found.count(before) == 1, before
            found = found.replace(before, line + before)
        path.write_text(found, "utf-8")

    def show(path, program=SHOW):
        own = os.environ | {"PYTHONPATH": os.pathsep.join([str(copy.parent), *sys.path])}
        own |= {"NAPARI_CONFIG": str(tmp_path / "settings.yaml")}
        # Without `site`: an editable installation redirects imports, whatever the path is.
        command = [sys.executable, "-S", "-c", program, path]
        done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return add, show


def test_a_vendor_a_compression_and_a_storage(package, tmp_path):
    add, show = package
    add(
        "formats/tiff/acme.py",
        VENDOR,
        to="formats/registry.py",
        lines={'    Format("tiff.philips"),\n': '    Format("tiff.acme"),\n'},
    )
    add(
        "codecs/inverted.py",
        COMPRESSION,
        to="codecs/compressions.py",
        lines={
            "from napari_wsigpu.codecs.jpeg2000": (
                "from napari_wsigpu.codecs.inverted import unpack_inverted\n"
            ),
            '    ImageCompression("JPEG",': (
                f'    ByteCompression("inverted", ({INVERTED},), unpack_inverted, None),\n'
            ),
        },
    )
    add(
        "storage/whole.py",
        STORAGE,
        to="slide/source.py",
        lines={
            "    if layout.levels[0].array is not None:\n": (
                '    if layout.vendor == "acme":\n        return WholeSource(layout.path)\n'
            ),
            "from napari_wsigpu.storage.file_source import": (
                "from napari_wsigpu.storage.whole import WholeSource\n"
            ),
        },
    )
    pixels = slides.picture(64, 96)
    encode = tiffbytes.page(
        pixels,
        lambda tile: (255 - tile).tobytes(),
        compression=INVERTED,
        more={305: (ASCII, "Acme 1.0")},
    )
    path = tiffbytes.write(tmp_path / "slide.tif", [encode])
    vendor, source, found = show(path)
    assert (vendor, source) == ("acme", "WholeSource")
    np.testing.assert_array_equal(np.array(found, np.uint8), pixels)


def test_a_decoder(package, tmp_path):
    add, show = package
    add(
        "codecs/place.py",
        DECODER,
        to="codecs/choose.py",
        lines={
            "    for image in chain": "    decoder = PlaceDecoder()\n",
            "from napari_wsigpu.model.errors": (
                "from napari_wsigpu.codecs.place import PlaceDecoder\n"
            ),
        },
    )
    path = tiffbytes.write(tmp_path / "slide.tif", [tiffbytes.page(slides.picture(64, 96), bytes)])
    found = np.array(show(path)[2])
    expected = np.kron([[0, 1], [10, 11]], np.ones((32, 48), int))
    np.testing.assert_array_equal(found, np.repeat(expected[..., None], 3, axis=2))


@pytest.mark.skipif(not has_display(), reason="there is no X display (install Xvfb)")
def test_a_dock(package):
    add, show = package
    lines = {"  keybindings:": COMMAND, "  configurations:\n": WIDGET}
    add("widgets/scanner.py", DOCK, to="napari.yaml", lines=lines)
    assert show(sample_path(), SHOW_DOCK) == ["", False, "aperio", True]
