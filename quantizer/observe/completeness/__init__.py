"""Counts of every product that a pass computes, in sites or not, with the call that made it."""
