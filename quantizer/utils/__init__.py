"""General helpers: registries, decoding of plain values, checksums, out-of-memory errors, distributed communication."""
