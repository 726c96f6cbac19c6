"""TensorRT and TensorRT for RTX: plans built from ONNX files, and run on a GPU."""
