"""From weights to ONNX, proven equal to PyTorch on real samples."""
