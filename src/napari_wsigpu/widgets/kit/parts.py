"""Parts of docks: magicgui widgets that fit a column 272 pixels wide and have accessible names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from magicgui.backends._qtpy.widgets import Container as QtContainer
from magicgui.backends._qtpy.widgets import QBaseWidget
from magicgui.widgets import ComboBox, Container, Label, PushButton, Widget
from qtpy.QtCore import QEvent, QObject, QSize, Qt, Signal
from qtpy.QtWidgets import (
    QComboBox,
    QFormLayout,
    QFrame,
    QLabel,
    QScrollArea,
    QSizePolicy,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)
from superqt import QElidingLabel, QFlowLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

W = TypeVar("W", bound=QWidget)

LEAST = 8  # characters of a combo box
SPACING = 6  # pixels


class _Host(QBaseWidget):  # type: ignore[misc]
    """magicgui's backend of a widget that exists already."""

    def __init__(self, widget: QWidget, parent: QWidget | None = None) -> None:
        super().__init__(lambda parent: widget, parent)
        widget.setObjectName("")


class Hosted(Widget, Generic[W]):  # type: ignore[misc]
    """A Qt widget as a magicgui widget.

    Parameters
    ----------
    widget : QWidget
        The widget; it is `native` from then on.
    name, tip : str
        Its accessible name, and its tooltip.
    """

    native: W

    def __init__(self, widget: W, name: str = "", tip: str = "") -> None:
        super().__init__(
            widget_type=_Host, tooltip=tip or widget.toolTip(), backend_kwargs={"widget": widget}
        )
        if name:
            widget.setAccessibleName(name)


class Text(Label):  # type: ignore[misc]
    """A label that breaks its lines where the dock is narrow."""

    def __init__(self, name: str = "", text: str = "", *, rich: bool = False) -> None:
        super().__init__(value=text)
        label: QLabel = self.native
        label.setWordWrap(True)
        label.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Maximum)
        label.setTextFormat(Qt.RichText if rich else Qt.PlainText)
        label.setTextInteractionFlags(Qt.TextSelectableByMouse)
        label.setAccessibleName(name)

    def say(self, text: str) -> None:
        """Show another text; nothing at all for an empty one."""
        if self.native.text() != text:
            self.native.setText(text)
        self.visible = bool(text)

    def keep_room(self) -> None:
        """Ask for the height of all lines at this width, which layouts don't."""
        label: QLabel = self.native
        label.setMinimumHeight(0)  # or it is the least that is asked for
        label.setMinimumHeight(max(label.heightForWidth(label.width()), 0))


class Title(Hosted[QElidingLabel]):
    """A bold line, elided in its middle."""

    def __init__(self) -> None:
        super().__init__(QElidingLabel())
        self.native.setElideMode(Qt.ElideMiddle)
        font = self.native.font()
        font.setBold(True)
        self.native.setFont(font)

    def say(self, text: str, tip: str = "") -> None:
        """Show another text, and a tooltip."""
        self.native.setText(text)
        self.native.setToolTip(tip)


class Heading(Label):  # type: ignore[misc]
    """The bold first line of a section."""

    def __init__(self, text: str) -> None:
        super().__init__(value=text)
        font = self.native.font()
        font.setBold(True)
        self.native.setFont(font)


class _Page(QWidget):  # type: ignore[misc]
    """Tells when it is shown, hidden and resized, and when it leaves its window."""

    shown, hidden, resized, left = Signal(object), Signal(), Signal(), Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.hint: Callable[[QSize], QSize] = lambda size: size
        self.least: Callable[[QSize], QSize] = lambda size: size

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size of the layout, as `hint` changes it."""
        return self.hint(super().sizeHint())

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the least size of the layout, as `least` changes it."""
        return self.least(super().minimumSizeHint())

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Tell of it."""
        super().showEvent(event)
        self.shown.emit(event)

    def hideEvent(self, event: Any) -> None:  # noqa: N802
        """Tell of it."""
        super().hideEvent(event)
        self.hidden.emit()

    def resizeEvent(self, event: Any) -> None:  # noqa: N802
        """Tell of it."""
        super().resizeEvent(event)
        self.resized.emit()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Tell when it is closed, which takes it out of the window."""
        super().changeEvent(event)
        if event.type() == QEvent.ParentChange and self.parent() is None:
            self.left.emit()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Use the size that napari's style gives to a label for trees, tables and boxes, too."""
        if event.type() in (QEvent.FontChange, QEvent.Polish):
            size, font = watched.font().pointSizeF(), self.font()
            if font.pointSizeF() != size:
                font.setPointSizeF(size)
                self.setFont(font)
        return bool(super().eventFilter(watched, event))


class _PageBackend(QtContainer):  # type: ignore[misc]
    def __init__(self, parent: QWidget | None = None, **_: Any) -> None:
        QBaseWidget.__init__(self, _Page, parent)
        self._layout = QVBoxLayout(self._qwidget)


class Panel(Container):  # type: ignore[misc]
    """A column of magicgui widgets that knows whether it is looked at.

    Parameters
    ----------
    *widgets : Widget
        From top to bottom.
    margin : int
        Pixels around them.
    """

    def __init__(self, *widgets: Widget, margin: int = 0) -> None:
        super(Container, self).__init__(widget_type=_PageBackend, widgets=widgets, labels=False)
        self.margins = (margin,) * 4
        page = self.native
        page.shown.connect(self.on_shown)
        page.hidden.connect(self.on_hidden)
        page.resized.connect(self.on_resized)

    def stretch(self, widget: Widget | None = None) -> None:
        """Give the height that is left to a widget, or leave it empty below what there is."""
        if widget is None:
            self.native.layout().addStretch()
        else:
            self.native.layout().setStretchFactor(widget.native, 1)

    def on_shown(self, event: Any) -> None:
        """Do what is needed now that somebody looks."""

    def on_hidden(self) -> None:
        """Do no more, since nobody looks."""

    def on_resized(self) -> None:
        """Fit the new size."""


def button(text: str, tip: str, react: Callable[[], object], name: str = "") -> PushButton:
    """Return a button; it may be narrower than its text, and calls `react` when clicked."""
    made = PushButton(text=text, tooltip=tip)
    made.native.setAccessibleName(name or text)
    # Not by `changed`, which would wrap the one sentence of an error in several lines.
    made.native.clicked.connect(lambda: react())
    return made


def choice(label: str, tip: str, choices: Sequence[tuple[str, Any]] = ()) -> ComboBox:
    """Return a combo box that is no wider than a narrow dock."""
    made = ComboBox(label=label, tooltip=tip, choices=choices)
    box: QComboBox = made.native
    box.setAccessibleName(label)
    box.setSizeAdjustPolicy(QComboBox.AdjustToMinimumContentsLengthWithIcon)
    box.setMinimumContentsLength(LEAST)
    return made


def offer(made: ComboBox, offered: Sequence[tuple[str, Any]]) -> None:
    """Offer other choices; the chosen one stays if it is among them, perhaps by another name."""
    box: QComboBox = made.native
    names = [box.itemText(index) for index in range(box.count())]
    if list(zip(names, made.choices, strict=True)) == list(offered):
        return
    chosen = made.value
    with made.changed.blocked():
        made.choices = ()  # or those that stay come first
        made.choices = lambda _: offered  # a list would be forgotten with the next parent
        if any(value == chosen for _, value in offered):
            made.value = chosen
    rows = box.view()
    # Its list shows whole names, however narrow the dock is.
    bar = rows.verticalScrollBar().sizeHint().width()
    rows.setMinimumWidth(rows.sizeHintForColumn(0) + bar)


def row(*widgets: Widget, narrow: bool = False, spacing: int = SPACING) -> Container:
    """Return widgets side by side; `narrow` ones share the width, whatever their texts need."""
    made = Container(widgets=widgets, layout="horizontal", labels=False)
    made.margins = (0, 0, 0, 0)
    made.native.layout().setSpacing(spacing)
    made.native.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Maximum)
    for each in widgets if narrow else ():
        each.native.setSizePolicy(QSizePolicy.Ignored, QSizePolicy.Fixed)
    return made


def flow(*widgets: Widget) -> Hosted[QWidget]:
    """Return widgets side by side, in as many rows as they need."""
    made = Hosted(QWidget())
    made.native.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Maximum)
    layout = QFlowLayout(made.native)
    layout.setContentsMargins(0, 0, 0, 0)
    layout.setHorizontalSpacing(SPACING)
    layout.setVerticalSpacing(SPACING)
    for each in widgets:
        layout.addWidget(each.native)
    return made


class Form(Hosted[QWidget]):
    """A named row for each widget; the name is above it where both are too wide.

    Parameters
    ----------
    widgets : Mapping of str to Widget
        By the names of the rows.
    """

    def __init__(self, widgets: Mapping[str, Widget]) -> None:
        super().__init__(QWidget())
        self._layout = QFormLayout(self.native)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setRowWrapPolicy(QFormLayout.WrapLongRows)
        self._layout.setLabelAlignment(Qt.AlignLeft)
        self._layout.setFieldGrowthPolicy(QFormLayout.AllNonFixedFieldsGrow)
        self.widgets = widgets
        for name, widget in widgets.items():
            label = QLabel(name)
            label.setToolTip(widget.tooltip)
            self._layout.addRow(label, widget.native)

    def show_row(self, widget: Widget, shown: bool) -> None:
        """Show or hide a widget with its name."""
        widget.visible = shown
        self._layout.labelForField(widget.native).setVisible(shown)

    def say(self, texts: Mapping[str, str]) -> None:
        """Show other texts; rows without one are hidden."""
        for name, widget in self.widgets.items():
            text = texts.get(name, "")
            if text != widget.value or not text:
                widget.value = text
                widget.native.setAccessibleName(f"{name}: {text}")
                self.show_row(widget, bool(text))


class _Column(QScrollArea):  # type: ignore[misc]
    """A column that is scrolled up and down where the window is too low, but never sideways."""

    def __init__(self, widget: QWidget) -> None:
        super().__init__()
        self.setWidget(widget)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarAlwaysOff)

    def event(self, event: QEvent) -> bool:
        """Ask for another width when the widget does."""
        if event.type() == QEvent.LayoutRequest:
            self.updateGeometry()
        return bool(super().event(event))

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the widget's least width with the scroll bar, and any height."""
        bar = self.verticalScrollBar().sizeHint().width()
        height = super().minimumSizeHint().height()
        return QSize(self.widget().minimumSizeHint().width() + bar, height)


class Scrolled(Hosted[QScrollArea]):
    """A container at its own width, scrolled up and down where there is little height."""

    def __init__(self, inner: Container) -> None:
        super().__init__(_Column(inner.native))
        self.inner = inner


class _Tabs(QTabWidget):  # type: ignore[misc]
    """Takes the height that is left: its pages are scrolled, and not the column that it is in."""

    def sizeHint(self) -> QSize:  # noqa: N802
        """Ask for no more than the pages need, whatever they would like."""
        return self.minimumSizeHint()

    def hasHeightForWidth(self) -> bool:  # noqa: N802
        """Ask for no more height where texts are broken."""
        return False


class Pages(Hosted[QTabWidget]):
    """Containers behind tabs.

    Parameters
    ----------
    pages : Mapping of str to (Widget, str)
        Each page and its tooltip, by the text of its tab.
    """

    def __init__(self, pages: Mapping[str, tuple[Widget, str]]) -> None:
        super().__init__(_Tabs())
        self._pages = [page for page, _ in pages.values()]
        for title, (page, tip) in pages.items():
            is_scrolled = isinstance(page, Scrolled)
            index = self.native.addTab(page.native if is_scrolled else _Column(page.native), title)
            self.native.setTabToolTip(index, tip)

    def open(self, page: Widget) -> None:
        """Bring a page to the front."""
        self.native.setCurrentIndex(self._pages.index(page))
