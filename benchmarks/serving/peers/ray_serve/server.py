"""An ONNX file behind Ray Serve, as its guides to deployments and to batching show.

``max_ongoing_requests`` is raised from its default of 5, with which no batch would hold more.
"""

import os
import signal

import numpy as np
import onnxruntime as ort
import ray
from ray import serve
from starlette.requests import Request

MAX_BATCH_SIZE = int(os.environ["MAX_BATCH_SIZE"])


@serve.deployment(num_replicas=1, max_ongoing_requests=256)
class Onnx:
    def __init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(os.environ["MODEL_FILE"], options, ["CPUExecutionProvider"])
        kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
        self.dtypes = {input_.name: kinds[input_.type] for input_ in self.session.get_inputs()}

    def run(self, rows: list[dict]) -> list[list[float]]:
        given = {name: np.asarray([row[name] for row in rows], dtype) for name, dtype in self.dtypes.items()}
        return self.session.run(None, given)[0].tolist()

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=int(os.environ["MAX_WAIT_US"]) / 1e6)
    async def run_batched(self, rows: list[dict]) -> list[list[float]]:
        return self.run(rows)

    async def __call__(self, request: Request) -> dict:
        row = await request.json()
        return {"output": self.run([row])[0] if MAX_BATCH_SIZE == 1 else await self.run_batched(row)}


if __name__ == "__main__":
    ray.init("local", include_dashboard=False, _temp_dir=os.environ["RAY_FOLDER"], _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["PORT"])})
    serve.run(Onnx.bind())
    signal.pause()
