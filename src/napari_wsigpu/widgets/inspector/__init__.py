"""The "Inspector" dock and its pages."""
