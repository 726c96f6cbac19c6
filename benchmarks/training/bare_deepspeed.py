"""A plain DeepSpeed script: torchrun --nproc-per-node 2 -m benchmarks.training.bare_deepspeed WORKLOAD.json"""

import deepspeed
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from app.models.gpt import GPT
from benchmarks.training.workload import Blocks, Stamps, Workload, skip_inference_kernel


def main() -> None:
    """Train on each of the workload's blocks once."""
    work = Workload.read()
    skip_inference_kernel()
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = GPT(**work.model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=work.optimizer(model), config=work.deepspeed)
    blocks = Blocks(work)
    batches = DataLoader(blocks, work.micro_batch, sampler=DistributedSampler(blocks, shuffle=False))
    stamps = Stamps(work)
    for inputs, targets in batches:
        loss = cross_entropy(engine(inputs).float().flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        stamps.add(loss)
    stamps.write()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
