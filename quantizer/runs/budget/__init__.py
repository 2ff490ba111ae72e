"""A budget of accuracy: what rows can tell of it, and an engine that meets it."""
