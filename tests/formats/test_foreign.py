import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.errors import NotASlideError, UnsupportedSlideError
from tests import oracles

HEADS = {
    "slide.czi": (b"ZISRAWFILE\0\0\0\0\0\0", "a Zeiss CZI slide"),
}


@pytest.mark.parametrize("name", HEADS)
def test_whose_it_is(tmp_path, name):
    path = tmp_path / name
    head, whose = HEADS[name]
    path.write_bytes(head)
    with pytest.raises(UnsupportedSlideError, match=whose) as caught:
        open_slide(path)
    assert str(caught.value).count(str(path)) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"SQLite format 3\0", b"\xff\xd8\xff", bytes(128)])
def test_no_slide(tmp_path, data):
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    assert not oracles.openslide_reads(path)
    with pytest.raises(NotASlideError):
        open_slide(path)
