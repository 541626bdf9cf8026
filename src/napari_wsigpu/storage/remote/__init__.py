"""Slides on servers: requests with retries, and blocks cached in memory and on disk."""
