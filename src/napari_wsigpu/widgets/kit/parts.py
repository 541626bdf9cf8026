"""Building blocks of docks: magicgui widgets for columns of at least 272 pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from magicgui.backends._qtpy.widgets import Container as QtContainer
from magicgui.backends._qtpy.widgets import QBaseWidget
from magicgui.widgets import ComboBox, Container, Label, PushButton, Widget
from qtpy.QtCore import QEvent, QObject, QSize, Qt, Signal
from qtpy.QtWidgets import (
    QComboBox,
    QDockWidget,
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

    from qtpy.QtGui import QHideEvent, QKeyEvent, QResizeEvent, QShowEvent

W = TypeVar("W", bound=QWidget)

LEAST = 8  # characters of a combo box
SPACING = 6  # pixels
PAGE_MARGIN = 9  # pixels around the pages behind tabs


class _Host(QBaseWidget):  # type: ignore[misc]
    """magicgui backend for an existing Qt widget."""

    def __init__(self, widget: QWidget, parent: QWidget | None = None) -> None:
        super().__init__(lambda parent: widget, parent)
        widget.setObjectName("")


class Hosted(Widget, Generic[W]):  # type: ignore[misc]
    """A Qt widget as a magicgui widget.

    Parameters
    ----------
    widget : QWidget
        The widget, which becomes `native`.
    name, tip : str
        Accessible name and tooltip.
    """

    native: W

    def __init__(self, widget: W, name: str = "", tip: str = "") -> None:
        super().__init__(
            widget_type=_Host, tooltip=tip or widget.toolTip(), backend_kwargs={"widget": widget}
        )
        if name:
            widget.setAccessibleName(name)


class Text(Label):  # type: ignore[misc]
    """A label that wraps its text."""

    def __init__(self, name: str = "", text: str = "", *, rich: bool = False) -> None:
        super().__init__(value=text)
        label: QLabel = self.native
        label.setWordWrap(True)
        label.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Maximum)
        label.setTextFormat(Qt.RichText if rich else Qt.PlainText)
        label.setTextInteractionFlags(Qt.TextSelectableByMouse)
        label.setAccessibleName(name)

    def say(self, text: str) -> None:
        """Set the text; an empty string hides the label."""
        if self.native.text() != text:
            self.native.setText(text)
        self.visible = bool(text)

    def reserve(self, lines: int) -> None:
        """Keep room for a number of lines, also without text, so that nothing else moves."""
        label: QLabel = self.native
        retain_size(self, kept=bool(lines))
        label.setMinimumHeight(lines * label.fontMetrics().lineSpacing())

    def keep_room(self) -> None:
        """Reserve the height of all lines at the current width; layouts do not."""
        label: QLabel = self.native
        label.setMinimumHeight(0)  # otherwise heightForWidth returns at least the old minimum
        label.setMinimumHeight(max(label.heightForWidth(label.width()), 0))


def retain_size(widget: Widget, *, kept: bool = True) -> None:
    """Keep the room of a widget while it is hidden, so that nothing else moves."""
    policy = widget.native.sizePolicy()
    policy.setRetainSizeWhenHidden(kept)
    widget.native.setSizePolicy(policy)


class Title(Hosted[QElidingLabel]):
    """A bold line, elided in the middle."""

    def __init__(self) -> None:
        super().__init__(QElidingLabel())
        self.native.setElideMode(Qt.ElideMiddle)
        font = self.native.font()
        font.setBold(True)
        self.native.setFont(font)

    def say(self, text: str, tip: str = "") -> None:
        """Set the text and the tooltip."""
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
    """Widget that signals when it is shown, hidden, resized, docked or removed from its window."""

    shown, hidden, resized = Signal(bool), Signal(), Signal()
    docked, left = Signal(), Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.hint: Callable[[QSize], QSize] = lambda size: size
        self.least: Callable[[QSize], QSize] = lambda size: size

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the layout's preferred size, changed by `hint`."""
        return self.hint(super().sizeHint())

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the layout's minimum size, changed by `least`."""
        return self.least(super().minimumSizeHint())

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Emit `shown`."""
        super().showEvent(event)
        self.shown.emit(event.spontaneous())

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Emit `hidden`."""
        super().hideEvent(event)
        self.hidden.emit()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Emit `resized`."""
        super().resizeEvent(event)
        self.resized.emit()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Emit `docked` when a dock becomes the parent, and `left` when the dock is closed."""
        super().changeEvent(event)
        if event.type() == QEvent.ParentChange:
            if self.parent() is None:
                self.left.emit()
            elif isinstance(self.parent(), QDockWidget):
                self.docked.emit()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Give trees, tables and boxes the font size that napari's style gives to labels."""
        if event.type() in (QEvent.FontChange, QEvent.Polish):
            size, font = watched.font().pointSizeF(), self.font()
            if font.pointSizeF() != size:
                font.setPointSizeF(size)
                self.setFont(font)
        return bool(super().eventFilter(watched, event))


class _PageBackend(QtContainer):  # type: ignore[misc]
    def __init__(self, parent: QWidget | None = None, **_: object) -> None:
        QBaseWidget.__init__(self, _Page, parent)
        self._layout = QVBoxLayout(self._qwidget)


class Panel(Container):  # type: ignore[misc]
    """A column of magicgui widgets that is notified when it is shown or hidden.

    Parameters
    ----------
    *widgets : Widget
        The widgets, from top to bottom.
    margin : int
        Space around them in pixels.
    """

    def __init__(self, *widgets: Widget, margin: int = 0) -> None:
        super(Container, self).__init__(widget_type=_PageBackend, widgets=widgets, labels=False)
        self.margins = (margin,) * 4
        page = self.native
        page.shown.connect(self.on_shown)
        page.hidden.connect(self.on_hidden)
        page.resized.connect(self.on_resized)

    def stretch(self, widget: Widget | None = None) -> None:
        """Give spare height to a widget, or to empty space at the bottom."""
        if widget is None:
            self.native.layout().addStretch()
        else:
            self.native.layout().setStretchFactor(widget.native, 1)

    def on_shown(self, spontaneous: bool = False) -> None:
        """React when the panel becomes visible; `spontaneous` if its window was restored."""

    def on_hidden(self) -> None:
        """React when the panel is hidden."""

    def on_resized(self) -> None:
        """React when the panel is resized."""


def button(text: str, tip: str, react: Callable[[], object], name: str = "") -> PushButton:
    """Return a button that calls `react`; `name` is its accessible name, by default the text."""
    widget = PushButton(text=text, tooltip=tip)
    widget.native.setAccessibleName(name or text)
    widget.native.setFocusPolicy(Qt.TabFocus)  # after a click, keys still go to the canvas
    # The signal `changed` would wrap an exception in another one with a long message.
    widget.native.clicked.connect(lambda: react())
    return widget


class _NoWheel(QObject):  # type: ignore[misc]
    """Event filter that leaves the wheel to the column, whose scrolling would change choices."""

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Pass the wheel on to the parent widget."""
        if event.type() == QEvent.Wheel:
            event.ignore()
            return True
        return False


def choice(label: str, tip: str, choices: Sequence[tuple[str, object]] = ()) -> ComboBox:
    """Return a combo box that fits into a narrow dock."""
    combo = ComboBox(label=label, tooltip=tip, choices=choices)
    box: QComboBox = combo.native
    box.setAccessibleName(label)
    box.setSizeAdjustPolicy(QComboBox.AdjustToMinimumContentsLengthWithIcon)
    box.setMinimumContentsLength(LEAST)
    box.installEventFilter(_NoWheel(box))
    return combo


def offer(combo: ComboBox, offered: Sequence[tuple[str, object]]) -> None:
    """Replace the choices; keep the current value if it is among them, even if renamed."""
    box: QComboBox = combo.native
    names = [box.itemText(index) for index in range(box.count())]
    if list(zip(names, combo.choices, strict=True)) == list(offered):
        return
    chosen = combo.value
    with combo.changed.blocked():
        combo.choices = ()  # otherwise old choices would keep their positions
        combo.choices = lambda _: offered  # magicgui drops a list when the parent changes
        if any(value == chosen for _, value in offered):
            combo.value = chosen
    rows = box.view()
    # Let the popup be wider than the box, so that it shows whole names.
    bar = rows.verticalScrollBar().sizeHint().width()
    rows.setMinimumWidth(rows.sizeHintForColumn(0) + bar)


def row(*widgets: Widget, narrow: bool = False, spacing: int = SPACING) -> Container:
    """Return a row of widgets; `narrow` ones share the width equally, whatever their labels."""
    widget = Container(widgets=widgets, layout="horizontal", labels=False)
    widget.margins = (0, 0, 0, 0)
    widget.native.layout().setSpacing(spacing)
    widget.native.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Maximum)
    for each in widgets if narrow else ():
        each.native.setSizePolicy(QSizePolicy.Ignored, QSizePolicy.Fixed)
    return widget


# Many buttons leave little room for what is below them.
SLIM = "QPushButton { padding: 1px 4px; }"


def flow(*widgets: Widget) -> Hosted[QWidget]:
    """Return a container that lays out widgets side by side, in as many rows as they need."""
    widget = Hosted(QWidget())
    widget.native.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Maximum)
    widget.native.setStyleSheet(SLIM)
    layout = QFlowLayout(widget.native)
    layout.setContentsMargins(0, 0, 0, 0)
    layout.setHorizontalSpacing(SPACING)
    layout.setVerticalSpacing(SPACING - 2)
    for each in widgets:
        layout.addWidget(each.native)
    return widget


class Form(Hosted[QWidget]):
    """A form with one named row per widget; long names are placed above their widgets.

    Parameters
    ----------
    widgets : Mapping of str to Widget
        Widgets by the names of their rows.
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
        """Set the text of each row; hide the rows whose text is empty."""
        for name, widget in self.widgets.items():
            text = texts.get(name, "")
            if text != widget.value or not text:
                widget.value = text
                widget.native.setAccessibleName(f"{name}: {text}")
                self.show_row(widget, bool(text))


class LeavesSlideKeys:
    """Mixin that leaves Ctrl+Left and Ctrl+Right, which show another slide, to napari.

    Scrolling widgets of Qt would treat them like arrow keys.
    """

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Pass the keys on to the parent widget."""
        if event.key() in (Qt.Key_Left, Qt.Key_Right) and event.modifiers() & Qt.ControlModifier:
            event.ignore()
        else:
            super().keyPressEvent(event)  # type: ignore[misc]


class Column(LeavesSlideKeys, QScrollArea):  # type: ignore[misc]
    """A column that scrolls vertically but never sideways.

    With `has_room`, it reserves space for the scroll bar.
    """

    def __init__(self, widget: QWidget, *, has_room: bool = True) -> None:
        super().__init__()
        self._has_room = has_room
        self.setWidget(widget)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarAlwaysOff)

    def event(self, event: QEvent) -> bool:
        """Update the minimum width when the widget's minimum width changes."""
        if event.type() == QEvent.LayoutRequest:
            self.updateGeometry()
        return bool(super().event(event))

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the widget's minimum width plus the scroll bar, and a small height."""
        bar = self.verticalScrollBar().sizeHint().width() if self._has_room else 0
        height = super().minimumSizeHint().height()
        return QSize(self.widget().minimumSizeHint().width() + bar, height)


class Scrolled(Hosted[QScrollArea]):
    """A container that scrolls vertically if the dock is too short."""

    def __init__(self, inner: Container) -> None:
        super().__init__(Column(inner.native))
        self.inner = inner


class _Tabs(QTabWidget):  # type: ignore[misc]
    """Tabs that take the spare height: their pages scroll, not the column around them."""

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the minimum size, as pages can scroll."""
        return self.minimumSizeHint()

    def hasHeightForWidth(self) -> bool:  # noqa: N802
        """Return False: wrapping text does not make the tabs taller."""
        return False


class Pages(Hosted[QTabWidget]):
    """Containers behind tabs.

    Parameters
    ----------
    pages : Mapping of str to (Widget, str)
        Page and tooltip by the title of the tab.
    """

    def __init__(self, pages: Mapping[str, tuple[Widget, str]]) -> None:
        super().__init__(_Tabs())
        self._pages = [page for page, _ in pages.values()]
        for title, (page, tip) in pages.items():
            is_scrolled = isinstance(page, Scrolled)
            index = self.native.addTab(page.native if is_scrolled else Column(page.native), title)
            self.native.setTabToolTip(index, tip)

    def open(self, page: Widget) -> None:
        """Bring a page to the front."""
        self.native.setCurrentIndex(self._pages.index(page))
