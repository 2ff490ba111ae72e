"""The runs of a sweep: what they have in common is made once, and one that fails leaves the others."""
