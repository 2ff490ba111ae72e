"""Helpers without a domain: registries, plain values out of files, checksums, memory errors, ranks of a run."""
