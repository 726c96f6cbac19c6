"""The planner: profiles, plans, clusters and what it refuses."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from app.cli.main import app
from app.config import TrainConfig, load_recipe
from app.config.layout import lay_out
from app.config.plan import PlanConfig, Precision, ZeroPlusPlusConfig
from app.config.plan_rules import Setting
from app.models.factory import blueprint_of
from app.models.gpt import GPT
from app.planner.calibration import Calibration, machine_name, read_calibration
from app.planner.cluster import Cluster, Link, catalogue_name, cluster_of, this_machine
from app.planner.measure import measure
from app.planner.memory import ProcessMemory, memory
from app.planner.plan import ParallelPlan, parallel_plan
from app.planner.profile import ModelProfile
from app.planner.search import Findings, Problem, fewest_devices, price_plan, search
from app.planner.stack import RAYLOOM
from app.planner.stages import balanced_cuts
from app.planner.traffic import traffic
from app.planner.validation import validation_of
from app.tasks import prepare
from app.telemetry.mfu import OTHER_OPERATIONS, flops_per_sample
from app.training.planning.machine import measure_plan
from app.training.planning.recipe import find_plans, subject_of
from app.training.planning.report import PlanReport, report
from app.training.worker import start_worker
from benchmarks.planning.stacks import STACKS
from benchmarks.planning.transformer import TransformerShape, transformer_profile
from jobs._cluster import cluster_of_nodes
from tests.helpers import ROOT
from tests.wording import refused


def test_measured_gpt_agrees_with_the_formulas_of_a_transformer() -> None:
    model = GPT(1000, 64, layers=3, width=64, heads=4)
    measured = measure(model, {"input_ids": torch.zeros(1, 64, dtype=torch.int64)}, "bf16")
    shape = TransformerShape(3, 64, 4, 1000, 64, 256, 4, learned_positions=False, split_vocabulary=False)
    expected = transformer_profile("gpt", shape)
    assert measured.parameters == sum(parameter.numel() for parameter in model.parameters())
    block, formula = measured.layers[2], expected.layers[1]
    assert block.work.matmul_flops == formula.work.matmul_flops
    assert block.work.attention_flops == formula.work.attention_flops
    assert (block.split_parameters, block.column_inputs, block.row_cuts) == (formula.split_parameters, 2, 2)
    assert block.boundary_bytes == formula.boundary_bytes
    assert block.saved.total == pytest.approx(formula.saved.total, rel=0.25)  # rotary positions are kept beside


class Recurrent(nn.Module):
    """Words, read in both directions."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.read = nn.Embedding(50, 32), kind(32, 64, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.read(self.words(input_ids))[0][:, -1])


class Blocks(nn.Module):
    """Matrices of 16 x 16, which ``run`` puts together, and a head."""

    def __init__(self, number: int, run: Callable[[nn.ModuleList, Tensor], Tensor], width: int = 16) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(nn.Linear(16, 16) for _ in range(number)), run
        self.head = nn.Linear(width, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.run(self.blocks, features))


def one_after_the_other(blocks: Iterable[nn.Module], features: Tensor) -> Tensor:
    for block in blocks:
        features = block(features)
    return features


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_recurrent_layer_is_counted(kind: type[nn.RNNBase], gates: int) -> None:
    model, inputs = Recurrent(kind), {"input_ids": torch.zeros(1, 16, dtype=torch.int64)}
    expected = 2 * 16 * 2 * gates * 64 * ((32 + 64) + (128 + 64)) + 2 * 128 * 5
    assert measure(model, inputs, "fp32").work.matmul_flops == expected
    assert flops_per_sample(model, inputs) == 3 * expected


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_recurrent_layer_that_cudnn_runs_as_one_is_counted_as_on_a_cpu(bidirectional: bool) -> None:
    """Its operation is called without its data, as on a GPU: no CPU runs it."""
    layer = nn.LSTM(8, 16, num_layers=2, bidirectional=bidirectional, batch_first=True)
    features = torch.zeros(3, 5, 8)
    state = torch.zeros(2 * (1 + bidirectional), 3, 16, device="meta")
    weights = [weight.detach().to("meta") for weight in layer.parameters()]
    with FlopCounterMode(display=False, custom_mapping=OTHER_OPERATIONS) as counter:
        torch.ops.aten._cudnn_rnn(
            features.to("meta"), weights, 4, None, state, state, 2, 16, 0, 2, True, 0.0, False, bidirectional, [], None
        )
    expected = flops_per_sample(layer, {"input": features}) / 3
    assert counter.get_total_flops() / len(features) == expected > 0


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        (Blocks(6, one_after_the_other), 6),
        (Blocks(2, lambda blocks, features: one_after_the_other([*blocks] * 3, features)), 6),
        (Blocks(1, lambda blocks, features: one_after_the_other([*blocks] * 6, features)), 6),
        (Blocks(4, lambda blocks, features: one_after_the_other([blocks[place] for place in range(4)], features)), 4),
        (Blocks(5, lambda blocks, features: torch.cat([block(features) for block in blocks], -1), 80), 5),
        (Blocks(5, lambda blocks, features: torch.stack([block(features) for block in blocks]).sum(0)), 5),
    ],
    ids=["a chain", "blocks again", "one block again", "by number", "beside each other", "added"],
)
def test_every_call_of_a_block_is_counted(model: Blocks, calls: int, caplog: pytest.LogCaptureFixture) -> None:
    measured = measure(model, {"features": torch.zeros(1, 16)}, "fp32")
    assert measured.work.matmul_flops == 2 * (calls * 16 * 16 + model.head.in_features * 3)
    assert measured.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert measured.vocabulary == 3
    assert not caplog.records


def test_a_block_that_is_listed_several_times_has_its_weights_once() -> None:
    model = Blocks(1, one_after_the_other)
    model.blocks = nn.ModuleList([model.blocks[0]] * 6)
    measured = measure(model, {"features": torch.zeros(1, 16)}, "fp32")
    assert (measured.parameters, measured.work.matmul_flops) == (16 * 17 + 17 * 3, 2 * (6 * 16 * 16 + 16 * 3))


def test_a_model_that_cannot_be_measured_is_refused_without_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    model = Blocks(2, lambda blocks, features: torch.cat([block(features) for block in blocks], -1))
    with refused("plan.not_measured", "train.plan"):
        measure(model, {"features": torch.zeros(1, 16)}, "fp32")
    assert not caplog.records


def test_measuring_leaves_the_model_and_random_state() -> None:
    model = GPT(100, 16, layers=2, width=32, heads=2)
    before, state = [parameter.clone() for parameter in model.parameters()], torch.get_rng_state()
    measure(model, {"input_ids": torch.zeros(1, 16, dtype=torch.int64)}, "fp32")
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "device: h100\ndevices: 2\ndevices: 4\n"),
        ("a.json", '{"device": "h100", "devices": 2, "devices": 4}'),
        ("a.yaml", "device: h100\nhost_memory_gib: .inf\n"),
        ("a.json", '{"device": "h100", "devices": 2, "host_memory_gib": 1e999}'),
    ],
)
def test_a_cluster_file_is_read_by_the_rules_of_a_recipe(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with refused("yaml.invalid"):
        cluster_of(str(tmp_path / name))
    (tmp_path / "cluster.yaml").write_text("device: h100\ndevices: 010\nhost_memory_gib: 2e3\n")
    read = cluster_of(str(tmp_path / "cluster.yaml"))
    assert (read.devices, read.host_memory) == (10, 2000 * 2**30)


def test_pipeline_is_cut_as_deepspeed_cuts() -> None:
    from deepspeed.runtime.utils import partition_balanced

    for weights, parts in (((10, 0, 4, 4, 4, 4, 0, 10), 3), ((5, 1, 1, 1, 5, 9, 2), 4), ((1, 2), 2)):
        assert list(balanced_cuts(weights, parts)) == [int(bound) for bound in partition_balanced(list(weights), parts)]


def test_megatron_sums_four_times_a_block() -> None:
    profile = _gpt(layers=4, hidden=1024)
    plan = ParallelPlan(tensor=4, pipeline=1, data=1, micro_batch=2, accumulation=3)
    (collective,) = traffic(profile, plan, STACKS["megatron"], profile.layers)
    assert (collective.kind, collective.count) == ("all_reduce", 4 * 4 * 3)
    assert collective.bytes == collective.count * 2 * profile.layers[1].boundary_bytes


def test_search_names_why_plans_are_refused_and_is_quick() -> None:
    found, again = (_search(_gpt(layers=96, hidden=12288), cluster_of("1024xa100-80"), batch=1536) for _ in range(2))
    assert found.candidates
    assert all(candidate.plan.workers == 1024 for candidate in found.candidates)
    assert all(candidate.memory.total <= cluster_of("1xa100-80").device.memory for candidate in found.candidates)
    assert {"the device's memory", "tensor groups stay in a node", "pipeline takes zero 1"} <= set(
        found.refusals.counts
    )
    assert min(found.search_s, again.search_s) < 2, "other processes may hold up one of them"


def test_faster_links_never_make_a_plan_slower() -> None:
    profile = _gpt(layers=24, hidden=2048)
    slow = {str(c.config): c.time.step_s for c in _search(profile, cluster_of("2x8xl4"), batch=64).candidates}
    fast = {str(c.config): c.time.step_s for c in _search(profile, cluster_of("2x8xh100"), batch=64).candidates}
    assert slow
    assert all(fast[plan] < seconds for plan, seconds in slow.items() if plan in fast)  # options where they help


def test_a_model_that_does_not_fit_asks_for_more_devices() -> None:
    problem = _problem(_gpt(layers=60, hidden=8192), cluster_of("8xt4"), batch=512)
    assert not search(problem).candidates
    fewest = fewest_devices(problem)
    assert fewest is not None
    devices, best = fewest
    assert devices > 8
    assert best.plan.workers == devices


@pytest.mark.parametrize(("steps", "shown"), [(1, r"\d s"), (5000, r"\d min"), (10**6, r"\d h")])
def test_the_table_gives_times_in_a_unit_that_can_be_read(steps: int, shown: str) -> None:
    problem = _problem(_gpt(layers=4, hidden=512), cluster_of("8xa100-80"), 64)
    text = report("gpt", problem, search(problem), steps, top=1, price=None).to_text()
    assert re.search(rf"{shown} +[\d,.]+ (s|min|h)$", text.splitlines()[2]), text


def test_a_batch_that_no_plan_divides_is_told_the_nearest() -> None:
    with refused("batch.uneven", "train.global_batch_size"):
        _search(_gpt(layers=4, hidden=512), cluster_of("1024xa100-80"), batch=7)
    with refused("batch.uneven", "train.global_batch_size"):
        _search(_gpt(layers=4, hidden=512), cluster_of("1024xa100-80"), batch=70)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("8xa100", "device.unknown"),
        ("8xh1000", "device.unknown"),
        ("many", "cluster.unknown"),
        ("0xt4", "cluster.no_devices"),
    ],
)
def test_unknown_clusters_are_told_the_nearest(given: str, rule: str) -> None:
    with refused(rule):
        cluster_of(given)


def test_a_cluster_file_without_a_link_is_told_which(tmp_path: Path) -> None:
    device = {
        "name": "mine",
        "memory_gib": 24,
        "memory_gigabytes_per_s": 900,
        "half_teraflops": 100,
        "float_teraflops": 50,
    }
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"device": device, "devices": 16, "devices_per_node": 8}))
    with refused("cluster.no_link", "node_link"):
        cluster_of(str(file))
    link = {"gigabytes_per_s": 10}
    file.write_text(json.dumps({"device": device, "devices": 16, "devices_per_node": 8, "node_link": link}))
    with refused("cluster.no_link", "node_link"):
        cluster_of(str(file))
    file.write_text(json.dumps({"device": "h100", "devices": 16, "network": link}))
    assert cluster_of(str(file)).network.bandwidth == 10e9


def test_what_no_published_run_shows_is_not_validated() -> None:
    assert validation_of(cluster_of("1xl4").device) is None
    a100 = cluster_of("1xa100-80").device
    assert validation_of(a100, PlanConfig(zero_stage=3)) is not None
    assert validation_of(a100, PlanConfig(zero_stage=3, offload="cpu")) is None
    assert validation_of(a100, PlanConfig(zero_stage=3, zero_plus_plus={"hpz_partition_size": 8})) is None


def test_offload_is_offered_where_nothing_else_fits() -> None:
    profile = _gpt(layers=32, hidden=4096)
    assert {candidate.config.offload for candidate in _search(profile, cluster_of("1xt4"), batch=8).candidates} <= {
        "cpu"
    }
    fits = _search(profile, cluster_of("8xb200"), batch=64).candidates
    assert {candidate.config.offload for candidate in fits} == {"none"}


def test_offload_to_nvme_is_named_where_memory_does_not_do() -> None:
    problem = _problem(_gpt(layers=48, hidden=8192), cluster_of("8xt4"), batch=64)
    found = report("gpt", problem, search(problem), steps=1, top=1, price=None)
    assert not found.plans
    assert [row.option for row in found.would_help] == ["optimizer offload to NVMe"]
    with_path = replace(problem, base=PlanConfig(nvme_path="/local_nvme"))
    assert {candidate.config.offload for candidate in search(with_path).candidates} == {"nvme"}


def test_parameters_on_nvme_take_little_of_the_node_and_time_of_its_disk() -> None:
    problem = _problem(_gpt(layers=24, hidden=4096), cluster_of("8xt4"), batch=64)
    config = PlanConfig(zero_stage=3, offload="nvme", nvme_path="/local_nvme", micro_batch=1)
    layout = lay_out(config, 64, 8)
    found = {}
    for place in ("cpu", "nvme"):
        placed = config.model_copy(update={"offload_param": place})
        found[place] = price_plan(problem, placed, parallel_plan(placed, layout))
    on_cpu, on_disk = found["cpu"], found["nvme"]
    assert on_cpu
    assert on_disk
    assert on_disk.memory.total == on_cpu.memory.total
    parameters = problem.profile.parameters * 2 / 8
    assert on_cpu.memory.host - on_disk.memory.host == pytest.approx(parameters, rel=0.1)
    read = (2 * layout.gradient_accumulation + 1) * parameters * 8
    assert on_disk.step_s - on_cpu.step_s == pytest.approx(read / problem.cluster.disk_bandwidth, rel=0.5)


def test_zero_plus_plus_sends_a_quarter_between_nodes() -> None:
    profile, plus = _gpt(layers=4, hidden=1024), {"hpz": 8, "quantized_weights": True, "quantized_gradients": True}
    plain = ParallelPlan(tensor=1, pipeline=1, data=16, micro_batch=1, accumulation=2, zero_stage=3)
    sent = [
        sum(found.bytes for found in traffic(profile, plan, RAYLOOM, profile.layers) if found.group == "data")
        for plan in (plain, replace(plain, **plus))
    ]
    assert sent[1] == sent[0] / 4  # 3 M and 0.75 M: Wang 2023, table 1


def test_gradients_travel_in_the_type_that_the_plan_says() -> None:
    profile = _gpt(layers=4, hidden=1024)
    plain = ParallelPlan(tensor=1, pipeline=1, data=2, micro_batch=1, accumulation=1, zero_stage=1)
    reduced, gathered = traffic(profile, replace(plain, gradient_bytes=4), RAYLOOM, profile.layers)
    assert reduced.bytes == 2 * gathered.bytes  # parameters travel in bf16


@pytest.mark.parametrize(
    ("precision", "stage", "accumulation", "bytes_each"),
    [
        ("fp16", 1, 1, 2 + 12 + 2 + 2 + 4),
        ("bf16", 1, 1, 2 + 12 + 2 + 2 + 4),
        ("bf16", 1, 2, 2 + 12 + 4),
        ("bf16", 2, 2, 2 + 12 + 4),
        ("bf16", 2, 1, 2 + 12 + 2 + 2 + 4),
        ("fp32", 1, 1, 4 + 12 + 4 + 4),
    ],
)
def test_copies_of_gradients_in_the_optimizer_step_count(
    precision: Precision, stage: int, accumulation: int, bytes_each: int
) -> None:
    profile = transformer_profile("wide", TransformerShape(1, 8192, 8, 64, 8, 32768, 8, precision=precision))
    plan = ParallelPlan(1, 1, data=1, micro_batch=1, accumulation=accumulation, zero_stage=stage)
    process = ProcessMemory(context=0.0, group=0.0)
    found = memory(profile, plan, RAYLOOM, (profile.layers,), process=process)
    buffers = RAYLOOM.buffers(profile, plan, profile.layers, profile.parameters)
    assert found.total - buffers == pytest.approx(profile.parameters * bytes_each, rel=0.01)


def test_powersgd_reduces_as_many_numbers_as_torch_says() -> None:
    model, rank = GPT(300, 16, layers=2, width=64, heads=4), 4
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    start_worker(TrainConfig())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):
        before = state.total_numel_after_compression
        wrapped(tokens).sum().backward()
    reduced = state.total_numel_after_compression - before
    profile = measure(model, {"input_ids": tokens}, "fp32")
    plan = ParallelPlan(1, 1, data=2, micro_batch=1, accumulation=1, zero_stage=0, low_rank=rank)
    (predicted,) = traffic(profile, plan, RAYLOOM, profile.layers)
    assert predicted.bytes == 4 * reduced


def test_zero_plus_plus_is_offered_where_links_between_nodes_are_slow() -> None:
    profile = _gpt(layers=24, hidden=2048)
    one_node = _search(profile, cluster_of("8xl4"), batch=64).candidates
    assert all(candidate.config.zero_plus_plus == ZeroPlusPlusConfig() for candidate in one_node)
    nodes = _search(profile, cluster_of("4x8xl4"), batch=64).candidates
    fastest = next(candidate for candidate in nodes if candidate.config.zero_stage == 3)
    assert fastest.config.zero_plus_plus.hpz_partition_size == 8


def test_what_rayloom_cannot_run_is_named_where_it_would_help() -> None:
    slow = replace(cluster_of("4x8xl4"), network=Link(1e8, 1e-5))
    profile = _gpt(layers=24, hidden=4096)
    whole = replace(profile, traits=replace(profile.traits, layers=None, tensor_divisor=None))
    problem = _problem(whole, slow, batch=1024)
    found = report("gpt", problem, search(problem), steps=1, top=1, price=None)
    assert [row.option for row in found.would_help] == ["ZeRO 3 within nodes (MiCS)"]
    assert found.would_help[0].step_s < found.plans[0].step_s
    assert "would help: ZeRO 3 within nodes (MiCS)" in found.to_text()


def _gpt(layers: int, hidden: int) -> ModelProfile:
    heads = hidden // 64
    shape = TransformerShape(layers, hidden, heads, 51200, 2048, 4 * hidden, heads, split_vocabulary=False)
    return transformer_profile("gpt", shape)


def _problem(profile: ModelProfile, cluster: Cluster, batch: int) -> Problem:
    workers = (cluster.devices, cluster.devices)
    setting = Setting(workers, "bf16", cluster.device.kind, "adamw", profile.traits, ("input_ids",))
    return Problem(profile, cluster, setting, batch)


def _search(profile: ModelProfile, cluster: Cluster, batch: int) -> Findings:
    return search(_problem(profile, cluster, batch))


def test_a_cluster_is_named_by_the_gpus_that_ray_sees() -> None:
    node = {"CPU": 96.0, "GPU": 8.0, "accelerator_type:A100-80G": 1.0}
    assert str(cluster_of_nodes([node, node, {"CPU": 4.0}], workers=2)) == "16 x a100-80 on 2 nodes"
    assert cluster_of_nodes([{"CPU": 4.0}], workers=3).devices == 3
    with refused("devices.differ"):
        cluster_of_nodes([node, {"GPU": 4.0, "accelerator_type:T4": 1.0}], workers=2)
    with refused("device.unknown"):
        cluster_of_nodes([{"GPU": 1.0}], workers=1)


def test_rayloom_plan_prints_a_table_and_json(tmp_path: Path) -> None:
    given = ["plan", str(ROOT / "recipes/digits.yaml"), "--cluster", "4xa100-80", "--price", "2", "--top", "2"]
    table = CliRunner().invoke(app, given)
    assert table.exit_code == 0, table.output
    assert "± 10%" in table.output
    assert "refused" in table.output
    found = PlanReport.model_validate_json(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert len(found.plans) == 2
    best = found.plans[0]
    assert best.device_hours == pytest.approx(4 * best.hours)
    assert best.price == pytest.approx(2 * best.device_hours)
    assert best.step_s <= found.plans[1].step_s


def test_calibration_of_gpus_that_are_not_here_is_refused() -> None:
    given = ["plan", str(ROOT / "recipes/digits.yaml"), "--cluster", "4xa100-80", "--calibrate"]
    with refused("calibration.other_machine"):
        CliRunner().invoke(app, given, catch_exceptions=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("A100-80G", "a100-80"),
        ("A100", "a100-40"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"),
        ("NVIDIA L4", "l4"), ("Tesla T4", "t4"), ("T4", "t4"),
    ],
)  # fmt: skip
def test_a_gpu_of_the_catalogue_is_known_by_its_whole_name(name: str, expected: str) -> None:
    assert catalogue_name(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H100 PCIe", "NVIDIA H100 NVL",
        "NVIDIA H200 NVL", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA L40S", "NVIDIA T400", "NVIDIA H800",
    ],
)  # fmt: skip
def test_a_gpu_that_only_resembles_one_of_the_catalogue_is_refused(name: str) -> None:
    with refused("device.unknown"):
        catalogue_name(name)


def test_this_machine_is_what_its_cgroup_and_the_threads_of_a_worker_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000")
    (tmp_path / "memory.max").write_text(str(2**30))
    (tmp_path / "memory.current").write_text("0")
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr("app.engines.architecture._MOUNT", tmp_path)
    monkeypatch.setattr("app.engines.architecture._OWN", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 64)
    one, two, four = (this_machine(workers, threads) for workers, threads in ((1, 1), (1, 8), (4, 1)))
    assert (one.host_memory, four.device.memory) == (2**30, 2**28)
    # Of eight threads two get a core each, and four workers share two cores.
    assert two.device.float_flops == 2 * one.device.float_flops == 4 * four.device.float_flops


@pytest.mark.slow
def test_a_plan_is_measured_with_processes_that_read_ahead() -> None:
    recipe = load_recipe("recipes/digits.yaml", ["train.loader={num_workers: 1}"])
    data = prepare(recipe)
    subject = subject_of(recipe, blueprint_of(recipe.model, data.facts).model, data)
    _, findings = find_plans(subject, this_machine(workers=1))
    assert measure_plan(recipe, data, findings.best, subject.name).step_s > 0


@pytest.mark.slow
def test_a_measurement_reports_the_worker_that_failed_first() -> None:
    model = "model={factory: tests.faults.models:OneRankCnn, args: {width: 8}}"
    recipe = load_recipe("recipes/digits.yaml", [model, "train.workers=2"])
    data = prepare(recipe)
    subject = subject_of(recipe, blueprint_of(recipe.model, data.facts).model, data)
    _, findings = find_plans(subject, this_machine(workers=2))
    with refused("worker.failed"):
        measure_plan(recipe, data, findings.best, subject.name)


def test_a_calibration_is_for_as_many_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.planner.calibration._FOLDER", tmp_path)
    rates = {"matmul_flops": 1e9, "memory_bandwidth": 1e9, "launch_s": 1e-6, "link_bandwidth": 1e9}
    measured = Calibration(machine=machine_name(), workers=2, threads=4, precision="fp32", link_latency_s=1e-6, **rates)
    measured.save()
    assert read_calibration(this_machine(2, threads=4), "fp32") == measured
    assert read_calibration(this_machine(2, threads=1), "fp32") is None
