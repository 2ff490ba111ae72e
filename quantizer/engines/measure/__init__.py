"""Latency and peak memory of engines."""
