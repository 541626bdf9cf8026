"""What is done with DICOM files where the packages for them are not installed."""

import sys

import pytest

import napari_wsigpu.formats.dicom
from napari_wsigpu import open_slide
from napari_wsigpu.formats.dicom import dicom
from napari_wsigpu.model.errors import NotASlideError, UnsupportedSlideError

META = b"\x02\0\x02\0UI\x1e\0"
WSI = bytes(128) + b"DICM" + META + b"1.2.840.10008.5.1.4.1.1.77.1.6" + bytes(9)
CT = bytes(128) + b"DICM" + b"\x02\0\x02\0UI\x1a\0" + b"1.2.840.10008.5.1.4.1.1.2\0" + bytes(9)


@pytest.fixture
def write(tmp_path):
    def write(name, content=WSI):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def without_packages(monkeypatch):
    for name in ("pydicom", "wsidicom", *sys.modules):
        if name.partition(".")[0] in ("pydicom", "wsidicom"):
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "napari_wsigpu.formats.dicom.dicom_instance", raising=False)
    monkeypatch.delattr(napari_wsigpu.formats.dicom, "dicom_instance", raising=False)


def probe(path):
    return dicom.probe(path, path.read_bytes() if path.is_file() else b"")


@pytest.mark.parametrize("name", ["a.dcm", "a", "a.svs"])
def test_file_is_recognized_by_content(write, name):
    assert probe(write(name))
    assert probe(write(name, CT))


@pytest.mark.parametrize("content", [b"", bytes(131), bytes(128) + b"DICN"])
def test_other_files(write, content):
    assert not probe(write("a.dcm", content))


@pytest.mark.parametrize("name", ["a.tif", "a.TIFF"])
def test_dual_personality_file_is_tiff_by_its_name(write, name):
    assert not probe(write(name))


def test_folder_is_recognized_by_a_slide_in_it(write):
    write("other/notes.txt", b"")
    write("other/ct.dcm", CT)
    folder = write("other/slide.tif").parent
    assert not probe(folder)
    write("other/IM000001")
    assert probe(folder)


def test_search_ends_early_in_a_folder_of_other_files(tmp_path, monkeypatch):
    for index in range(300):
        (tmp_path / f"{index}.dcm").write_bytes(CT)
    opened = []
    is_wsi = dicom._is_wsi
    monkeypatch.setattr(dicom, "_is_wsi", lambda path: opened.append(path) or is_wsi(path))
    assert not probe(tmp_path)
    assert len(opened) == dicom.MOST_OTHER_FILES


def test_error_names_the_packages_to_install(write, without_packages):
    path = write("a.dcm")
    for each in (path, path.parent):
        with pytest.raises(UnsupportedSlideError) as caught:
            open_slide(each)
        assert 'pip install "napari-wsigpu[dicom]"' in str(caught.value)
        assert str(each) in str(caught.value)


def test_another_kind_of_dicom_needs_no_packages(write, without_packages):
    with pytest.raises(NotASlideError, match=r"ct\.dcm' is a DICOM file, but not a whole-slide"):
        open_slide(write("ct.dcm", CT))
