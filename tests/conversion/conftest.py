"""Skip fsync in conversion tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def skip_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
