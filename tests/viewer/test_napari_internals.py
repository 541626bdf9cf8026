"""Slides in versions of napari that lack something private."""

import ast
import warnings

import numpy as np
import pytest
from napari.utils._proxies import PublicOnlyProxy
from qtpy.QtWidgets import QMainWindow

import napari_wsigpu
from napari_wsigpu.cli import doctor
from napari_wsigpu.viewer import napari_internals
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.drawing.progressive import display_of
from napari_wsigpu.viewer.napari_internals import INTERNALS, Internal
from tests.test_house import MODULES, is_type_checking

PLUGIN = "napari-wsigpu"
BLOCKING = {napari_internals.SLICING, napari_internals.SLICE_REQUESTS}
OF_A_WINDOW = {
    napari_internals.QT_WINDOW,
    napari_internals.QT_VIEWER,
    napari_internals.FIGURES,
    napari_internals.CANVAS,
    napari_internals.CANVAS_LAYOUT,
    napari_internals.CELLS,
    napari_internals.VIEWERS,
}
# Private attributes that are not napari's: of named tuples, and of magicgui's widgets.
OTHERS = {"_replace", "_magic_widget", "_qtpy"}


@pytest.fixture
def lacking(monkeypatch):
    """Take private attributes away from this plugin, as napari announces to do."""
    get = Internal.get

    def lack(*internals):
        def refuse(internal, owner, attribute=""):
            if internal in internals:
                raise AttributeError(f"{internal.owner} has no {attribute}")
            return get(internal, owner, attribute)

        monkeypatch.setattr(Internal, "get", refuse)

    return lack


def ask_doctor(viewer, monkeypatch):
    """Return what the doctor says of napari, asked in this process."""
    missing = {each.name: each.without for each in napari_internals.missing(viewer)}
    monkeypatch.setattr(doctor, "run_probe", lambda *of: {"reason": "", "missing": missing})
    return doctor.find_napari()


def show_exactly(viewer):
    """Open a slide, and compare the slice of a place in it with that level's own pixels."""
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    for y, x, zoom in [(2600, 3300, 1), (1200, 1200, 0.3)]:
        viewer.scene.camera.center = (0, y * layer.scale[0], x * layer.scale[1])
        viewer.scene.camera.zoom = zoom / layer.scale[0]
        viewer.screenshot(flash=False)
        napari_wsigpu.wait(layer, 60)
        (top, left), (bottom, right) = layer.corner_pixels
        exact = layer.data[layer.data_level][top : bottom + 1, left : right + 1]
        np.testing.assert_array_equal(layer._slice.image.raw, exact)
        assert np.ptp(exact) > 0
    return layer


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: internal.name)
def test_a_slide_is_shown_exactly_without(viewer, another, lacking, monkeypatch, internal):
    lacking(internal)
    viewer = another() if internal in OF_A_WINDOW else viewer
    layer = show_exactly(viewer)
    assert (display_of(layer) is None) == (internal in BLOCKING)
    viewer.add_shapes()
    found = ask_doctor(viewer, monkeypatch)
    assert internal.name in found.reason
    assert internal.without in found.advice


def test_a_slide_is_shown_exactly_without_any(viewer, another, lacking, monkeypatch):
    lacking(*INTERNALS)
    viewer = another()
    assert display_of(show_exactly(viewer)) is None
    viewer.add_shapes()
    assert all(each.name in ask_doctor(viewer, monkeypatch).reason for each in INTERNALS)


def test_this_napari_lacks_nothing(viewer, monkeypatch):
    viewer.open(sample_path(), plugin=PLUGIN)
    viewer.add_shapes()
    found = ask_doctor(viewer, monkeypatch)
    assert (found.reason, found.note) == ("", "draws slides while their tiles are decoded")


def test_docks_reach_the_window_through_napari_s_proxy(viewer):
    proxy = PublicOnlyProxy(viewer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        window = napari_internals.main_window(proxy)
    assert isinstance(window, QMainWindow)
    assert not isinstance(window, PublicOnlyProxy)


def test_the_doctor_without_napari(monkeypatch):
    monkeypatch.setattr(doctor, "_wheel_version", lambda *names: None)
    assert doctor.find_napari().version is None


def test_no_display_is_no_fault_of_napari(monkeypatch):
    monkeypatch.setattr(doctor, "run_probe", lambda *of: {"reason": napari_internals.NO_DISPLAY})
    assert doctor.find_napari().note == "the test failed: there is no display"


def test_no_other_module_touches_private_parts():
    rooms = ("napari_wsigpu.viewer.", "napari_wsigpu.widgets.")
    trees = {
        name: ast.parse(path.read_text("utf-8"))
        for name, path in MODULES.items()
        if name.startswith(rooms)
    }
    own = {
        node.name if hasattr(node, "name") else node.attr
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self")
    }
    del trees["napari_wsigpu.viewer.napari_internals"]
    checked = {
        node
        for tree in trees.values()
        for block in filter(is_type_checking, ast.walk(tree))
        for node in block.body
    }
    found = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if node not in checked
        if (isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own)
        or (isinstance(node, ast.ImportFrom) and any(map(is_private, node.module.split("."))))
    ]
    assert found == []


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS
