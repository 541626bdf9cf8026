"""The dock "Decode monitor": what decodes the active slide, how fast, and in how much memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from qtpy.QtCore import Qt, QTimer
from qtpy.QtWidgets import (
    QDockWidget,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QVBoxLayout,
    QWidget,
)
from superqt import QElidingLabel

from napari_wsigpu.gpu.device.devices import device_index
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.reading.offload import CPU as CPU_DECODER
from napari_wsigpu.slide.runtime import default
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.progressive import display_of
from napari_wsigpu.viewer.texture import ON
from napari_wsigpu.widgets.budgets import Budget, machine_memory
from napari_wsigpu.widgets.column import Column
from napari_wsigpu.widgets.device_choice import AUTO, CPU, DeviceChoice
from napari_wsigpu.widgets.facts import title
from napari_wsigpu.widgets.failures import Failures
from napari_wsigpu.widgets.jobs import Jobs
from napari_wsigpu.widgets.rate_plot import RatePlot, per_second
from napari_wsigpu.widgets.rates import Rates
from napari_wsigpu.widgets.readings import Readings
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from napari import Viewer

    from napari_wsigpu.gpu.transfer.tiles import DeviceTiles
    from napari_wsigpu.slide.runtime import Runtime
    from napari_wsigpu.slide.slide import Slide

INTERVAL_MS = 500
NO_SLIDE = "Open a slide, or select its layer, to see how it is decoded."
STARTING = "Starting the GPU…"
TILES, DECODED, READ = "Tiles", "Decoded", "Read"
WAITING, BATCH, HITS = "Waiting", "Batch", "Cache hits"
PREFETCH, ALL_READ = "Prefetch hits", "Read in all"
READINGS = {
    TILES: "Tiles of this slide that are decoded now",
    DECODED: "Pixels that are decoded now",
    READ: "Encoded bytes that are read from the file now",
    WAITING: "Tiles that a display waits for",
    BATCH: "Tiles that are decoded together",
    HITS: "Part of the tiles of the last minute that were in memory already",
    PREFETCH: "Part of the tiles decoded ahead that were shown later",
    ALL_READ: "Encoded bytes read since the slide was opened",
}


class DecodeMonitor(SlideDock):
    """Shows how the slide of the active layer is decoded; costs nothing while it is hidden.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose active layer is followed.
    """

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._jobs = Jobs()
        self._rates = Rates()
        self._histories: WeakKeyDictionary[Slide, Rates] = WeakKeyDictionary()
        self._device_tiles: DeviceTiles | None = None
        self._switching = False
        self._dock: QDockWidget | None = None
        self.timer = QTimer(self)
        self.timer.setInterval(INTERVAL_MS)

        self.title = QElidingLabel()
        self.title.setElideMode(Qt.ElideMiddle)
        font = self.title.font()
        font.setBold(True)
        self.title.setFont(font)
        self.decoder = QLabel()
        self.decoder.setWordWrap(True)
        self.decoder.setTextInteractionFlags(Qt.TextSelectableByMouse)
        self.decoder.setToolTip("What decodes the finest level, and why")
        self.drawn = QLabel()
        self.drawn.setWordWrap(True)
        self.drawn.setTextInteractionFlags(Qt.TextSelectableByMouse)
        self.drawn.setToolTip("Where the pictures on screen are put together, and why there")
        self.choice = DeviceChoice()
        self.plot = RatePlot()
        self.readings = Readings(READINGS)
        self.host = Budget("Cache in memory", "Decoded tiles of all slides in main memory")
        self.device = Budget("Cache on the GPU", "Decoded tiles of all slides in the GPU's memory")
        self.host.offer(machine_memory(), self._runtime.tiles.budget)
        self.clear = QPushButton("Clear cache")
        self.clear.setAccessibleName("Clear cache")
        self.clear.setToolTip("Drop this slide's decoded tiles, from memory and from the GPU")
        self.failures = Failures()
        self._arrange()

        self.timer.timeout.connect(self._look)
        self.choice.chosen.connect(self._switch)
        self.clear.clicked.connect(self._clear)
        self.host.chosen.connect(self._set_host_budget)
        self.device.chosen.connect(self._set_device_budget)
        self.at_end.append(self._jobs.close)
        self.follow()

    def _arrange(self) -> None:
        page = QWidget()
        inner = QVBoxLayout(page)
        inner.setContentsMargins(0, 0, 0, 0)
        inner.addWidget(self.title)
        inner.addWidget(self.decoder)
        inner.addWidget(self.drawn)
        inner.addWidget(self.choice)
        for part in (self.plot, self.readings, self.host, self.device):
            inner.addWidget(part)
        buttons = QHBoxLayout()
        buttons.addWidget(self.clear)
        buttons.addStretch()
        inner.addLayout(buttons)
        inner.addWidget(self.failures, 1)
        self.details = Column(page)
        outer = QVBoxLayout(self)
        outer.addWidget(self.empty)
        outer.addWidget(self.details, 1)
        outer.addStretch()

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self._jobs.drop(self)
        self._switching = False
        self._rates.pause()
        self._rates = Rates() if slide is None else self._histories.setdefault(slide, Rates())
        self.failures.clear()
        self.details.setVisible(slide is not None)
        self.title.setText("" if slide is None else title(slide))
        self.title.setToolTip("" if slide is None else slide.path)
        self._run()

    def let_go(self, slide: Slide) -> None:
        """Work on a slide that has left the viewer no more."""
        self._jobs.let_go(slide)

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Look at the counters from now on, except while the dock is behind another's tab."""
        super().showEvent(event)
        dock = self.parent()
        if isinstance(dock, QDockWidget) and dock is not self._dock:
            self._dock = dock
            dock.visibilityChanged.connect(self._run)
        self._run()

    def hideEvent(self, event: Any) -> None:  # noqa: N802
        """Look no longer."""
        super().hideEvent(event)
        self._run(in_front=False)

    def _run(self, in_front: bool = True) -> None:
        if self.slide is not None and in_front and self.isVisible():
            self.timer.start()
            self._look()
        else:
            self.timer.stop()
            self._rates.pause()

    def _look(self) -> None:
        slide = self.slide
        if slide is None:
            return
        now, stats = time.monotonic(), slide.stats(most_failed=0)
        self._rates.add(now, stats)
        self.plot.show_steps(self._rates.steps, now)
        self.readings.show_values(self._values(stats))
        self._show_decoder(slide)
        self._show_memory(slide)
        self.failures.show_failures(
            stats["failed"], lambda most: slide.stats(most_failed=most)["failed_tiles"]
        )

    def _values(self, stats: Mapping[str, Any]) -> dict[str, str]:
        values = {ALL_READ: byte_size(stats["bytes_read"])}
        step = self._rates.latest
        if step is not None:
            values[TILES] = per_second(step.rate(step.tiles))
            values[DECODED] = f"{byte_size(round(step.rate(step.bytes_decoded)))}/s"
            values[READ] = f"{byte_size(round(step.rate(step.bytes_read)))}/s"
        steps = self._rates.steps
        asked = sum(step.asked for step in steps)
        hits = _part(sum(step.hits for step in steps), asked)
        values[HITS] = f"{hits} in this minute" if asked else "no tiles in this minute"
        display = stats["display"]
        values[WAITING] = f"{display['queue']:,} tiles"
        values[BATCH] = f"{display['batch']:,} tiles"
        values[PREFETCH] = _part(display["prefetch_hits"], display["prefetched"])
        return values

    def _show_decoder(self, slide: Slide) -> None:
        self.choice.setEnabled(not self._switching)
        if not self._switching:
            self.choice.show_device(slide.device)
            decoder, why = slide.decoder
            self.decoder.setText(f"{decoder}: {why}.")
            shown = (display_of(each) for each in self.viewer.layers if slide_of(each) is slide)
            ways = dict.fromkeys(_way(display.interop) for display in shown if display is not None)
            self.drawn.setText(" ".join(ways))
            self.drawn.setVisible(bool(ways) and decoder != CPU_DECODER)

    @property
    def _runtime(self) -> Runtime:
        """What the slide shares with others."""
        return default() if self.slide is None else self.slide.runtime

    def _show_memory(self, slide: Slide) -> None:
        cache = self._runtime.tiles
        self.host.show_use(cache.used, cache.budget)
        index = None if slide.device == CPU else device_index(slide.device) or 0
        tiles = None if index is None else self._runtime.devices.tiles_on(f"cuda:{index}")
        self.device.setVisible(tiles is not None)
        if tiles is not None:
            if tiles is not self._device_tiles:
                self.device.offer(tiles.device.memory[1], tiles.budget)
            self.device.show_use(tiles.used, tiles.budget)
        self._device_tiles = tiles

    def _switch(self, device: str) -> None:
        slide = self.slide
        if slide is None or slide.device == device:
            return
        if device in (AUTO, CPU):
            slide.device = device
            self._end_switch(slide)
            return
        # CUDA may have to be started first.
        self._switching = True
        self.choice.setEnabled(False)
        self.decoder.setText(STARTING)
        self._jobs.start(
            STARTING,
            slide,
            lambda: setattr(slide, "device", device),
            lambda _: self._end_switch(slide),
            lambda sentence: self._refuse(slide, sentence),
            owner=self,
        )

    def _end_switch(self, slide: Slide) -> None:
        self._switching = False
        self._show_decoder(slide)
        self._show_memory(slide)

    def _refuse(self, slide: Slide, sentence: str) -> None:
        self.choice.refuse_gpu(sentence)
        self._end_switch(slide)

    def _clear(self) -> None:
        if self.slide is not None:
            self.slide.clear_cache()
            self._show_memory(self.slide)

    def _set_host_budget(self, budget: int) -> None:
        self._runtime.tiles.budget = budget

    def _set_device_budget(self, budget: int) -> None:
        if self._device_tiles is not None:
            self._device_tiles.budget = budget


def _way(interop: str) -> str:
    return "Drawn on the GPU." if interop == ON else f"Drawn on the host: {interop}."


def _part(count: int, whole: int) -> str:
    return f"{count / whole:.0%} of {whole:,} tiles" if whole else "no tiles yet"
