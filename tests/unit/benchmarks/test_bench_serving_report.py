"""The benchmark of serving: which servers are compared, and the report."""

import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

from benchmarks.machine import Conditions
from benchmarks.serving import goals
from benchmarks.serving.cases import (
    BATCHING_OFF,
    CHOSEN,
    CHOSEN_LOOP,
    IN_JSON,
    OVER_GRPC,
    RAYLOOM,
    SAME_FILE_LOOP,
    TRITON_IN_JSON,
)
from benchmarks.serving.environments import PEERS
from benchmarks.serving.findings import Findings, Raced
from benchmarks.serving.load import Load
from benchmarks.serving.plot import heat_map
from benchmarks.serving.race import CONNECTIONS, Race, Result
from benchmarks.serving.report import report
from benchmarks.serving.servers import EAGER, TRITON_GRPC
from benchmarks.serving.steady import Steady, Times
from benchmarks.serving.sweep import SETTINGS, Outcome, Swept
from benchmarks.spread import Spread


def test_a_goal_is_judged_by_the_best_peer_at_each_number_of_connections() -> None:
    found = _found({RAYLOOM: (10, 300, 300), "a": (10, 100, 250), "b": (10, 150, 150)})
    some, many = "rows a second, 16 connections", "rows a second, 64 connections"
    assert _goal(found, "cnn: Rayloom / the best peer", some).reached == "2.000 (2.000 to 2.000), b"
    assert _goal(found, "cnn: Rayloom / the best peer", some).verdict == "reached"
    assert _goal(found, "cnn: Rayloom / the best peer", many).reached == "1.200 (1.200 to 1.200), a"
    assert _goal(found, "cnn: Rayloom / the best peer", many).verdict == "**missed**"
    assert _goal(found, "cnn: Rayloom / the best peer", "p99, 16 connections").verdict == "reached"
    assert _goal(found, "cnn: Rayloom / the best peer", "p99, 64 connections").verdict == "**missed**"
    assert _goal(found, "cnn: Rayloom, CPU").reached == "90 µs"


def test_json_is_compared_with_json() -> None:
    found = _found({IN_JSON: (10, 130, 120), TRITON_IN_JSON: (10, 100, 100)})
    what = f"cnn: {IN_JSON} / {TRITON_IN_JSON}, rows a second"
    assert [_goal(found, f"{what}, {number}").verdict for number in (16, 64)] == ["reached", "**missed**"]


def test_grpc_is_compared_with_the_faster_way_to_run_triton() -> None:
    batching = f"{TRITON_GRPC.name}, batching"
    found = _found({OVER_GRPC: (10, 120, 120), TRITON_GRPC.name: (20, 80, 70), batching: (10, 100, 110)}, case="grpc")
    what = f"grpc: {OVER_GRPC} / {TRITON_GRPC.name}, rows a second"
    assert _goal(found, what, "16 connections").reached == f"1.200 (1.200 to 1.200), {batching}"
    assert [_goal(found, what, f"{number} connections").verdict for number in (16, 64)] == ["reached", "**missed**"]
    assert "h2load" in report(found, Path("sweep.svg"))


def test_the_encoder_is_judged_by_its_loop_and_by_servers_without_batching() -> None:
    rates = {RAYLOOM: (100, 190, 196), BATCHING_OFF: (100, 100, 98), CHOSEN: (200, 300, 500), "a": (120, 100, 180)}
    found = _found(rates, case="encoder")
    assert _goal(found, "encoder: Rayloom / the bare").reached == "0.980 (0.980 to 0.980), bare loop, the same file"
    assert _goal(found, "encoder: Rayloom / itself without batching", "p50, 1 connection").verdict == "reached"
    assert _goal(found, "encoder: Rayloom / the best peer without batching").reached == "1.200 (1.200 to 1.200), a"
    assert _goal(found, "encoder: Rayloom / itself without batching", "64 connections").reached.startswith("2.000")
    assert _goal(found, f"encoder: {CHOSEN} / the best peer").verdict == "reached"


def test_the_whole_stack_is_judged_where_requests_wait() -> None:
    found = _found({CHOSEN: (400, 600, 800), EAGER.name: (50, 100, 100)}, case="texts")
    assert [goal.verdict for goal in goals.goals(found) if goal.verdict] == ["**missed**", *["reached"] * 3]
    assert _goal(found, f"texts: {CHOSEN} / the bare engine loop").reached.startswith("0.800 (0.800 to 0.800)")
    assert _goal(found, "texts: bare loop, compile's choice / PyTorch eager").reached.startswith("10.000")
    assert _goal(found, "Texts of every length at 40 requests a second").reached.startswith("0.150 (0.150 to 0.150)")
    assert "| PyTorch eager | 20.000 (20.000 to 20.000) | 90.000 (90.000 to 90.000) | 2 |" in report(
        found, Path("a.svg")
    )


def test_what_did_not_run_is_open_and_its_reason_is_told() -> None:
    found = _found({"a": (10, 10, 10)}, absent={RAYLOOM: "no such job"})
    assert {goal.reached for goal in goals.goals(found)} == {"no such job", "did not take part"}
    assert {goal.verdict for goal in goals.goals(found)} == {"open"}
    assert "- **Rayloom** was left out: no such job" in report(found, Path("sweep.svg"))


def test_the_report_has_every_goal_and_every_server() -> None:
    found = _found({RAYLOOM: (10, 300, 300), "a": (10, 100, 250)})
    text = report(found, Path("sweep.svg"))
    assert all(f"| {goal.what} | {goal.goal} | {goal.reached} |" in text for goal in goals.goals(found))
    latency = "256.000 (256.000 to 256.000)"
    row = f"| a | 64 | 250 (250 to 250) | {latency} | {latency} | 90 (90 to 90) | 0 | 50% |"
    assert row in text
    assert "- **a**: as it comes; requests: lists" in text
    assert f"| {SAME_FILE_LOOP} |  | 200 (200 to 200) |" in text
    assert "3 errors in all settings together" in text
    assert f"- `{SETTINGS[1].override}` was left out: no such key" in text


def test_peers_run_the_engine_that_rayloom_runs() -> None:
    pins = {path.parent.name: path.read_text(encoding="utf-8").split() for path in PEERS.glob("*/requirements.txt")}
    assert len(pins) == 4
    assert all(f"onnxruntime=={version('onnxruntime')}" in pinned for pinned in pins.values())


def test_the_sweep_is_drawn_with_a_field_for_each_setting() -> None:
    swept = {setting: Outcome(100.0 + setting.max_size, 1.5, 0) for setting in SETTINGS}
    drawn = ET.fromstring(heat_map(swept))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("1.5 ms alone") == len(SETTINGS)
    assert {"no preferred size", "preferred size 8", "preferred size 16", "132/s"} <= set(texts)


def _goal(found: Findings, begins: str, ends: str = "") -> goals.Goal:
    (goal,) = (goal for goal in goals.goals(found) if goal.what.startswith(begins) and goal.what.endswith(ends))
    return goal


def _found(
    rates: dict[str, tuple[float, float, float]], case: str = "cnn", absent: dict[str, str] | None = None
) -> Findings:
    """Two rounds of the same numbers: rates at 1, 16 and 64 connections; latencies follow from them."""
    results = {name: Result("as it comes", "lists", [_loads(rate)] * 2) for name, rate in rates.items()}
    ran = Race(results, {SAME_FILE_LOOP: Spread((200.0, 200.0)), CHOSEN_LOOP: Spread((1000.0, 1000.0))}, absent or {})
    peers = [name for name in rates if not name.startswith("Rayloom")]
    raced = Raced(case, peers, peers, ran)
    swept = Swept({SETTINGS[0]: Outcome(100.0, 1.5, 3)}, {SETTINGS[1]: "no such key"})
    times = {CHOSEN: [Times(3.0, 9.0, 0)] * 2, EAGER.name: [Times(20.0, 90.0, 1)] * 2}
    steady = Steady("Texts of every length", CHOSEN, EAGER.name, 0.8, 40.0, times, {})
    return Findings({case: raced}, swept, [steady] if case == "texts" else [], ["a 1.0"], 2, 1, Conditions())


def _loads(rates: tuple[float, float, float]) -> dict[int, Load]:
    return {
        connections: Load(
            rate, latency := 1e3 * connections / rate, latency, errors=0, generator_busy=0.5, stolen=0.0, cpu_us=90.0
        )
        for connections, rate in zip(CONNECTIONS, rates, strict=True)
    }
