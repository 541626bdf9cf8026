"""The inspector's "Decoding" page: decoder, speed and memory of a slide."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from magicgui.widgets import RadioButtons
from qtpy.QtCore import Qt, QTimer
from qtpy.QtWidgets import QAbstractItemView, QListWidget, QRadioButton

from napari_wsigpu.gpu.device.devices import device_index
from napari_wsigpu.model.limits import machine_memory
from napari_wsigpu.reading.offload import CPU as CPU_DECODER
from napari_wsigpu.slide.rates import RATE_TOOLTIPS, Rates, failure_lines
from napari_wsigpu.slide.runtime import default
from napari_wsigpu.viewer.drawing.progressive import display_of
from napari_wsigpu.viewer.drawing.texture import ON
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.widgets.inspector.budgets import Budget
from napari_wsigpu.widgets.kit.parts import (
    PAGE_MARGIN,
    Form,
    Hosted,
    Panel,
    Scrolled,
    Text,
    button,
    row,
)
from napari_wsigpu.widgets.kit.rate_plot import RatePlot

if TYPE_CHECKING:
    from napari import Viewer
    from qtpy.QtCore import QEvent

    from napari_wsigpu.gpu.transfer.device_tiles import DeviceTiles
    from napari_wsigpu.slide.runtime import Runtime
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.dock.jobs import Jobs

INTERVAL_MS = 500
MOST_ROWS = 200
ROWS_SEEN = 6
NO_FAILURE = "No tiles have failed so far."
STARTING = "Starting the GPU"
AUTO, GPU, CPU = "auto", "cuda", "cpu"
CHOICES = {
    AUTO: ("Auto", "Decode on the GPU if it can, except for small regions"),
    GPU: ("GPU", "Decode all supported tiles on the GPU, even of small regions"),
    CPU: ("CPU", "Decode on the CPU"),
}


class DeviceChoice(RadioButtons):  # type: ignore[misc]
    """Buttons for the device that decodes a slide: automatic, GPU or CPU.

    Attributes
    ----------
    buttons : dict of str to QRadioButton
        Buttons by device.
    """

    def __init__(self) -> None:
        offered = [(text, device) for device, (text, _) in CHOICES.items()]
        super().__init__(choices=offered, value=AUTO, orientation="horizontal")
        self._gpu = GPU
        self.native.setStyleSheet("QGroupBox { border: 0; margin: 0; padding: 0 }")
        self.native.setAccessibleName("Decode on")
        found = self.native.findChildren(QRadioButton)
        self.buttons = dict(zip(CHOICES, found, strict=True))
        for device, (text, explanation) in CHOICES.items():
            self.buttons[device].setAccessibleName(f"Decode on: {text}")
            self.buttons[device].setToolTip(explanation)
        refusal = default().devices.refusal()
        if refusal is not None:
            self.refuse_gpu(f"{refusal[0].upper()}{refusal[1:]}.")

    def reset_choices(self, *_: object) -> None:
        """Keep the buttons, which magicgui would otherwise create again."""
        if not self.choices:
            super().reset_choices()

    @property
    def device(self) -> str:
        """The chosen device, as `Slide.device` names it."""
        return self._gpu if self.value == GPU else str(self.value)

    def show_device(self, device: str) -> None:
        """Select the button of a slide's device."""
        on_gpu = device not in (AUTO, CPU)
        self._gpu = device if on_gpu else GPU
        with self.changed.blocked():
            self.value = GPU if on_gpu else device

    def refuse_gpu(self, reason: str) -> None:
        """Disable the GPU's button, and show the reason."""
        gpu_button = self.buttons[GPU]
        gpu_button.setEnabled(False)
        gpu_button.setToolTip(reason)
        gpu_button.setAccessibleDescription(reason)


class _FailureList(QListWidget):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.setWordWrap(True)
        self.setSpacing(1)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarAlwaysOff)
        self.setSelectionMode(QAbstractItemView.SingleSelection)
        self.setTextElideMode(Qt.ElideNone)

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Reserve the height of some rows in the new font."""
        super().changeEvent(event)
        self.setMinimumHeight(ROWS_SEEN * self.fontMetrics().lineSpacing())


class DecodingPage(Scrolled):
    """Shows how a slide is decoded; reads no counters while it is hidden.

    Parameters
    ----------
    jobs : Jobs
        The dock's slow jobs.
    viewer : Viewer
        The viewer whose layers show the slide.
    """

    def __init__(self, jobs: Jobs, viewer: Viewer) -> None:
        self._jobs, self._viewer = jobs, viewer
        self._slide: Slide | None = None
        self.rates = Rates()
        self._histories: WeakKeyDictionary[Slide, Rates] = WeakKeyDictionary()
        self._device_tiles: DeviceTiles | None = None
        self._switching, self._failed = False, -1
        self.decoder = Text("Decoder")
        self.decoder.tooltip = "The decoder of the finest level, and why it was chosen"
        self.drawn = Text("Drawn")
        self.drawn.tooltip = "Where the image on screen is composed, and the reason"
        self.choice = DeviceChoice()
        self.plot = Hosted(RatePlot())
        self.readings = Form({name: Text(name) for name in RATE_TOOLTIPS})
        for name, meaning in RATE_TOOLTIPS.items():
            self.readings.widgets[name].tooltip = meaning
        self.host = Budget(
            "Cache in memory", "Decoded tiles of all slides in main memory", self._set_host_budget
        )
        self.device = Budget(
            "Cache on the GPU",
            "Decoded tiles of all slides in the GPU's memory",
            self._set_device_budget,
        )
        self.host.offer(machine_memory(), self._runtime.tiles.budget)
        self.drop = button(
            "Clear cache",
            "Remove this slide's decoded tiles from main memory and from the GPU",
            self._drop,
        )
        self.failures = Text("Failures")
        self.failed = Hosted(_FailureList(), "Failed tiles")
        page = Panel(
            self.decoder,
            self.drawn,
            self.choice,
            self.plot,
            self.readings,
            self.host,
            self.device,
            row(self.drop),
            self.failures,
            self.failed,
            margin=PAGE_MARGIN,
        )
        page.stretch(self.failed)
        page.stretch()
        super().__init__(page)
        page.native.shown.connect(lambda _: self.run())
        page.native.hidden.connect(lambda: self.run(in_front=False))
        self.timer = QTimer(page.native)
        self.timer.setInterval(INTERVAL_MS)
        self.timer.timeout.connect(self.refresh)
        self.choice.changed.connect(self._switch)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self._jobs.drop(self)
        self._slide, self._switching, self._failed = slide, False, -1
        self.rates.pause()
        self.rates = Rates() if slide is None else self._histories.setdefault(slide, Rates())
        self.run()

    def run(self, in_front: bool = True) -> None:
        """Read the counters at intervals while the page is visible."""
        if self._slide is not None and in_front and self.inner.visible:
            self.timer.start()
            self.refresh()
        else:
            self.timer.stop()
            self.rates.pause()

    def refresh(self) -> None:
        """Read and show the counters."""
        slide = self._slide
        if slide is None:
            return
        now, stats = time.monotonic(), slide.stats(most_failed=0)
        self.rates.add(now, stats)
        self.plot.native.show_steps(self.rates.steps, now)
        self.readings.say(self.rates.texts(stats))
        self._show_decoder(slide)
        self._show_memory(slide)
        self._show_failures(slide, stats["failed"])

    def _show_failures(self, slide: Slide, count: int) -> None:
        if count == self._failed:
            return
        self._failed = count
        text = f"Failed tiles: {count:,}, hatched or shown as background"
        self.failures.value = text if count else NO_FAILURE
        self.failed.native.clear()
        if count:
            found = slide.stats(most_failed=MOST_ROWS)["failed_tiles"]
            self.failed.native.addItems(failure_lines(count, found))
        self.failed.visible = count > 0

    def _show_decoder(self, slide: Slide) -> None:
        self.choice.enabled = not self._switching
        if not self._switching:
            self.choice.show_device(slide.device)
            decoder, why = slide.decoder
            self.decoder.value = f"{decoder}: {why}."
            shown = (display_of(each) for each in self._viewer.layers if slide_of(each) is slide)
            texts = dict.fromkeys(_drawn_where(each.interop) for each in shown if each is not None)
            self.drawn.say("" if decoder == CPU_DECODER else " ".join(texts))

    @property
    def _runtime(self) -> Runtime:
        """Caches and threads that the slide shares with other slides."""
        return default() if self._slide is None else self._slide.runtime

    def _show_memory(self, slide: Slide) -> None:
        cache = self._runtime.tiles
        self.host.show_use(cache.used, cache.budget)
        index = None if slide.device == CPU else device_index(slide.device) or 0
        tiles = None if index is None else self._runtime.devices.tiles_on(f"cuda:{index}")
        self.device.visible = tiles is not None
        if tiles is not None:
            if tiles is not self._device_tiles:
                self.device.offer(tiles.device.memory[1], tiles.budget)
            self.device.show_use(tiles.used, tiles.budget)
        self._device_tiles = tiles

    def _switch(self, _: str) -> None:
        slide, device = self._slide, self.choice.device
        if slide is None or slide.device == device:
            return
        if device in (AUTO, CPU):
            slide.device = device
            self._end_switch(slide)
            return
        # Starting CUDA may take a while.
        self._switching, self.choice.enabled = True, False
        self.decoder.value = f"{STARTING}…"
        work = partial(setattr, slide, "device", device)
        done, failed = partial(self._end_switch, slide), partial(self._refuse, slide)
        self._jobs.start(STARTING, slide, work, done, failed, owner=self)

    def _end_switch(self, slide: Slide, result: None = None) -> None:
        self._switching = False
        self._show_decoder(slide)
        self._show_memory(slide)

    def _refuse(self, slide: Slide, sentence: str) -> None:
        self.choice.refuse_gpu(sentence)
        self._end_switch(slide)

    def _drop(self) -> None:
        if self._slide is not None:
            self._slide.clear_cache()
            self._show_memory(self._slide)

    def _set_host_budget(self, budget: int) -> None:
        self._runtime.tiles.budget = budget

    def _set_device_budget(self, budget: int) -> None:
        if self._device_tiles is not None:
            self._device_tiles.budget = budget


def _drawn_where(interop: str) -> str:
    return "Drawn on the GPU." if interop == ON else f"Drawn on the host: {interop}."
