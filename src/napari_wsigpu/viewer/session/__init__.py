"""Management of a viewer from its first slide until its window closes."""
