"""What can be simulated, and the folder that stands for a vendor's installation."""

from __future__ import annotations

import subprocess
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from vllm_simulator import Settings
from vllm_simulator.chips import CHIPS, DEFAULT_CHIP, POSES
from vllm_simulator.installation import make_installation
from vllm_simulator.settings import Fault


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"pose": "tpu"}, "npu, hip, xpu"),
        ({"pose": "hip", "chip": "910B3"}, "gfx942"),
        ({"pose": "npu", "devices": 0}, "1 to 16 devices"),
        ({"pose": "npu", "memory_mib": 0}, "devices with memory"),
        ({"pose": "npu", "fail": "oom:mm"}, "oom:N"),
        ({"pose": "npu", "fail": "melt:3"}, "lost, hang or crash"),
        ({"pose": "npu", "fail": "lost:"}, "launch's number or an op's name"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_what_can(fields, text):
    with pytest.raises(ValueError, match=text):
        Settings(**fields)


def test_failures_are_read_by_number_and_by_op():
    settings = Settings(pose="npu", fail="oom:3,lost:aten::mm,hang:7")
    assert settings.faults == (Fault("oom", "", 3), Fault("lost", "aten::mm", 0), Fault("hang", "", 7))


def test_every_pose_has_a_default_chip_and_every_chip_a_pose():
    assert set(DEFAULT_CHIP) == set(POSES) == {chip.pose for chip in CHIPS.values()}
    assert all(CHIPS[name].pose == pose for pose, name in DEFAULT_CHIP.items())


def test_hip_chips_have_the_wave_size_of_their_family():
    assert {name: CHIPS[name].properties["warp_size"] for name in CHIPS if CHIPS[name].pose == "hip"} == {
        "gfx90a": 64,
        "gfx942": 64,
        "gfx950": 64,
        "gfx1100": 32,
        "gfx1201": 32,
    }


def test_settings_survive_their_file(tmp_path):
    settings = Settings(pose="xpu", chip="bmg", devices=3, memory_mib=64, fail="lost:9", blocking=True)
    settings.write(tmp_path / "settings.json")
    assert Settings.read(tmp_path / "settings.json") == settings


@pytest.mark.parametrize("pose", POSES)
def test_the_folder_has_an_entry_point_through_which_torch_loads_it(tmp_path, pose):
    make_installation(Settings(pose=pose), tmp_path, Path("/no/library.so"))
    info = next(tmp_path.glob("*.dist-info"))
    (entry,) = Distribution.at(info).entry_points
    assert entry.group == "torch.backends"
    assert (tmp_path / entry.value.partition(":")[0] / "__init__.py").exists()


def test_npu_smi_prints_a_row_of_two_lines_for_each_chip(tmp_path):
    variables = make_installation(Settings(pose="npu", devices=2, memory_mib=512), tmp_path, Path("/no/library.so"))
    printed = subprocess.run([tmp_path / "bin" / "npu-smi", "info"], capture_output=True, text=True, check=True).stdout
    assert printed.count("910B3") == 2
    assert printed.count("/ 512") == 2
    assert Path(variables["ASCEND_HOME_PATH"], "ascend_toolkit_install.info").exists()
