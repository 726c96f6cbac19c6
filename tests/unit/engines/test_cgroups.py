"""The cores that this process may keep busy, and the memory it may take, as its cgroups and its affinity say."""

import math
from pathlib import Path

import pytest

from app.engines import architecture
from app.engines.architecture import granted_memory, usable_cores

QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
CONTAINER = "docker/0f3a"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        pytest.param("0::/", {}, 8, id="nothing bounds it"),
        pytest.param("0::/", {"cpu.max": "max 100000"}, 8, id="a bound that is none"),
        pytest.param("0::/", {"cpu.max": "350000 100000"}, 3, id="the part of a core is not counted"),
        pytest.param("0::/", {"cpu.max": "50000 100000"}, 1, id="one at least"),
        pytest.param("0::/", {"cpu.max": "1600000 100000"}, 8, id="more than it may run on"),
        pytest.param("0::/a/b", {"a/b/cpu.max": "200000 100000", "c/cpu.max": "100000 100000"}, 2, id="its own"),
        pytest.param(
            "0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4, id="one around its own"
        ),
        pytest.param("0::/a", {"unified/a/cpu.max": "200000 100000"}, 2, id="beside version 1"),
        pytest.param("4:cpu,cpuacct:/a", {f"cpu,cpuacct/a/{QUOTA}": "500000"}, 5, id="version 1"),
        pytest.param("4:cpu:/a", {f"cpu/a/{QUOTA}": "-1"}, 8, id="version 1, a bound that is none"),
        pytest.param(f"4:cpu,cpuacct:/{CONTAINER}", {f"cpu/{QUOTA}": "200000"}, 2, id="version 1, the host's path"),
        pytest.param("3:cpuset:/a", {f"cpu/a/{QUOTA}": "200000"}, 8, id="of another controller"),
    ],
)
def test_no_more_cores_are_used_than_the_cgroups_of_this_process_grant(
    own: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, list_of_own = tmp_path / "mount", tmp_path / "own"
    for name, text in files.items():
        file = mount / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")
        if file.name == QUOTA:
            file.with_name(PERIOD).write_text("100000\n", encoding="utf-8")
    list_of_own.write_text(f"{own}\n", encoding="utf-8")
    monkeypatch.setattr(architecture, "_MOUNT", mount)
    monkeypatch.setattr(architecture, "_OWN", list_of_own)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores() == cores


def test_the_tightest_cgroup_says_how_much_memory_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").write_text("0::/a/b\n", encoding="utf-8")
    monkeypatch.setattr(architecture, "_MOUNT", tmp_path / "mount")
    monkeypatch.setattr(architecture, "_OWN", tmp_path / "own")
    assert granted_memory() == math.inf
    for folder, limit in (("a/b", "max"), ("a", "1000")):
        cgroup = tmp_path / "mount" / folder
        cgroup.mkdir(parents=True, exist_ok=True)
        (cgroup / "memory.max").write_text(f"{limit}\n", encoding="utf-8")
        (cgroup / "memory.current").write_text("700\n", encoding="utf-8")
    assert granted_memory() == 300
    (tmp_path / "mount/a/memory.stat").write_text("anon 500\ninactive_file 150\n", encoding="utf-8")
    assert granted_memory() == 450
