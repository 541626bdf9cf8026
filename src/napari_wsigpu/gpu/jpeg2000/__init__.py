"""JPEG 2000 on a device: from the packet headers of code streams to pixels."""
