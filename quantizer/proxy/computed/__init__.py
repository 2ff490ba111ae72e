"""Weights that a model computes from its parameters at each call, as data."""
