"""Runs in several processes, which ``torchrun`` starts: their group, and what the first of them tells the others."""
