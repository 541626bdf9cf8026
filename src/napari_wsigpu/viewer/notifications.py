"""Notifications of this plugin, which name it as their source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari.utils.notifications import Notification, notification_manager

from napari_wsigpu.viewer.settings import PLUGIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Notification(Notification):  # type: ignore[misc]
    """Of others napari shows the notification manager as the source: an object at an address."""

    @property
    def source(self) -> str:
        """Who says it, as it is called in napari's menus."""
        return PLUGIN


def show_info(message: str, actions: Sequence[tuple[str, Callable[[object], None]]] = ()) -> None:
    """Tell the user something, with a button for each action; napari keeps all that was told."""
    notification_manager.dispatch(_Notification(message, "info", actions=actions))


def show_warning(message: str) -> None:
    """Tell the user what is not as it should be."""
    notification_manager.dispatch(_Notification(message, "warning"))


def show_error(message: str) -> None:
    """Tell the user what has failed."""
    notification_manager.dispatch(_Notification(message, "error"))
