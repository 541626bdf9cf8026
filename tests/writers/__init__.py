"""Files that tests write."""
