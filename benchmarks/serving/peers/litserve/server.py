"""An ONNX file behind LitServe, with the hooks that its README shows."""

import os

import litserve as ls
import numpy as np
import onnxruntime as ort


class OnnxApi(ls.LitAPI):
    def setup(self, device):
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(os.environ["MODEL_FILE"], options, ["CPUExecutionProvider"])
        kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
        self.dtypes = {input_.name: kinds[input_.type] for input_ in self.session.get_inputs()}

    def decode_request(self, request):
        return {name: np.asarray([request[name]], dtype) for name, dtype in self.dtypes.items()}

    def batch(self, inputs):
        return {name: np.concatenate([input_[name] for input_ in inputs]) for name in self.dtypes}

    def predict(self, inputs):
        return self.session.run(None, inputs)[0]

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"output": output.ravel().tolist()}


if __name__ == "__main__":
    api = OnnxApi(max_batch_size=int(os.environ["MAX_BATCH_SIZE"]), batch_timeout=int(os.environ["MAX_WAIT_US"]) / 1e6)
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=int(os.environ["PORT"]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
