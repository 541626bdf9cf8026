"""Slides on servers: requests, what may be asked again, and blocks kept on disk."""
