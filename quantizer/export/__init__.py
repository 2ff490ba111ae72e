"""Export to Q/DQ ONNX, the passes over its graph, and reading of such files: those of ours and of others."""
