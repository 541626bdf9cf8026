"""What the dock "Export region" lets one choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from magicgui.widgets import ComboBox
from napari.layers import Shapes
from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QComboBox, QFormLayout, QLabel, QWidget

from napari_wsigpu.widgets.export_plan import ENDINGS
from napari_wsigpu.widgets.facts import TIMES, pixel_size, title

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.slide.slide import Slide

VIEW, WHOLE = "view", "whole"
ONE, EACH, MASKED = "one", "each", "masked"
STORED, SRGB = "stored", "srgb"
LEAST = 8  # characters


class ExportForm(QWidget):  # type: ignore[misc]
    """A column of choices.

    Attributes
    ----------
    slide : ComboBox
        A `Slide`.
    region : ComboBox
        `VIEW`, `WHOLE` or a layer of shapes.
    pieces : ComboBox
        `ONE` file around all selected shapes, a file for `EACH`, or `MASKED` by its outline;
        hidden while no shapes are chosen.
    level : ComboBox
        The number of a level of the slide's pyramid.
    color : ComboBox
        `STORED` or `SRGB`; hidden where a slide has no profile.
    kind : ComboBox
        One of the keys of `ENDINGS`.
    changed : Signal
        Something else was chosen.
    """

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.slide = _choice("Slide", "The slide that is exported from")
        self.region = _choice("Region", "The part of the slide that is exported")
        self.pieces = _choice(
            "Files",
            "One file of the box around the selected shapes, or one of each (of all if none is "
            "selected); outside of a mask pixels become background",
            [("One", ONE), ("One a shape", EACH), ("One a shape, masked by it", MASKED)],
        )
        self.level = _choice(
            "Level", "The level that becomes the finest one of the file; all have the same extent"
        )
        self.color = _choice(
            "Colours",
            "Pixels as the file stores them, or in sRGB by the slide's ICC profile",
            [("As stored", STORED), ("sRGB", SRGB)],
        )
        self.kind = _choice(
            "Format", "The kind of file that is written", [(kind, kind) for kind in ENDINGS]
        )
        layout = QFormLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setRowWrapPolicy(QFormLayout.WrapLongRows)
        layout.setLabelAlignment(Qt.AlignLeft)
        layout.setFieldGrowthPolicy(QFormLayout.AllNonFixedFieldsGrow)
        for choice in (self.slide, self.region, self.pieces, self.level, self.color, self.kind):
            label = QLabel(choice.label)
            label.setToolTip(choice.tooltip)
            layout.addRow(label, choice.native)
            choice.changed.connect(self._emit)
        self._pieces_label = layout.labelForField(self.pieces.native)
        self._show_pieces()
        self._color_label = layout.labelForField(self.color.native)

    def _show_pieces(self) -> None:
        for part in (self.pieces.native, self._pieces_label):
            part.setVisible(isinstance(self.region.value, Shapes))

    def _emit(self, value: Any) -> None:
        self._show_pieces()
        self.changed.emit()

    def offer_slides(self, slides: Sequence[Slide]) -> None:
        """Offer other slides."""
        names = [title(slide) for slide in slides]
        _offer(self.slide, list(zip(_told_apart(names), slides, strict=True)))

    def offer_regions(self, layers: Sequence[Shapes]) -> None:
        """Offer the view, the slide, and layers of shapes."""
        names = _told_apart([f"Shapes of '{layer.name}'" for layer in layers])
        _offer(
            self.region,
            [("Current view", VIEW), ("Whole slide", WHOLE), *zip(names, layers, strict=True)],
        )
        self._show_pieces()

    def show_slide(self, slide: Slide | None, level: int) -> None:
        """Offer the levels of another slide, and choose one of them by its number."""
        levels = [] if slide is None else level_names(slide)
        _offer(self.level, [(name, number) for number, name in levels])
        if slide is not None:
            self.slide.value = slide
            self.level.value = level
        has_profile = slide is not None and slide.layout.icc is not None
        for part in (self.color.native, self._color_label):
            part.setVisible(has_profile)
        if not has_profile:
            self.color.value = STORED


def level_names(slide: Slide) -> list[tuple[int, str]]:
    """Return number and name of each level: which it is, its pixel size or downsample, its size."""
    base = slide.layout.levels[0]
    found = []
    for number, level, *_ in slide.pyramid:
        downsample = level.downsample(base)
        parts = ["computed" if level.computed else f"level {number}"]
        if slide.mpp is None:
            parts.append(f"downsample {downsample:.4g}")
        else:
            parts.append(pixel_size(slide.mpp, downsample))
        parts.append(f"{level.width:,} {TIMES} {level.height:,} px")
        found.append((number, "  ·  ".join(parts)))
    return found


def _choice(label: str, tip: str, choices: Sequence[tuple[str, Any]] = ()) -> ComboBox:
    choice = ComboBox(label=label, tooltip=tip, choices=choices)
    box: QComboBox = choice.native
    box.setAccessibleName(label)
    box.setSizeAdjustPolicy(QComboBox.AdjustToMinimumContentsLengthWithIcon)
    box.setMinimumContentsLength(LEAST)
    return choice


def _offer(choice: ComboBox, offered: list[tuple[str, Any]]) -> None:
    """Offer other choices; the chosen one stays if it is among them, perhaps by another name."""
    if [tuple(old) for old in zip(_names(choice), choice.choices, strict=True)] == offered:
        return
    chosen = choice.value
    with choice.changed.blocked():
        choice.choices = ()  # or those that stay come first
        choice.choices = lambda _: offered  # a list would be forgotten with the next parent
        if any(value == chosen for _, value in offered):
            choice.value = chosen
    rows = choice.native.view()
    # Its list shows whole names, however narrow the dock is.
    bar = rows.verticalScrollBar().sizeHint().width()
    rows.setMinimumWidth(rows.sizeHintForColumn(0) + bar)


def _names(choice: ComboBox) -> list[str]:
    return [choice.native.itemText(index) for index in range(choice.native.count())]


def _told_apart(names: Sequence[str]) -> list[str]:
    """Return names of which equal ones are numbered."""
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]
