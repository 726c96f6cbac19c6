"""An ONNX file behind Triton's Python backend, as its README shows."""

import json
import os

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(os.environ["MODEL_FILE"], options, ["CPUExecutionProvider"])
        self.inputs = [load["name"] for load in json.loads(args["model_config"])["input"]]
        self.output = self.session.get_outputs()[0].name

    def execute(self, requests):
        rows = [
            {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
            for request in requests
        ]
        together = {name: np.concatenate([row[name] for row in rows]) for name in self.inputs}
        answers = self.session.run(None, together)[0]
        ends = np.cumsum([len(row[self.inputs[0]]) for row in rows])[:-1]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(self.output, np.ascontiguousarray(part))])
            for part in np.split(answers, ends)
        ]
