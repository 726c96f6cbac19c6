"""From weights to ONNX, compared with PyTorch on real samples: fp32 is equal, the rest within gates."""
