import gc
import importlib
import inspect
import shutil
import threading

import napari.settings
import pytest
import tifffile
from napari.utils._proxies import PublicOnlyProxy
from napari.utils.events.event import EventEmitter
from napari.utils.notifications import notification_manager
from npe2 import PluginManifest

from napari_wsigpu.codecs import cpu
from napari_wsigpu.storage.zarr import zarr_source as storage_zarr
from napari_wsigpu.viewer.contributions.sample_slide import sample_path


@pytest.fixture(scope="session", autouse=True)
def plugins_are_found_once():
    """Each viewer would read the manifests of all plugins that are installed again."""
    found = list(PluginManifest.discover())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PluginManifest, "discover", lambda paths=(): iter(found))
        yield


@pytest.fixture(scope="session", autouse=True)
def signatures_are_found_once():
    """Each layer connects hundreds of methods, and napari would look at each again."""
    found = {}
    look = EventEmitter._check_signature

    def check(function):
        if not inspect.ismethod(function):
            return look(function)
        if function.__func__ not in found:
            found[function.__func__] = look(function)
        return found[function.__func__]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventEmitter, "_check_signature", staticmethod(check))
        yield


@pytest.fixture(scope="session", autouse=True)
def modules_are_no_garbage(modules_are_no_garbage):
    """Nor those that viewers import; each one that is closed has garbage collected."""
    for name in ("napari._vispy.visuals", "pandas", "pint"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_settings(settings_folder):
    """Nothing that an earlier test has set is left."""
    napari.settings.get_settings().reset()
    napari.settings._PLUGIN_SETTINGS.clear()
    for path in settings_folder.iterdir():
        path.unlink()


@pytest.fixture(autouse=True)
def private_parts_are_out_of_reach(monkeypatch):
    """napari warns of private access through its proxies; let it fail as it will one day."""

    def refuse(name, owner):
        raise AttributeError(f"'{owner}.{name}' is private")

    monkeypatch.setattr(PublicOnlyProxy, "_private_attr_warning", staticmethod(refuse))


@pytest.fixture(autouse=True)
def no_notifications():
    """Clear the notifications of earlier tests."""
    notification_manager.records.clear()


@pytest.fixture
def viewer(qapp, shared, own_settings):
    """A viewer, shown on the display: the same for all tests, empty for each."""
    yield shared.open()
    shared.empty()


@pytest.fixture
def another(viewer):
    """Make one more viewer."""
    from tests.viewer.shared import make_viewer

    made = []

    def make(show=True):
        made.append(make_viewer(show))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def close_shared(shared):
    """Close the viewer that tests share."""
    shared.close()


@pytest.fixture
def make_napari_viewer(close_shared, make_napari_viewer):
    """napari's own, which checks what a closed viewer leaves, while there is no other."""
    return make_napari_viewer


@pytest.fixture
def damaged_slide(tmp_path):
    """The sample slide with the tile at row 6, column 8 of level 0 overwritten by zeros."""
    path = tmp_path / "damaged.svs"
    shutil.copy(sample_path(), path)
    with tifffile.TiffFile(path) as file:
        page = file.pages.first
        index = 6 * -(-page.imagewidth // page.tilewidth) + 8
        offset, count = page.dataoffsets[index], page.databytecounts[index]
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(count))
    return path


@pytest.fixture
def write_channels(tmp_path):
    """Write an OME-TIFF pyramid of uint16 channels and return its path and pixels."""

    def write(count, size=(1200, 1500), compression="zlib"):
        import numpy as np

        rng = np.random.default_rng(count)
        pixels = rng.integers(100, 4000, (count, *size), np.uint16)
        path = tmp_path / f"channels{count}.ome.tif"
        options = {"tile": (256, 256), "photometric": "minisblack", "compression": compression}
        names = ["DAPI", "CD3", "CD8", "PanCK", "AF"][:count]
        with tifffile.TiffWriter(path, ome=True) as file:
            file.write(
                pixels,
                subifds=1,
                metadata={
                    "axes": "CYX",
                    "PhysicalSizeX": 0.5,
                    "PhysicalSizeXUnit": "µm",
                    "PhysicalSizeY": 0.25,
                    "PhysicalSizeYUnit": "µm",
                    "Channel": {"Name": names},
                },
                **options,
            )
            file.write(pixels[:, ::2, ::2], subfiletype=1, **options)
        return path, pixels, names

    return write


@pytest.fixture
def gate(monkeypatch, without_core):
    """Holds back every tile while it is closed."""
    gate = threading.Event()
    gate.set()
    decode_tile = cpu.decode_tile

    def held_back(tile, memory):
        assert gate.wait(30)
        return decode_tile(tile, memory)

    monkeypatch.setattr(cpu, "decode_tile", held_back)
    monkeypatch.setattr(cpu, "whole_tile_decoder", lambda batch: None)
    yield gate
    gate.set()


@pytest.fixture
def chunk_gate(monkeypatch):
    """Holds back every chunk of Zarr arrays on disk while it is closed."""
    gate = threading.Event()
    gate.set()
    find_chunks = storage_zarr.find_chunks

    def held_back(*arguments):
        assert gate.wait(30)
        return find_chunks(*arguments)

    monkeypatch.setattr(storage_zarr, "find_chunks", held_back)
    yield gate
    gate.set()
