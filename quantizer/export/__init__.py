"""Export to Q/DQ ONNX files, graph passes, and import of ONNX files."""
