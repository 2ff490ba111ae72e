"""Lowered proxies: frozen proxies whose sites compute with torch's integer kernels, for inference."""
