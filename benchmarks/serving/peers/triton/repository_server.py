"""NVIDIA Triton on a model repository that exists: the one in ``MODEL_REPOSITORY``, as it is."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from server import write_backend


def main():
    (package,) = importlib.util.find_spec("pytriton").submodule_search_locations
    triton, backends = Path(package) / "tritonserver", Path("backends").absolute()
    write_backend(triton, backends)
    for name in ("onnxruntime", "openvino"):
        (backends / name).mkdir()
        shutil.copy(Path(__file__).with_name("onnx_backend.py"), backends / name / "model.py")
    libraries = [Path(package).with_name("nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    os.execv(
        triton / "bin/tritonserver",
        [
            "tritonserver",
            f"--model-repository={os.environ['MODEL_REPOSITORY']}",
            f"--backend-directory={backends}",
            "--http-address=127.0.0.1",
            f"--http-port={os.environ['PORT']}",
            "--allow-grpc=false",
            "--allow-metrics=false",
            "--strict-readiness=true",
        ],
    )


if __name__ == "__main__":
    main()
