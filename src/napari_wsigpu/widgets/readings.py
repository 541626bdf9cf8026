"""Named values that change while one looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtpy.QtCore import Qt
from qtpy.QtWidgets import QFormLayout, QLabel, QWidget

if TYPE_CHECKING:
    from collections.abc import Mapping


class Readings(QWidget):  # type: ignore[misc]
    """A row for each name; those without a value are hidden.

    Parameters
    ----------
    names : Mapping of str to str
        Names of the rows, and what each means.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.values: dict[str, QLabel] = {}
        self._names: dict[str, QLabel] = {}
        layout = QFormLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setRowWrapPolicy(QFormLayout.WrapLongRows)
        layout.setLabelAlignment(Qt.AlignLeft)
        layout.setFieldGrowthPolicy(QFormLayout.AllNonFixedFieldsGrow)
        for name, meaning in names.items():
            label = self._names[name] = QLabel(name)
            value = self.values[name] = QLabel()
            label.setToolTip(meaning)
            value.setToolTip(meaning)
            value.setTextInteractionFlags(Qt.TextSelectableByMouse)
            layout.addRow(label, value)
            label.hide()
            value.hide()

    def show_values(self, values: Mapping[str, str]) -> None:
        """Show other values."""
        for name, label in self.values.items():
            text = values.get(name, "")
            if text == label.text():
                continue
            label.setText(text)
            label.setAccessibleName(f"{name}: {text}")
            label.setVisible(bool(text))
            self._names[name].setVisible(bool(text))
