"""An ONNX file behind MLServer: a custom runtime, as its guide shows."""

import os

import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxRuntime(MLModel):
    async def load(self) -> bool:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(os.environ["MODEL_FILE"], options, ["CPUExecutionProvider"])
        self._output = self._session.get_outputs()[0].name
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = {input_.name: NumpyCodec.decode_input(input_) for input_ in payload.inputs}
        answer = self._session.run(None, given)[0]
        return InferenceResponse(
            model_name=self.name, model_version=self.version, outputs=[NumpyCodec.encode_output(self._output, answer)]
        )


if __name__ == "__main__":
    os.environ |= {
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_HTTP_PORT": os.environ["PORT"],
        "MLSERVER_GRPC_PORT": "0",
        "MLSERVER_METRICS_PORT": "0",
        "MLSERVER_PARALLEL_WORKERS": "0",  # its guide: for light models, inference in the server's own process
    }
    if (size := int(os.environ["MAX_BATCH_SIZE"])) > 1:
        os.environ["MLSERVER_MODEL_MAX_BATCH_SIZE"] = str(size)
        os.environ["MLSERVER_MODEL_MAX_BATCH_TIME"] = str(int(os.environ["MAX_WAIT_US"]) / 1e6)
    os.execvp("mlserver", ["mlserver", "start", "."])
