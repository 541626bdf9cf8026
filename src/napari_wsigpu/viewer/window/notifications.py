"""Notifications that name this plugin as their source."""

from __future__ import annotations

from napari.utils.notifications import Notification, notification_manager

from napari_wsigpu.viewer.window.settings import PLUGIN


class _Notification(Notification):  # type: ignore[misc]
    """A notification with a readable source; by default napari shows the repr of an object."""

    @property
    def source(self) -> str:
        """Package name of this plugin."""
        return PLUGIN


def show_info(message: str) -> None:
    """Show a message, which napari also keeps in its list."""
    notification_manager.dispatch(_Notification(message, "info"))


def show_warning(message: str) -> None:
    """Show a warning."""
    notification_manager.dispatch(_Notification(message, "warning"))


def show_error(message: str) -> None:
    """Show an error."""
    notification_manager.dispatch(_Notification(message, "error"))
