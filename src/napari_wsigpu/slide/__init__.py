"""A slide as its user holds it, and what slides share."""
