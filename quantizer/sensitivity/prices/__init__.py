"""Times of groups in low precision and in float, and plans that are fast enough."""
