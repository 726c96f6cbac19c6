"""A backend of Triton in Python, in place of the C++ backends ``onnxruntime`` and ``openvino``, which the wheel lacks.

ONNX Runtime runs the file that the model's configuration names. Triton does the rest, as with any backend.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        file = Path(args["model_repository"]) / args["model_version"] / config["default_model_filename"]
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(file, options, ["CPUExecutionProvider"])
        self.outputs = [output["name"] for output in config["output"]]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        inputs = {tensor.name(): texts(tensor.as_numpy()) for tensor in request.inputs()}
        answers = self.session.run(self.outputs, inputs)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, encoded(answer)) for name, answer in zip(self.outputs, answers, strict=True)]
        )


def texts(array):
    """ONNX Runtime takes strings as ``str``, Triton gives ``bytes``."""
    if array.dtype != np.object_:
        return array
    return np.array([item.decode() for item in array.flat], np.object_).reshape(array.shape)


def encoded(array):
    if array.dtype != np.object_:
        return np.ascontiguousarray(array)
    return np.array([str(item).encode() for item in array.flat], np.object_).reshape(array.shape)
