"""Faces of other libraries, for code that moves to this one."""
