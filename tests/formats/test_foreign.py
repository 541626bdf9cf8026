"""Files that are not read are named for what they are."""

from io import BytesIO

import imagecodecs
import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.formats.foreign import FOREIGN
from napari_wsigpu.formats.registry import FORMATS
from napari_wsigpu.model.errors import NotASlideError, UnsupportedSlideError

PICTURE = np.zeros((8, 8, 3), np.uint8)


def zipped():
    from zipfile import ZipFile

    stream = BytesIO()
    with ZipFile(stream, "w") as file:
        file.writestr("a", "b")
    return stream.getvalue()


FILES = {
    "a.kfb": (b"KFB" + bytes(99), "KFB", UnsupportedSlideError),
    "a.sdpc": (b"SQ" + bytes(99), "SDPC", UnsupportedSlideError),
    "a.tmap": (b"TMAP" + bytes(99), "TMAP", UnsupportedSlideError),
    "a.lif": (b"\x70\0\0\0\x2a" + bytes(99), "LIF", UnsupportedSlideError),
    "a.nd2": (b"\xda\xce\xbe\x0a" + bytes(99), "ND2", UnsupportedSlideError),
    "old.nd2": (bytes(imagecodecs.jpeg2k_encode(PICTURE)), "ND2", UnsupportedSlideError),
    "a.ims": (b"\x89HDF\r\n\x1a\n" + bytes(99), "IMS", UnsupportedSlideError),
    "a.h5": (b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5", UnsupportedSlideError),
    "without an ending": (b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5", UnsupportedSlideError),
    "a.oir": (b"OLYMPUSRAWFORMAT" + bytes(99), "OIR", UnsupportedSlideError),
    "a.zip": (zipped(), "ZIP", NotASlideError),
    "a.webp": (bytes(imagecodecs.webp_encode(PICTURE)), "WebP", NotASlideError),
    "a.jxl": (bytes(imagecodecs.jpegxl_encode(PICTURE)), "JPEG XL", NotASlideError),
    "a.pdf": (b"%PDF-1.7\n", "PDF", NotASlideError),
    "a.svs": (b"<!DOCTYPE html><p>Sign in", "web page", NotASlideError),
}


@pytest.mark.parametrize(("name", "said"), FILES.items(), ids=FILES)
def test_file_type_is_named(tmp_path, name, said):
    data, kind, error = said
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(error, match=f"{name}' is .*{kind}.*, which is not supported; "):
        open_slide(path)


def test_no_ending_is_one_of_slides_that_are_read():
    read = {ending for item in FORMATS for ending in (*item.endings, *item.shared)}
    assert not read & {ending for each in FOREIGN for ending in each.endings}
