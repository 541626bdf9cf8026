"""The inspector opens by itself, once."""

import threading

import numpy as np
from napari.components import ViewerModel
from napari.settings import get_plugin_settings

from napari_wsigpu.viewer.dock import open_inspector_with_a_slide
from napari_wsigpu.viewer.reader import read_slides
from napari_wsigpu.viewer.sample import sample_path
from napari_wsigpu.widgets.inspector import SlideInspector


def inspectors(viewer):
    widgets = viewer.window.dock_widgets.values()
    return [widget for widget in widgets if isinstance(widget, SlideInspector)]


def open_slide_in(viewer):
    return viewer.open(sample_path(), plugin="napari-wsigpu")


def test_opens_with_the_first_slide_and_shows_it(viewer):
    assert inspectors(viewer) == []
    [layer] = open_slide_in(viewer)
    [inspector] = inspectors(viewer)
    assert inspector.isVisible()
    assert inspector.slide is layer.data[0].slide


def test_opens_with_the_sample_and_with_channels(viewer, write_channels):
    layers = viewer.open(write_channels(3)[0], plugin="napari-wsigpu")
    viewer.open_sample("napari-wsigpu", "he_phantom")
    assert len(layers) == 3
    assert len(viewer.layers) == 4
    assert len(inspectors(viewer)) == 1


def test_opens_no_second_one(viewer):
    open_slide_in(viewer)
    open_slide_in(viewer)
    assert len(inspectors(viewer)) == 1


def test_one_that_is_open_stays_the_only_one(viewer):
    _, widget = viewer.window.add_plugin_dock_widget("napari-wsigpu", "Slide inspector")
    open_slide_in(viewer)
    assert inspectors(viewer) == [widget]


def test_stays_closed(viewer):
    open_slide_in(viewer)
    [inspector] = inspectors(viewer)
    viewer.window.remove_dock_widget(inspector)
    inspector.deleteLater()
    open_slide_in(viewer)
    viewer.layers.clear()
    open_slide_in(viewer)
    assert inspectors(viewer) == []


def test_the_setting_is_read_live(viewer):
    page = get_plugin_settings("napari-wsigpu").slides
    page.open_inspector = False
    open_slide_in(viewer)
    assert inspectors(viewer) == []
    page.open_inspector = True
    open_slide_in(viewer)
    assert len(inspectors(viewer)) == 1


def test_other_layers_open_nothing(viewer):
    open_inspector_with_a_slide(viewer)
    viewer.add_image(np.zeros((8, 8)))
    assert inspectors(viewer) == []


def test_nothing_opens_without_a_window():
    viewer = ViewerModel()
    [(levels, attributes, _)] = read_slides(str(sample_path()))
    viewer.add_image(levels, **attributes)
    assert len(viewer.layers) == 1
    levels[0].slide.close()


def test_reading_alone_opens_nothing(viewer):
    [(levels, *_)] = read_slides(str(sample_path()))
    assert inspectors(viewer) == []
    levels[0].slide.close()


def test_reading_in_another_thread_opens_nothing_there(viewer):
    read = []
    thread = threading.Thread(target=lambda: read.extend(read_slides(str(sample_path()))))
    thread.start()
    thread.join()
    assert inspectors(viewer) == []
    [(levels, attributes, _)] = read
    viewer.add_image(levels, **attributes)
    assert len(inspectors(viewer)) == 1
