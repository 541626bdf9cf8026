"""The inspector's page "Decoding", used as people do."""

import gc
import threading
import weakref

import numpy as np
import pytest
from napari.settings import get_plugin_settings
from qtpy.QtCore import Qt
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QAbstractButton, QLabel, QSlider

from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.reading.cache import DEFAULT_BUDGET
from napari_wsigpu.slide import rates, runtime
from napari_wsigpu.slide.slide import Slide
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.widgets.inspector import decoding_page
from tests.widgets.conftest import assert_text_grows, click

MB = 10**6


@pytest.fixture
def add_monitor(add_dock):
    def add():
        get_plugin_settings("napari-wsigpu").slides.open_inspector = False
        inspector = add_dock("Inspector")
        page = inspector.decoding
        page.dock = inspector
        inspector.tabs.open(page)
        page.timer.setInterval(30)
        return page

    return add


@pytest.fixture
def monitor(add_monitor):
    yield add_monitor()
    runtime.default().tiles.budget = DEFAULT_BUDGET


@pytest.fixture
def gpu(host_gpu):
    """A machine with a GPU."""
    return host_gpu


def whole(layer):
    return layer.data[0].slide.levels[0][...]


def value(monitor, name):
    label = monitor.readings.widgets[name]
    return label.value if label.visible else None


def test_says_that_there_is_no_slide(viewer, monitor):
    assert not monitor.native.isVisible()
    assert not monitor.timer.isActive()
    viewer.add_image(np.zeros((8, 8)))
    assert not monitor.timer.isActive()


def test_shows_decoding_rates(monitor, slide_is_open, display):
    [layer] = slide_is_open(sample_path())
    slide = layer.data[0].slide
    slide.clear_cache()
    display.waitUntil(lambda: monitor.plot.native.peak == 0 or monitor.timer.isActive())
    before = slide.stats()
    whole(layer)
    whole(layer)
    after = slide.stats()
    decoded = after["decoded"]["cpu"] - before["decoded"]["cpu"]
    assert decoded > 400
    display.waitUntil(lambda: sum(step.tiles for step in monitor.rates.steps) >= decoded)
    assert monitor.plot.native.peak > 0
    steps = monitor.rates.steps
    assert sum(step.bytes_decoded for step in steps) >= layer.data[0].size
    assert sum(step.bytes_read for step in steps) >= after["bytes_read"] - before["bytes_read"]
    display.waitUntil(lambda: (value(monitor, "Tiles") or "").startswith("0 "))
    assert value(monitor, "Decoded") == "0 bytes/s"
    assert value(monitor, "Cache hits").endswith(" tiles in the last minute")
    assert float(value(monitor, "Total read").split()[0]) > 1


def test_the_cache_is_that_of_the_process(monitor, slide_is_open, display):
    [layer] = slide_is_open(sample_path())
    whole(layer)
    display.waitUntil(lambda: monitor.host.bar.value > 0)
    used = runtime.default().tiles.used
    click(monitor.drop)
    assert runtime.default().tiles.used < used
    assert monitor.host.used.value == f"{byte_size(runtime.default().tiles.used)} used"
    QTest.keyClick(monitor.host.slider.native, Qt.Key_Home)
    assert runtime.default().tiles.budget == 64 * MB
    runtime.default().tiles.budget = 96 * MB
    display.waitUntil(lambda: monitor.host.budget.value == "of 96 MB")


def test_sizes_are_in_decimal_units_as_in_other_docks(monitor, slide_is_open, display):
    [layer] = slide_is_open(sample_path())
    whole(layer)
    display.waitUntil(lambda: monitor.host.used.value.endswith(" MB used"))
    assert monitor.host.budget.value == "of 512 MB"
    display.waitUntil(lambda: value(monitor, "Total read").endswith(" MB"))
    assert not any("iB" in label.text() for label in monitor.native.findChildren(QLabel))


def test_shows_tiles_that_displays_wait_for(monitor, slide_is_open, display, monkeypatch):
    slide_is_open(sample_path())
    assert value(monitor, "Waiting").endswith(" tiles")
    real = Slide.stats
    display_counters = {"queue": 1234, "batch": 16, "prefetched": 8, "prefetch_hits": 6}

    def stats(self, *args, **options):
        return real(self, *args, **options) | {"display": display_counters}

    monkeypatch.setattr(Slide, "stats", stats)
    display.waitUntil(lambda: value(monitor, "Waiting") == "1,234 tiles")
    assert value(monitor, "Batch") == "16 tiles"
    assert value(monitor, "Prefetch hits") == "75% of 8 tiles"


class TestFailures:
    def test_none(self, monitor, slide_is_open):
        slide_is_open(sample_path())
        assert monitor.failures.value == decoding_page.NO_FAILURE
        assert not monitor.failed.visible

    def test_are_listed_with_their_reasons(self, monitor, slide_is_open, damaged_slide, display):
        first, second = slide_is_open(damaged_slide, sample_path())
        monitor.dock.viewer.layers.selection.active = first
        first.data[0][6 * 256 : 7 * 256, 8 * 256 : 9 * 256]
        display.waitUntil(lambda: monitor.failed.visible)
        [(name, why)] = first.data[0].slide.stats()["failed_tiles"].items()
        assert monitor.failed.native.count() == 1
        assert monitor.failed.native.item(0).text() == f"{name}: {why}"
        assert name.startswith("level 0, row 6, column 8")
        monitor.dock.viewer.layers.selection.active = second
        assert monitor.failures.value == decoding_page.NO_FAILURE

    def test_many_are_cut_short(self):
        lines = rates.failure_lines(5000, {f"tile {n}": "x" * 1000 for n in range(200)})
        assert len(lines) == 201
        assert lines[-1] == "And 4,800 more."
        assert len(lines[0]) <= rates.LONGEST + 1


class TestDevice:
    def test_without_a_driver_there_is_no_gpu_to_choose(
        self, add_monitor, slide_is_open, host_machine, host_runtime
    ):
        host_machine.driver = False
        made = add_monitor()
        slide_is_open(sample_path())
        button = made.choice.buttons["cuda"]
        assert not button.isEnabled()
        assert button.toolTip() == "This machine has no NVIDIA driver."
        assert made.decoder.value == "CPU: this machine has no NVIDIA driver."
        assert not made.device.visible

    @pytest.mark.window
    def test_the_open_slide_is_switched(self, gpu, monitor, slide_is_open, display, settled):
        [layer] = slide_is_open(sample_path())
        slide = layer.data[0].slide
        buttons = monitor.choice.buttons
        click(buttons["cpu"])
        assert slide.device == "cpu"
        assert monitor.decoder.value == "CPU: chosen."
        display.waitUntil(lambda: not monitor.drawn.visible)
        assert not monitor.device.visible
        slide.clear_cache()
        before = slide.stats()["decoded"]
        expected = slide.levels[2][...]
        assert slide.stats()["decoded"].get("nvimagecodec") == before.get("nvimagecodec")
        click(buttons["cuda"])
        settled()
        assert slide.device == "cuda"
        assert monitor.decoder.value.startswith("GPU 0 (host memory): ")
        layer.refresh()
        display.waitUntil(lambda: monitor.drawn.value == "Drawn on the GPU.")
        assert monitor.drawn.visible
        slide.clear_cache()
        found = slide.levels[2][...]
        assert slide.stats()["decoded"]["nvimagecodec"] >= 25
        assert np.abs(found.astype(int) - expected).max() <= 3
        display.waitUntil(lambda: monitor.device.visible)
        tiles = runtime.default().devices.tiles_on("cuda:0")
        display.waitUntil(lambda: monitor.device.bar.value > 0)
        QTest.keyClick(monitor.device.slider.native, Qt.Key_Home)
        assert tiles.budget == 64 * MB
        click(buttons["auto"])
        assert slide.device == "auto"

    def test_starting_it_keeps_nobody_waiting(
        self, gpu, host_machine, monitor, slide_is_open, gate, settled
    ):
        slow = host_machine.open

        def start(index):
            assert threading.current_thread() is not threading.main_thread()
            gate.wait()
            return slow(index)

        host_machine.driver = False  # "auto" starts nothing
        first, second = slide_is_open(sample_path(), sample_path())
        host_machine.open = start
        click(monitor.choice.buttons["cuda"])
        assert monitor.decoder.value == "Starting the GPU…"
        assert not monitor.choice.enabled
        monitor.dock.viewer.layers.selection.active = first
        assert monitor.choice.enabled
        assert monitor.choice.buttons["auto"].isChecked()
        gate.set()
        settled()
        assert monitor.choice.buttons["auto"].isChecked()
        assert second.data[0].slide.device == "cuda"

    def test_one_that_does_not_work_is_said_and_not_offered_again(
        self, gpu, host_machine, monitor, slide_is_open, settled
    ):
        def broken(index):
            raise DeviceError("'cuda:0' can't be used because it is broken; use device='cpu'.")

        host_machine.open = broken
        [layer] = slide_is_open(sample_path())
        buttons = monitor.choice.buttons
        click(buttons["cuda"])
        settled()
        assert layer.data[0].slide.device == "auto"
        assert buttons["auto"].isChecked()
        assert not buttons["cuda"].isEnabled()
        assert "because it is broken" in buttons["cuda"].toolTip()


class TestCosts:
    def test_hidden_page_reads_no_counters(
        self, viewer, monitor, slide_is_open, display, monkeypatch
    ):
        [layer] = slide_is_open(sample_path())
        dock = monitor.dock.native.parent()
        assert monitor.timer.isActive()
        asked = []
        dock.hide()
        assert not monitor.timer.isActive()
        monkeypatch.setattr(Slide, "stats", lambda self, **options: asked.append(self))
        whole(layer)
        display.wait(100)
        assert asked == []
        monkeypatch.undo()
        dock.show()
        display.waitUntil(monitor.timer.isActive)
        assert sum(step.tiles for step in monitor.rates.steps) < 400

    @pytest.mark.window
    def test_page_behind_a_tab_reads_no_counters(self, viewer, monitor, slide_is_open, display):
        slide_is_open(sample_path())
        other, _ = viewer.window.add_plugin_dock_widget("napari-wsigpu", "Navigator")
        viewer.window._qt_window.tabifyDockWidget(monitor.dock.native.parent(), other)
        display.wait(50)  # until there are tabs
        other.raise_()
        display.waitUntil(lambda: not monitor.timer.isActive())
        monitor.dock.native.parent().raise_()
        display.waitUntil(monitor.timer.isActive)

    @pytest.mark.window
    def test_a_closed_one_leaves_nothing(self, viewer, monitor, slide_is_open, display):
        [layer] = slide_is_open(sample_path())
        events = viewer.layers.events.removed, viewer.layers.selection.events.active
        before = [len(event.callbacks) for event in events]
        timer = monitor.timer
        viewer.window.remove_dock_widget(monitor.dock.native)
        assert not timer.isActive()
        monitor.dock.native.deleteLater()
        display.wait(50)
        assert all(len(event.callbacks) < n for event, n in zip(events, before, strict=True))
        viewer.layers.remove(layer)

    def test_it_starts_no_thread(self, monitor, slide_is_open, display):
        slide_is_open(sample_path())
        before = set(threading.enumerate())
        click(monitor.drop)
        display.wait(100)
        assert set(threading.enumerate()) <= before

    @pytest.mark.window
    def test_a_removed_slide_is_forgotten(self, viewer, monitor, slide_is_open, settled):
        # No local variable holds the layer: pytest keeps the locals of frames on the stack.
        whole(slide_is_open(sample_path())[0])
        settled()
        slide = weakref.ref(monitor.dock.slide)
        viewer.layers.clear()
        assert monitor.dock.slide is None
        assert not monitor.timer.isActive()
        settled()
        for _ in range(3):
            gc.collect()
        assert slide() is None


def test_each_slide_has_its_own_minute(viewer, monitor, slide_is_open, write_channels, display):
    first, second = slide_is_open(sample_path(), write_channels(1)[0])
    viewer.layers.selection.active = first
    whole(first)
    display.waitUntil(lambda: monitor.plot.native.peak > 0)
    viewer.layers.selection.active = second
    assert monitor.plot.native.peak == 0
    viewer.layers.selection.active = first
    viewer.layers.remove(first)
    assert monitor.dock.slide is second.data[0].slide


def test_keys_reach_everything_from_top_to_bottom(viewer, monitor, slide_is_open, damaged_slide):
    [layer] = slide_is_open(damaged_slide)
    whole_level = layer.data[0]
    whole_level[6 * 256 : 7 * 256, 8 * 256 : 9 * 256]
    monitor.refresh()
    wanted = [
        monitor.choice.buttons["auto"],
        monitor.host.slider.native,
        monitor.drop.native,
        monitor.failed.native,
    ]
    order, widget = [], monitor.native.nextInFocusChain()
    while widget is not monitor.native:
        if widget in wanted:
            order.append(widget)
        widget = widget.nextInFocusChain()
    assert order == wanted
    assert all(part.focusPolicy() & Qt.TabFocus for part in wanted)
    named = [*monitor.native.findChildren(QAbstractButton), *monitor.native.findChildren(QSlider)]
    named = [part for part in named if monitor.native.isAncestorOf(part) and not part.objectName()]
    assert all(part.accessibleName() and part.toolTip() for part in named if part.isVisible())


@pytest.mark.window
def test_fits_a_narrow_dock_and_grows_with_the_font(viewer, monitor, slide_is_open, display):
    slide_is_open(sample_path())
    assert monitor.native.minimumSizeHint().width() <= 300
    parts = [monitor.plot, monitor.readings, monitor.drop.native, monitor.failed.native]
    assert_text_grows(parts, display)
