"""Three figures of scaling that are often quoted, what their sources say, and what the planner says."""

from dataclasses import dataclass, replace

from app.config.plan_rules import ModelTraits
from app.planner.cluster import Cluster, Device, Link
from app.planner.plan import ParallelPlan
from app.planner.profile import LayerProfile, ModelProfile, SavedActivations, Work
from app.planner.rates import Rates
from app.planner.stages import stages_of
from app.planner.step_time import step_time
from benchmarks.planning.stacks import STACKS, Megatron
from benchmarks.planning.transformer import TransformerShape, transformer_profile

_P100 = Device("p100", "gpu", 16 * 2**30, 720e9, 21.2e12, 10.6e12, 10e-6, 56)
_V100 = Device("v100", "gpu", 32 * 2**30, 900e9, 125e12, 15.7e12, 10e-6, 80)
_HOROVOD = Megatron(sent_bytes=4)


@dataclass(frozen=True)
class ScalingFigure:
    """A quoted figure beside the planner's."""

    quoted: str
    source: str
    predicted: str


def scaling_figures() -> list[ScalingFigure]:
    """Return the three figures. The sources leave out what is assumed here, so they show the size of an effect."""
    networks = {"Inception V3": (23.8e6, 5.7e9), "ResNet-101": (44.5e6, 7.8e9), "VGG-16": (138e6, 15.5e9)}
    horovod = ", ".join(f"{name} {_convolutional(*figures):.0%}" for name, figures in networks.items())
    return [
        ScalingFigure(
            "92 % at 1,024 GPUs (Horovod)",
            "arXiv:1802.05799: 90 % at 512 Pascal GPUs for Inception V3 and ResNet-101, 68 % for VGG-16. 25 Gb/s "
            "per node",
            f"{horovod}, at 512 GPUs, 64 images each",
        ),
        ScalingFigure(
            "91.5 % (BytePS)",
            "github.com/bytedance/byteps: about 90 % for BERT-large at 256 V100. 100 Gb/s per node",
            f"BERT-large {_bert():.0%} with all-reduces, 64 samples of 512 tokens each (assumed). BytePS itself uses "
            "servers",
        ),
        ScalingFigure(
            "76 % for 3D at 512 GPUs",
            "arXiv:1909.08053, table 1 and section 5.1: 8.3 B parameters, tensor 8 x data 64 without a pipeline, "
            "compared with 1.2 B on one V100",
            f"{_megatron():.0%}",
        ),
    ]


def _cluster(device: Device, devices: int, per_node: int, node_link: float, network: float) -> Cluster:
    """Return a cluster with links in GB/s of one device."""
    node, between = Link(node_link * 1e9, 8e-6), Link(network * 1e9, 15e-6)
    return Cluster(device, devices, min(per_node, devices), node, between, 256 * 2**30, Link(12e9, 1e-5), 1e9)


def _convolutional(parameters: float, products: float) -> float:
    """Return the efficiency of Horovod's largest run, from parameters and multiplications of an image."""
    images = 64
    layers = tuple([_part(parameters / 50, 2 * products / 50)] * 50)
    profile = ModelProfile("cnn", "fp32", layers, ModelTraits("cnn", None, None, False))
    rates = Rates(matmul=0.5)  # cuDNN of 2017 on P100
    one, many = (
        step_time(
            profile,
            ParallelPlan(1, 1, devices, images, 1, zero_stage=0),
            _cluster(_P100, devices, 4, 10, 25 / 8 / 4),
            _HOROVOD,
            (profile.layers,),
            rates,
        ).step_s
        for devices in (1, 512)
    )
    return one / many


def _part(parameters: float, flops: float) -> LayerProfile:
    return LayerProfile(
        "part", int(parameters), 0, Work(matmul_flops=flops, kernels=6), Work(), SavedActivations(), 1.0
    )


def _bert() -> float:
    shape = TransformerShape(24, 1024, 16, 30522, 512, 4096, 16, "fp16", fused_attention=False, dropout=True)
    profile = transformer_profile("bert-large", shape)
    one, many = (
        step_time(
            profile,
            ParallelPlan(1, 1, devices, 64, 1, zero_stage=0),
            _cluster(_V100, devices, 8, 120, 100 / 8 / 8),
            replace(STACKS["megatron"], sent_bytes=2),
            (profile.layers,),
            Rates(),
        ).step_s
        for devices in (1, 256)
    )
    return one / many


def _megatron() -> float:
    """Return operations a second and GPU at 512 GPUs over those of the 1.2 B model on one."""
    speeds = []
    for layers, hidden, heads, tensor, data in ((40, 1536, 16, 1, 1), (72, 3072, 32, 8, 64)):
        shape = TransformerShape(
            layers, hidden, heads, 51200, 1024, 4 * hidden, heads, "fp16", fused_attention=False, dropout=True
        )
        profile = transformer_profile("gpt", shape)
        plan = ParallelPlan(tensor, 1, data, 8, 1, zero_stage=0, recompute="full", overlap=False)
        cluster = _cluster(_V100, plan.workers, 16, 120, 100 / 8 / 2)
        time = step_time(profile, plan, cluster, STACKS["megatron"], stages_of(profile, 1), Rates())
        speeds.append(profile.work.flops * plan.global_batch / plan.workers / time.step_s)
    return speeds[1] / speeds[0]
