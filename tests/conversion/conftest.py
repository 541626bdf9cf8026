"""Conversions in tests don't wait for the disk."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
