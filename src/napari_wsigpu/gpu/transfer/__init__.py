"""Bytes between files, host and device, and tiles kept on the device."""
