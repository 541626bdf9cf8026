"""JPEG 2000 on a device: batches of code streams of one form, from packet headers to pixels."""
