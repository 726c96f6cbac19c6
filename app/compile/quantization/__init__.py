"""INT8 and float8 by Q/DQ nodes in the ONNX file, calibrated on real samples, with what hurts left in float.

One file is for OpenVINO, ONNX Runtime and TensorRT. What was looked at before any of this was written:

- ``onnxruntime.quantization`` 1.31: its "entropy" is min-max, since it compares one candidate alone; its ranges keep
  every output of every batch in memory; its quantised biases do not parse in TensorRT.
- NNCF 3.4 with the preset PERFORMANCE writes a file that OpenVINO and TensorRT take, as good as ours in one try. But it
  has no calibration by KL divergence, and it reads all samples anew for every try: here they are read once, and each
  calibration and each set of layers in float is one more file written from the same histograms.

``scheme`` says what is quantised, ``smoothing`` prepares it, ``observe`` and ``ranges`` find its ranges, ``qdq`` writes
the file, and ``search`` finds the calibration and, by ``sensitivity``, the layers to leave in float.
"""
