"""Damaged slides: what is opened of them, and what is said of the rest."""
