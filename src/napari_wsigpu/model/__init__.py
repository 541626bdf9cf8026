"""What a slide is, without its bytes."""
