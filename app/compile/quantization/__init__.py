"""INT8 and float8 by Q/DQ nodes in the ONNX file, calibrated on real samples, with what hurts left in float.

One file is for OpenVINO, ONNX Runtime and TensorRT. What was looked at in place of code of our own:

- ``onnxruntime.quantization`` 1.31: its "entropy" is min-max, since it compares one candidate alone; its ranges keep
  every output of every batch in memory; its quantised biases do not parse in TensorRT.
- NNCF 3.4 with the preset PERFORMANCE writes a file that OpenVINO and TensorRT take, as good as ours in one try. But it
  has no calibration by KL divergence, and it reads all samples anew for every try: here they are read once, and each
  calibration and each set of layers in float is one more file written from the same histograms.
- NVIDIA's ModelOpt 0.47 wants onnx 1.21 and onnxruntime 1.24, older than what exports, judges and serves here, and so
  an environment of its own. The files of the digits that it wrote there (``dq_only``, max and entropy) parse in
  OpenVINO and TensorRT for RTX, with a cosine of 0.99997 and 0.255 of fp32's size; ours has 0.99996 and 0.252. Its
  "entropy" is that of ``onnxruntime.quantization``, with 128 bins for 128 levels. It was not tried on Transformers.

``scheme`` says what is quantised, ``smoothing`` prepares it, ``observe`` and ``ranges`` find its ranges, ``qdq`` writes
the file, and ``search`` finds the calibration and, by ``sensitivity``, the layers to leave in float.
"""
