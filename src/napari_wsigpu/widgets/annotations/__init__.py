"""The "Annotate" dock."""
