"""Checkpoints: where they come from, what their configs say, and the heads that they have."""
