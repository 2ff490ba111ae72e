"""Import of ONNX files as ``torch.fx`` graphs of aten operators, independent of the engine that lowers them."""
