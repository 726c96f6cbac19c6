"""accelerate with DeepSpeed: torchrun --nproc-per-node 2 -m benchmarks.training.with_accelerate WORKLOAD.json"""

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from app.models.gpt import GPT
from benchmarks.training.workload import Blocks, Stamps, Workload, skip_inference_kernel


def main() -> None:
    """Train on each of the workload's blocks once."""
    work = Workload.read()
    skip_inference_kernel()
    plugin, gloo = DeepSpeedPlugin(hf_ds_config=work.deepspeed), InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo])
    torch.manual_seed(0)
    model = GPT(**work.model)
    batches = DataLoader(Blocks(work), work.micro_batch)
    model, optimizer, batches = accelerator.prepare(model, work.optimizer(model), batches)
    stamps = Stamps(work)
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        accelerator.backward(loss)  # with DeepSpeed this is its step, too
        optimizer.step()
        optimizer.zero_grad()
        stamps.add(loss)
    stamps.write()
    accelerator.end_training()


if __name__ == "__main__":
    main()
