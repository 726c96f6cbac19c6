"""Starts the processes that are measured."""

import os
import subprocess
import sys

_ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def torchrun(processes: int, module: str, *arguments: str, **environment: str) -> str:
    """Run ``module`` in so many processes on the CPU; what they printed. Raises RuntimeError if one fails."""
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    return python(*launcher, "-m", module, *arguments, **environment)


def python(module: str, *arguments: str, **environment: str) -> str:
    """Run ``python -m module`` on the CPU; what it printed. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    variables = {**os.environ, **_ON_CPU, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout
