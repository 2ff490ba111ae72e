"""Helpers that do not depend on quantization: batches, registries, records, checksums, processes, files."""
