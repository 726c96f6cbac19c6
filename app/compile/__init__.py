"""Export weights to ONNX and compare them with PyTorch on real samples: fp32 is equal, other precisions pass gates."""
