"""The trained PyTorch model behind FastAPI and uvicorn: eager, one request at a time."""

import os

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from upath import UPath

from app.training.weights import load_weights

torch.set_num_threads(1)
trained = load_weights(UPath(os.environ["WEIGHTS"]))
trained.model.eval()
dtypes = {each.name: each.dtype for each in trained.processor.inputs}
app = FastAPI()


@app.post("/predict")
async def predict(request: Request) -> dict:
    row = await request.json()
    given = {name: torch.from_numpy(np.asarray([row[name]], dtype)) for name, dtype in dtypes.items()}
    with torch.inference_mode():
        return {"output": trained.model(**given)[0].tolist()}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["PORT"]), log_level="warning", access_log=False)
