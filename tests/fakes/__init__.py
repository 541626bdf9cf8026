"""What stands in for devices, libraries and servers."""
