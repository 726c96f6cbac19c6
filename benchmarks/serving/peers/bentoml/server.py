"""An ONNX file behind BentoML: a service with an API that it may batch, as its guide to adaptive batching shows."""

import os

import bentoml
import numpy as np
import onnxruntime as ort

MAX_BATCH_SIZE = int(os.environ["MAX_BATCH_SIZE"])
BATCHING = {"batchable": True, "max_batch_size": MAX_BATCH_SIZE} if MAX_BATCH_SIZE > 1 else {}


@bentoml.service(workers=1)
class Onnx:
    def __init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(os.environ["MODEL_FILE"], options, ["CPUExecutionProvider"])
        kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
        self.dtypes = {input_.name: kinds[input_.type] for input_ in self.session.get_inputs()}

    @bentoml.api(**BATCHING)
    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """A batchable API takes one argument: several inputs are stacked along a second axis."""
        parts = [inputs] if len(self.dtypes) == 1 else np.moveaxis(inputs, 1, 0)
        given = {
            name: np.ascontiguousarray(part, dtype)
            for (name, dtype), part in zip(self.dtypes.items(), parts, strict=True)
        }
        return self.session.run(None, given)[0]


if __name__ == "__main__":
    address = ["--host", "127.0.0.1", "--port", os.environ["PORT"]]
    os.execvp("bentoml", ["bentoml", "serve", "server:Onnx", *address])
