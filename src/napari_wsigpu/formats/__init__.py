"""What slide files say: pure description, no pixels."""
