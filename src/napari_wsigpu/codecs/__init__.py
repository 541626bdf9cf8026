"""How encoded bytes become pixels."""
