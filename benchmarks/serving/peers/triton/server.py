"""NVIDIA Triton with an ONNX file: the server that the wheel ``nvidia-pytriton`` carries, on a model repository.

The wheel has no ONNX Runtime backend; ``model.py`` beside this file calls ONNX Runtime from the Python backend.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import onnxruntime as ort

CONFIG = """name: "model"
backend: "python"
max_batch_size: {size}
input [{inputs}]
output [{outputs}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""
BATCHING = "dynamic_batching {}\n"  # its guide's first step: what waits when the model is free, and no delay
TYPES = {"tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64"}


def tensors(specs):
    """Triton leaves the first axis out; a size that varies is -1."""
    sizes = {spec.name: [size if isinstance(size, int) else -1 for size in spec.shape[1:]] for spec in specs}
    return ", ".join(
        f'{{ name: "{spec.name}" data_type: {TYPES[spec.type]} dims: {sizes[spec.name]} }}' for spec in specs
    )


def write_repository(folder):
    session = ort.InferenceSession(os.environ["MODEL_FILE"], providers=["CPUExecutionProvider"])
    size = int(os.environ["MAX_BATCH_SIZE"])
    config = CONFIG.format(size=size, inputs=tensors(session.get_inputs()), outputs=tensors(session.get_outputs()))
    if size > 1:
        config += BATCHING
    (folder / "model/1").mkdir(parents=True)
    (folder / "model/config.pbtxt").write_text(config)
    shutil.copy(Path(__file__).with_name("model.py"), folder / "model/1/model.py")


def write_backend(triton, folder):
    """Complete the Python backend with the stub of this Python: the wheel has one for each."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(triton / "backends/python", folder / "python")
    shutil.copy(triton / f"python_backend_stubs/{python}/triton_python_backend_stub", folder / "python")


def main():
    (package,) = importlib.util.find_spec("pytriton").submodule_search_locations
    triton = Path(package) / "tritonserver"
    repository, backends = Path("models").absolute(), Path("backends").absolute()
    write_repository(repository)
    write_backend(triton, backends)
    libraries = [Path(package).with_name("nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    protocol = os.environ["PROTOCOL"]
    os.execv(
        triton / "bin/tritonserver",
        [
            "tritonserver",
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--{protocol}-address=127.0.0.1",
            f"--{protocol}-port={os.environ['PORT']}",
            f"--allow-{'http' if protocol == 'grpc' else 'grpc'}=false",
            "--allow-metrics=false",
        ],
    )


if __name__ == "__main__":
    main()
