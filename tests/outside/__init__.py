"""transformers' own common tests over our classes; they come from its source distribution and are never committed."""
