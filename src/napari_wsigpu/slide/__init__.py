"""Open slides: opening, reading, planes, associated images, and the shared runtime."""
