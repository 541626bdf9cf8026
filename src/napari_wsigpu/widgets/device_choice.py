"""Where a slide is decoded, to be chosen: automatically, on the GPU, or on the CPU."""

from __future__ import annotations

from qtpy.QtCore import Signal
from qtpy.QtWidgets import QButtonGroup, QHBoxLayout, QLabel, QRadioButton, QWidget

from napari_wsigpu.slide.runtime import default

AUTO, GPU, CPU = "auto", "cuda", "cpu"
CHOICES = {
    AUTO: ("Auto", "Decode on whatever is measured to be faster"),
    GPU: ("GPU", "Decode on the GPU what it can decode"),
    CPU: ("CPU", "Decode on the CPU"),
}


class DeviceChoice(QWidget):  # type: ignore[misc]
    """Three buttons, of which one is chosen.

    Attributes
    ----------
    chosen : Signal(str)
        The device that the user has chosen, as `Slide.device` names it.
    buttons : dict of str to QRadioButton
        By device.
    """

    chosen = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        self._gpu = GPU
        self.buttons: dict[str, QRadioButton] = {}
        group = QButtonGroup(self)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        label = QLabel("Decode on")
        label.setWordWrap(True)
        layout.addWidget(label)
        for device, (text, explanation) in CHOICES.items():
            button = self.buttons[device] = QRadioButton(text)
            button.setAccessibleName(f"Decode on: {text}")
            button.setToolTip(explanation)
            group.addButton(button)
            layout.addWidget(button)
        layout.addStretch()
        group.buttonClicked.connect(self._emit)
        against = default().devices.refusal()
        if against is not None:
            self.refuse_gpu(f"{against[0].upper()}{against[1:]}.")

    def show_device(self, device: str) -> None:
        """Show where a slide is decoded."""
        on_gpu = device not in (AUTO, CPU)
        self._gpu = device if on_gpu else GPU
        self.buttons[GPU if on_gpu else device].setChecked(True)

    def refuse_gpu(self, reason: str) -> None:
        """Let the GPU not be chosen, and say why."""
        button = self.buttons[GPU]
        button.setEnabled(False)
        button.setToolTip(reason)
        button.setAccessibleDescription(reason)

    def _emit(self, button: QRadioButton) -> None:
        [device] = [device for device, other in self.buttons.items() if other is button]
        self.chosen.emit(self._gpu if device == GPU else device)
