"""ONNX files as ``torch.fx`` graphs of aten operators. Independent of how an engine lowers them."""
