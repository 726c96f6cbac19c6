"""INT8 and float8 by Q/DQ nodes in the ONNX file, calibrated on real samples, with sensitive layers left in float.

One file serves OpenVINO, ONNX Runtime and TensorRT. Existing tools that were tried before writing our own:

- ``onnxruntime.quantization`` 1.31: its "entropy" is min-max, since it compares only one candidate. Its ranges keep
  every output of every batch in memory. Its quantized biases do not parse in TensorRT.
- NNCF 3.4 with the preset PERFORMANCE writes a file for OpenVINO and TensorRT. One attempt is as good as ours. But
  it has no calibration by KL divergence, and it reads all samples again for every attempt. Here they are read once,
  and each attempt writes one more file from the same histograms.
- NVIDIA's ModelOpt 0.47 needs onnx 1.21 and onnxruntime 1.24, which are older than the versions used here, so it
  needs its own environment. The files for the digits that it wrote there (``dq_only``, max and entropy) parse in
  OpenVINO and TensorRT for RTX, with a cosine of 0.99997 and 0.255 of the size of fp32. Ours has 0.99996 and 0.252.
  Its "entropy" is that of ``onnxruntime.quantization``, with 128 bins for 128 levels. It was not tried on Transformers.
- torchao 0.18, which has taken over ``torch.ao.quantization`` and installs without CUDA, trains with rounding, too. Its
  ``QATConfig`` knows linear layers and embeddings, and its ``prepare_qat_pt2e`` chooses the roundings and the scales by
  a quantizer of its own. Training here has to round as the file does, so ``finetune`` takes layers and scales from
  ``scheme`` and ``search``, and torch's ``fake_quantize`` operators.

``scheme`` finds the layers to quantize, ``smoothing`` prepares them, ``observe`` and ``ranges`` find their ranges,
``qdq`` writes the file, ``search`` finds the calibration and the layers to leave in float, and ``finetune`` trains with
the rounding of a file.
"""
