"""The "Channels" dock: chooses the channels of a composite, and how they are shown."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from magicgui.widgets import CheckBox, FloatRangeSlider, FloatSlider, LineEdit
from napari.layers import Layer as AnyLayer
from qtpy.QtCore import QSize, Qt
from qtpy.QtGui import QColor, QPixmap
from qtpy.QtWidgets import QColorDialog, QInputDialog, QListWidget, QListWidgetItem, QWidget

from napari_wsigpu.model.appearance import contrast_limits
from napari_wsigpu.model.channel_groups import group_of, read_groups, write_groups
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.privacy import Screen
from napari_wsigpu.viewer.layers.slide_layers import (
    add_channel_groups,
    channel_groups,
    channel_layers,
    choose_group,
    show_composite,
    shown_composite,
    shown_groups,
    slide_of,
)
from napari_wsigpu.viewer.layers.stack_axes import shown_plane
from napari_wsigpu.viewer.window.main_window import single_shot
from napari_wsigpu.viewer.window.saving import (
    ask_for_file,
    ask_where_to_save,
    say_saved,
    start_folder,
)
from napari_wsigpu.viewer.window.settings import settings
from napari_wsigpu.widgets.channels.histogram import Histogram
from napari_wsigpu.widgets.dock.slide_dock import SlideDock
from napari_wsigpu.widgets.kit.parts import (
    Form,
    Hosted,
    Panel,
    Text,
    button,
    choice,
    flow,
    offer,
    row,
)
from napari_wsigpu.widgets.kit.picture import icon_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from magicgui.widgets import Widget
    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.composite import ChannelStyle, Composite
    from napari_wsigpu.slide.slide import Slide

SWATCH = 12  # pixels
LATE_MS = 20
ROWS = 5  # lines of text that the list needs
GAMMAS = 0.2, 3.0
FINE = 1000  # steps of the limits of floating-point values
MOST = 1e30  # largest limit that can be typed
STORIES = "Channel groups (*.json)"
NO_GROUP = -1  # the visible channels are not a group
NO_SLIDE = "Open a slide to choose its channels."
SEPARATE = "Each channel of this slide is a layer; napari's layer controls change them."
NO_CHANNELS = "This slide is RGB; it has no channels to choose."
HIDDEN = "The composite is hidden; click the eye of its layer to show it."


class _List(QListWidget):  # type: ignore[misc]
    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size of a few rows: the list takes spare height, and scrolls."""
        line = self.fontMetrics().lineSpacing()
        return QSize(8 * line, ROWS * line)


class Channels(SlideDock):
    """Lists a slide's channels; the checked ones are combined into one image.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose active slide the dock follows.
    """

    title_in_tabs = "Channels"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._is_filling = False
        # Fills the widgets after the next frame, which that would delay.
        self._late = single_shot(self._fill, LATE_MS, self.native)
        # The shown composite that the widgets show or are about to, composites that wait for limits
        # of channels, and these channels.
        self._seen: Composite | None = None
        self._wanted: WeakKeyDictionary[Layer, Composite] = WeakKeyDictionary()
        self._reading: WeakKeyDictionary[Layer, set[int]] = WeakKeyDictionary()
        self._is_showing = False
        self.note = Text("Note")
        self.find = LineEdit(tooltip="List only channels whose name contains this text")
        self.find.native.setPlaceholderText("Find a channel")
        self.find.native.setAccessibleName("Find a channel")
        self.list = Hosted(_List(), "Channels", "Check the channels to show")
        self.group = choice("Group", "Show a group of channels; Ctrl+Shift+G shows the next one")
        self.add = button("Add…", "Add the checked channels as a group", self._add_group)
        self.open = button("Open…", "Open channel groups from a file", self._open_groups)
        self.save = button("Save…", "Save all groups to a file", self._save_groups)
        self.color = button("Color…", "Change the channel's color", self._choose_color)
        self.auto = button(
            "Auto",
            "Set the limits of the checked channels to low and high percentiles of their pixel "
            "values",
            self._auto,
        )
        self.solo = button("Solo", "Show only the selected channel", self._solo)
        self.split = button(
            "Split", "Add each checked channel as a layer, and hide the composite", self._split
        )
        self.histogram = Hosted(Histogram(), "Values of the selected channel")
        self.window = FloatRangeSlider(tooltip="Values shown as black and at full color")
        # The slider's own labels round values, and clamp typed ones to the values in the overview.
        limits = self.window.native
        limits.setHandleLabelPosition(limits.LabelPosition.NoLabel)
        limits.setEdgeLabelMode(limits.EdgeLabelMode.NoLabel)
        _name(self.window, "Limits")
        self.low, self.high = _field("Lower limit"), _field("Upper limit")
        for field in (self.low, self.high):
            field.native.editingFinished.connect(partial(self._type_limit, field))
        self.gamma = FloatSlider(
            min=GAMMAS[0], max=GAMMAS[1], tooltip="Less than 1 brightens values between the limits"
        )
        _name(self.gamma, "Gamma")
        self.inverted = CheckBox(text="Inverted", tooltip="White where all channels are dark")
        self.inverted.native.setAccessibleName("Inverted")
        self.form = Form({"Limits": row(self.low, self.high, narrow=True), "Gamma": self.gamma})
        self.controls = Panel(
            self.find,
            self.list,
            Form({"Group": self.group}),
            flow(self.add, self.open, self.save),
            flow(self.color, self.solo, self.auto, self.split),
            self.histogram,
            self.window,
            self.form,
            self.inverted,
        )
        inner = Panel(self.note, self.controls)
        inner.stretch(self.controls)
        self.controls.stretch(self.list)
        self.add_details(inner)
        self.find.changed.connect(self._filter)
        self.group.changed.connect(self._show_group)
        self.list.native.itemChanged.connect(self._on_checked)
        self.list.native.currentRowChanged.connect(self._on_selected)
        self.window.changed.connect(self._set_window)
        self.gamma.changed.connect(lambda gamma: self._restyle(gamma=gamma))
        self.inverted.native.toggled.connect(self._invert)
        self.follow()
        self.listen(self.viewer.layers.events.removed, self._connect)

    @property
    def layer(self) -> Layer | None:
        """The layer that shows a composite of the slide; None if there is none."""
        layers = [self.viewer.layers.selection.active, *self.viewer.layers]
        own = (each for each in layers if each is not None and slide_of(each) is self.slide)
        return next((each for each in own if shown_composite(each) is not None), None)

    @property
    def composite(self) -> Composite | None:
        """The composite that `layer` shows, or is about to show; None without a layer."""
        layer = self.layer
        return None if layer is None else self._wanted.get(layer) or shown_composite(layer)

    def show_slide(self, slide: Slide | None) -> None:
        """List the channels of another slide, or none."""
        composite = self.composite
        self.controls.visible = composite is not None
        if composite is None:
            self.note.say("" if slide is None else SEPARATE if slide.channels else NO_CHANNELS)
            return
        assert slide is not None
        assert self.layer is not None
        self._connect()
        self._clear_note()
        for field in (self.low, self.high):
            field.native.setModified(False)  # what has been typed was for another slide
        private, screen = settings().show_private, Screen(slide.metadata, slide.path)
        with self._filling():
            self.list.native.clear()
            for style in composite.channels:
                name = style.name if private else screen.text(style.name)
                item = QListWidgetItem(name)
                item.setFlags(item.flags() | Qt.ItemIsUserCheckable)
                self.list.native.addItem(item)
        self.list.native.setCurrentRow(next(iter(composite.visible), 0))  # fills the widgets
        self._filter()

    def drop_slide(self, slide: Slide) -> None:
        """Drop all that waits for limits of a slide's channels."""
        super().drop_slide(slide)
        for waiting in (self._wanted, self._reading):
            for layer in [each for each in waiting if slide_of(each) is slide]:
                del waiting[layer]

    def _connect(self, _: object = None) -> None:
        """Follow changes of the layer: another one once the original of a duplicate is removed."""
        layer = self.layer
        if layer is not None:
            # A key changes the composite too. napari disconnects methods when the dock is deleted.
            layer.events.set_data.connect(self._on_drawn)
            layer.events.visible.connect(self._on_visible)

    def _on_drawn(self) -> None:
        layer = self.layer
        shown = shown_composite(layer)
        if layer is not None and shown is not None and shown is not self._seen:
            self._seen = shown
            if not self._is_showing:
                self._wanted.pop(layer, None)  # a key has changed it since
            if not self._late.isActive():  # while a slider is dragged, changes follow each other
                self._late.start()

    def _on_visible(self) -> None:
        if self.composite is not None:
            self._clear_note()
            self._fill()

    @property
    def _is_hidden(self) -> bool:
        return self.layer is not None and not self.layer.visible

    def _clear_note(self) -> None:
        """Say only if the layer is hidden, as no change that the dock makes shows then."""
        self.note.say(HIDDEN if self._is_hidden else "")

    def _fill(self) -> None:
        """Show the state of all channels, and of the selected one in the controls."""
        composite = self.composite
        if composite is None:
            return
        self._seen = shown_composite(self.layer)
        for each in (self.add, self.auto, self.split):
            each.enabled = bool(composite.visible)
        self.split.enabled &= not self._is_hidden  # its channels would be added again
        with self._filling():
            for row, style in enumerate(composite.channels):
                item = self.list.native.item(row)
                item.setCheckState(Qt.Checked if style.visible else Qt.Unchecked)
                if item.data(Qt.UserRole) != style.color:  # Qt would draw the list again
                    pixmap = QPixmap(SWATCH, SWATCH)
                    pixmap.fill(QColor(style.color))
                    item.setIcon(icon_of(pixmap))
                    item.setData(Qt.UserRole, style.color)
            self.inverted.value = composite.inverted
            self._offer_groups(composite)
            style = composite.channels[max(self.list.native.currentRow(), 0)]
            self.form.enabled = self.window.enabled = style.window is not None
            self.gamma.value = min(max(style.gamma, GAMMAS[0]), GAMMAS[1])
            low, high = style.window or (self.window.min, self.window.max)
            self.window.min = min(low, self.window.min)
            self.window.max = max(high, self.window.max)
            self.window.value = low, high
            for field, limit in ((self.low, low), (self.high, high)):
                if not field.native.isModified():  # the user is typing
                    field.value = str(round(limit)) if self._is_whole else f"{limit:.6g}"
            self.histogram.native.mark(style.window, style.color)

    @contextmanager
    def _filling(self) -> Iterator[None]:
        """Ignore signals while the dock itself changes its widgets."""
        self._is_filling = True
        try:
            yield
        finally:
            self._is_filling = False

    def _filter(self, _: object = None) -> None:
        text = self.find.value.casefold()
        for item in map(self.list.native.item, range(self.list.native.count())):
            item.setHidden(text not in item.text().casefold())

    def _on_checked(self, item: QListWidgetItem) -> None:
        composite = self.composite
        if self._is_filling or composite is None:
            return
        # The other boxes may be about to change.
        visible, row = {*composite.visible}, self.list.native.row(item)
        checked = item.checkState() == Qt.Checked
        self._show(composite.showing(visible | {row} if checked else visible - {row}))

    def _on_selected(self, row: int) -> None:
        """Show the values of the selected channel."""
        slide, composite = self.slide, self.composite
        if self._is_filling or slide is None or composite is None or row < 0:
            return
        self._fill()
        self.jobs.drop(self.histogram)
        work = partial(_overview, slide, self._plane(self.layer, slide), row)
        done = partial(self._show_values, row)
        self.jobs.start("Reading a channel", slide, work, done, self.note.say, self.histogram)

    def _show_values(self, row: int, pixels: Array) -> None:
        composite = self.composite
        if composite is None or row != self.list.native.currentRow():
            return
        self.histogram.native.show_values(pixels)
        self._reset_range()
        self._fill()

    def _reset_range(self) -> None:
        """Let the slider span the values in the histogram; `_fill` widens it if limits need it."""
        low, high = self.histogram.native.range
        with self._filling():
            self.window.max = max(high, self.window.min)  # never less than the minimum
            self.window.min, self.window.max = low, high
            # The handles stay a step apart.
            self.window.step = 1 if self._is_whole else (high - low) / FINE

    def _show(self, composite: Composite) -> None:
        """Change the layer, after channels whose limits are unknown have been read."""
        self._clear_note()
        if self.layer is not None:
            self._show_on(self.layer, composite)

    def _show_on(self, layer: Layer, composite: Composite) -> None:
        visible = {*composite.visible}
        unknown = {each for each in visible if composite.channels[each].window is None}
        self._wanted.pop(layer, None)
        if unknown:
            self._wanted[layer] = composite
            reading = self._reading.setdefault(layer, set())
            self._read_limits(layer, composite, unknown - reading, layer)
            reading |= unknown
            before = shown_composite(layer)
            assert before is not None
            # Rather than a black picture, the channels that have been shown stay.
            composite = composite.showing(visible - unknown or before.visible)
        self._is_showing = True
        try:
            show_composite(layer, composite)
            self._on_drawn()  # napari does not report it if the layer is hidden
        except SlideError as error:
            self._wanted.pop(layer, None)
            self._give_up(layer, (), str(error))
        finally:
            self._is_showing = False

    def _read_limits(
        self, layer: Layer, composite: Composite, channels: Collection[int], owner: object
    ) -> None:
        """Read the limits of channels of a layer off the main thread, and then set them."""
        slide = slide_of(layer)
        if slide is not None and channels:
            work = partial(_limits, slide, self._plane(layer, slide), sorted(channels))
            done = partial(self._set_limits, layer, composite)
            failed = partial(self._give_up, layer, channels)
            self.jobs.start("Reading channels", slide, work, done, failed, owner)

    def _plane(self, layer: Layer | None, slide: Slide) -> dict[str, int]:
        """Return the plane of a slide that the viewer shows."""
        return {} if layer is None else shown_plane(self.viewer, layer, slide)

    def _set_limits(
        self, layer: Layer, before: Composite, limits: Mapping[int, tuple[float, float]]
    ) -> None:
        """Set limits that the user has not changed since they were read."""
        self._reading.setdefault(layer, set()).difference_update(limits)
        composite = self._wanted.get(layer) or shown_composite(layer)
        if composite is None or layer not in self.viewer.layers:
            return
        for index, window in limits.items():
            style = composite.channels[index]
            if style.window == before.channels[index].window:
                composite = composite.styled(index, replace(style, window=window))
        self._show_on(layer, composite)

    def _give_up(self, layer: Layer, channels: Collection[int], problem: str) -> None:
        """Say why channels can't be read, and show the others."""
        self._reading.setdefault(layer, set()).difference_update(channels)
        wanted = self._wanted.get(layer)
        if wanted is not None:
            unknown = {each for each in channels if wanted.channels[each].window is None}
            self._show_on(layer, wanted.showing({*wanted.visible} - unknown))
        elif layer is self.layer:
            self._fill()
        self.note.say(problem)

    @property
    def _is_whole(self) -> bool:
        """Whether the values of the channels are integers."""
        return self.slide is not None and self.slide.levels[0].dtype.kind in "iu"

    def _type_limit(self, field: LineEdit) -> None:
        """Set a limit that has been typed; the other one follows, so that they stay in order."""
        composite, channel = self.composite, self.list.native.currentRow()
        if not field.native.isModified() or composite is None or channel < 0:
            return
        field.native.setModified(False)
        try:
            limit = float(field.value)
        except ValueError:
            limit = math.nan
        low, high = composite.channels[channel].window or self.window.value
        if abs(limit) <= MOST:  # also no NaN
            is_low = field is self.low
            self._set_window((limit, max(limit, high)) if is_low else (min(low, limit), limit))
        # At once, because a click on the slider, which ends typing too, states both limits.
        self._reset_range()
        self._fill()

    def _set_window(self, limits: tuple[float, float]) -> None:
        low, high = map(round, limits) if self._is_whole else limits
        self._restyle(window=(low, high))

    def _restyle(self, **changes: object) -> None:
        """Change the style of the selected channel."""
        composite, row = self.composite, self.list.native.currentRow()
        if self._is_filling or composite is None or row < 0:
            return
        style: ChannelStyle = replace(composite.channels[row], **changes)
        self._show(composite.styled(row, style))

    def _choose_color(self) -> None:
        composite, row = self.composite, self.list.native.currentRow()
        if composite is not None and row >= 0:
            old = QColor(composite.channels[row].color)
            color = QColorDialog.getColor(old, self.native, "Color of the channel")
            if color.isValid():
                self._restyle(color=color.name())

    def _solo(self) -> None:
        composite, row = self.composite, self.list.native.currentRow()
        if composite is not None and row >= 0:
            self._show(composite.showing([row]))

    def _auto(self) -> None:
        layer, composite = self.layer, self.composite
        if layer is not None and composite is not None:
            self._read_limits(layer, composite, composite.visible, self.auto)

    def _offer_groups(self, composite: Composite) -> None:
        """List the groups, and choose the one whose channels are visible."""
        groups, number = ([], None) if self.layer is None else shown_groups(self.layer, composite)
        # Choices have different names.
        names, repeated = [""], Counter(group.name for group in groups)
        for place, group in enumerate(groups, 1):
            unique = group.name and repeated[group.name] == 1
            names.append(group.name if unique else f"{group.name} ({place})".strip())
        offer(self.group, [(name, place) for place, name in enumerate(names, NO_GROUP)])
        self.group.value = NO_GROUP if number is None else number

    def _show_group(self, number: int) -> None:
        composite, layer = self.composite, self.layer
        if not self._is_filling and composite is not None and layer and number != NO_GROUP:
            self._show(choose_group(layer, number, composite))

    def _add_group(self) -> None:
        """Ask for a name, and add the visible channels as a group."""
        composite, layer = self.composite, self.layer
        if composite is None or layer is None:
            return
        name, accepted = QInputDialog.getText(self.native, "Add a group", "Name:")
        if accepted and name.strip():
            add_channel_groups(layer, [group_of(composite, name.strip())])
            self._fill()

    def _open_groups(self) -> None:
        slide, composite, layer = self.slide, self.composite, self.layer
        if slide is None or composite is None or layer is None:
            return
        folder = start_folder(slide.path)
        path = ask_for_file(self.native, "Open channel groups", folder, STORIES)
        if not path:
            return
        try:
            groups = read_groups(path, composite, slide.levels[0].dtype)
        except SlideError as error:
            self.note.say(str(error))
            return
        first = add_channel_groups(layer, groups)
        self._show(choose_group(layer, first, composite))

    def _save_groups(self) -> None:
        slide, layer = self.slide, self.layer
        if slide is None or layer is None:
            return
        start = start_folder(slide.path) / f"{layer.name}.story.json"
        path = ask_where_to_save(self.native, "Save channel groups", start, STORIES)
        if not path:
            return
        try:
            write_groups(path, channel_groups(layer), slide.levels[0].dtype)
        except SlideError as error:
            self.note.say(str(error))
        else:
            self._clear_note()
            say_saved(path, None)

    def _invert(self, inverted: bool) -> None:
        composite = self.composite
        if not self._is_filling and composite is not None:
            self._show(replace(composite, inverted=inverted))

    def _split(self) -> None:
        slide, layer, composite = self.slide, self.layer, self.composite
        if slide is None or layer is None or composite is None:
            return
        private = settings().show_private
        added = channel_layers(slide, composite.visible, composite.channels, private=private)
        for data, attributes, kind in added:
            self.viewer.add_layer(AnyLayer.create(data, attributes, kind))
        layer.visible = False


def _field(name: str) -> LineEdit:
    """Return a text field for a number."""
    field = LineEdit(tooltip=f"{name}; press Enter to set it")
    field.native.setAccessibleName(name)
    return field


def _name(slider: Widget, name: str) -> None:
    """Give a slider and its parts an accessible name."""
    for part in (slider.native, *slider.native.findChildren(QWidget)):
        part.setAccessibleName(name)


def _overview(slide: Slide, plane: Mapping[str, int], channel: int) -> Array:
    return slide.plane(**plane).channel_overview(channel)


def _limits(
    slide: Slide, plane: Mapping[str, int], channels: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """Return the automatic limits of channels: low and high percentiles of their values."""
    return {index: contrast_limits(_overview(slide, plane, index)) for index in channels}
