"""The trained PyTorch model behind Ray Serve, called eagerly for one request after another.

Texts come padded to a bucket; alone, no text needs that, and its padding is cut off.
"""

import os
import signal

import numpy as np
import ray
import torch
from ray import serve
from starlette.requests import Request

from app.published.weights import load_weights
from app.storage import to_path


@serve.deployment(num_replicas=1, max_ongoing_requests=256)
class Eager:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        trained = load_weights(to_path(os.environ["WEIGHTS"]))
        self.model = trained.model
        self.dtypes = {input_.name: input_.dtype for input_ in trained.processor.inputs}

    async def __call__(self, request: Request) -> dict:
        row = await request.json()
        length = sum(row["attention_mask"])
        given = {name: torch.from_numpy(np.asarray([row[name][:length]], dtype)) for name, dtype in self.dtypes.items()}
        with torch.inference_mode():
            return {"output": self.model(**given)[0].tolist()}


if __name__ == "__main__":
    ray.init("local", include_dashboard=False, _temp_dir=os.environ["RAY_FOLDER"], _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["PORT"])})
    serve.run(Eager.bind())
    signal.pause()
