"""Opening a slide reads and decodes nothing of its label and macro."""

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.slide.associated import AssociatedImage
from napari_wsigpu.storage.file_source import FileSource
from napari_wsigpu.viewer.contributions.slide_reader import read_slides
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from tests.conftest import shared_slide
from tests.writers import slides

LENGTH_OF_A_MARKER = 4  # by which a JPEG says that it is one


@pytest.fixture
def reads(monkeypatch):
    """(offset, length) of all that the system is asked for, of pixels and of the structure."""
    ranges = []
    read_bytes, read_into = FileSource.read_bytes, FileSource.read_into
    read_structure = tifffile.FileHandle.read

    def watched_bytes(self, file, offset, length):
        ranges.append((offset, length))
        return read_bytes(self, file, offset, length)

    def watched_into(self, file, view, offset):
        ranges.append((offset, len(view)))
        return read_into(self, file, view, offset)

    def watched_structure(self, size=-1, /):
        offset = self.tell()
        data = read_structure(self, size)
        if len(data) > LENGTH_OF_A_MARKER:
            ranges.append((offset, len(data)))
        return data

    monkeypatch.setattr(FileSource, "read_bytes", watched_bytes)
    monkeypatch.setattr(FileSource, "read_into", watched_into)
    monkeypatch.setattr(tifffile.FileHandle, "read", watched_structure)
    return ranges


@pytest.fixture
def path(tmp_path):
    """A slide of which napari needs an overview that the file lacks."""
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(700, 2500), ())
    return tmp_path / "slide.svs"


def private_segments(slide):
    images = [item.image for item in slide.layout.associated if item.name in ("label", "macro")]
    assert len(images) == 2
    grids = [image.grid for image in images]
    return [
        (int(offset), int(count))
        for grid in grids
        for offset, count in zip(grid.offsets.ravel(), grid.byte_counts.ravel(), strict=True)
    ]


def overlap(one, other):
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


def assert_unread(reads, slide):
    assert reads
    segments = private_segments(slide)
    assert not [(read, part) for read in reads for part in segments if overlap(read, part)]


def test_the_watch_sees_a_label_that_is_read(path, reads):
    with open_slide(path) as slide:
        slide.associated_images["label"].read()
        assert any(overlap(read, part) for read in reads for part in private_segments(slide))


def test_layers_of_a_slide(path, reads, monkeypatch):
    monkeypatch.setattr(AssociatedImage, "read", None)
    with open_slide(path) as slide:
        [(levels, *_)] = slide_layers(slide)
        np.asarray(levels[-1])
        assert_unread(reads, slide)


def test_a_slide_in_napari(path, reads, monkeypatch, viewer):
    monkeypatch.setattr(AssociatedImage, "read", None)
    [layer] = viewer.open(path, plugin="napari-wsigpu")
    viewer.screenshot(flash=False)
    layer.data[0][:]
    assert_unread(reads, layer.data[0].slide)


@pytest.mark.parametrize("name", ["CMU-1-Small-Region.svs"])
def test_a_real_slide(name, reads, monkeypatch):
    monkeypatch.setattr(AssociatedImage, "read", None)
    [(levels, *_)] = read_slides(str(shared_slide(name)))
    with levels[0].slide as slide:
        levels[0][:]
        assert_unread(reads, slide)
