"""The device under each of its poses: memory, order of work, failures. One child a pose answers most questions."""

from __future__ import annotations

import signal

import pytest

POSES = {"npu": "npu", "hip": "cuda", "xpu": "xpu"}
IMPORTS = {"npu": "import torch_npu\n", "hip": "", "xpu": ""}

QUESTIONS = """
api, kind = getattr(torch, KIND), KIND
out["count"], out["name"], out["memory"] = api.device_count(), api.get_device_name(0), list(api.mem_get_info())
out["first"] = str(torch.ones(2, device=kind).device)
out["product"] = (torch.ones(3, 3, device=kind) @ torch.ones(3, 3, device=kind)).sum().item()
out["bfloat16"] = str(torch.randn(4, 4, device=kind, dtype=torch.bfloat16).softmax(-1).dtype)
out["mixed"] = said(lambda: torch.ones(2, device=kind) + torch.ones(2))
out["two devices"] = said(lambda: torch.ones(2, device=kind) + torch.ones(2, device=f"{kind}:1"))
out["no such device"] = said(lambda: torch.ones(2, device=f"{kind}:7"))
out["out of memory"] = said(lambda: torch.empty(1 << 30, dtype=torch.uint8, device=kind))
values, host = torch.arange(4.0, device=kind), torch.empty(4, pin_memory=True)
out["pinned"] = host.is_pinned()
host.copy_(values * 2, non_blocking=True)
event = api.Event()
event.record()
early = host.tolist()
event.synchronize()
out["early"], out["late"] = early == host.tolist(), host.tolist()
side = api.Stream()
with api.stream(side):
    on_side = torch.full((3,), 5.0, device=kind)
done = api.Event()
done.record(side)
api.current_stream().wait_event(done)
out["streams"] = (on_side + 1).tolist()
api.manual_seed_all(3)
first = torch.rand(4, device=kind).tolist()
api.manual_seed_all(3)
out["seeds"] = first == torch.rand(4, device=kind).tolist()
out["generator"] = torch.rand(2, device=kind, generator=torch.Generator(device=kind).manual_seed(1)).tolist()
ids = torch.tensor([0, 2, 2, 9], device=kind)
out["counted"] = [torch.histc(ids.to(dtype), bins=4, min=0, max=3).tolist() for dtype in (torch.int32, torch.float32)]
out["storage"] = torch.arange(4, device=kind, dtype=torch.uint8).untyped_storage().cpu().tolist()
before = api.memory_allocated()
kept = torch.zeros(1024, device=kind)
out["allocated"] = api.memory_allocated() - before
out["fresh"] = torch.empty(8, dtype=torch.uint8, device=kind).tolist()
out["wait in capture"] = None
if GRAPH:
    graph, total = getattr(api, GRAPH)(), torch.zeros(2, device=kind)
    with api.graph(graph):
        total.add_(1)
        out["wait in capture"] = said(lambda: total.sum().item())
    graph.replay()
    graph.replay()
    out["replayed"] = total.tolist()
"""
GRAPHS = {"npu": "NPUGraph", "hip": "CUDAGraph", "xpu": ""}


@pytest.fixture(scope="module", params=POSES)
def answers(request, found_on):
    """What a child on each machine found out."""
    pose = request.param
    head = f"{IMPORTS[pose]}KIND, GRAPH = {POSES[pose]!r}, {GRAPHS[pose]!r}\n"
    return found_on(head + QUESTIONS, pose=pose, devices=2, memory_mib=256)


def test_devices_are_there_under_the_vendors_name(answers):
    assert answers["count"] == 2
    assert answers["first"] in ("npu:0", "cuda:0", "xpu:0")
    assert answers["memory"] == [256 << 20, 256 << 20]


def test_torch_computes_on_them(answers):
    assert answers["product"] == 27.0
    assert answers["bfloat16"] == "torch.bfloat16"


@pytest.mark.parametrize("question", ["mixed", "two devices"])
def test_tensors_of_two_devices_are_refused(answers, question):
    assert "Expected all tensors to be on the same device" in answers[question]


def test_a_device_that_does_not_exist_is_refused(answers):
    assert "invalid device ordinal" in answers["no such device"]


def test_memory_ends(answers):
    assert answers["out of memory"].startswith("OutOfMemoryError")


def test_a_result_read_before_its_event_is_garbage(answers):
    assert answers["pinned"]
    assert not answers["early"]
    assert answers["late"] == [0.0, 2.0, 4.0, 6.0]


def test_streams_wait_for_each_other(answers):
    assert answers["streams"] == [6.0, 6.0, 6.0]


def test_seeds_repeat_and_generators_have_their_own(answers):
    assert answers["seeds"]
    assert len(answers["generator"]) == 2


def test_storages_can_be_copied_whole(answers):
    assert answers["counted"] == [[1, 0, 2, 0], [1, 0, 2, 0]]
    assert answers["storage"] == [0, 1, 2, 3]


def test_allocations_are_counted_and_fresh_memory_holds_garbage(answers):
    assert answers["allocated"] == 4096
    assert answers["fresh"] == [0xC5] * 8


def test_captured_work_does_not_run_and_is_repeated(answers):
    if "replayed" in answers:
        assert answers["replayed"] == [2.0, 2.0]
        assert "capturing" in answers["wait in capture"]


def test_a_hip_build_says_so(found_on):
    found = found_on(
        "p = torch.cuda.get_device_properties(0)\nout.update(hip=torch.version.hip, cuda=torch.version.cuda, "
        "arch=p.gcnArchName, wave=p.warp_size)",
        pose="hip",
        chip="gfx1100",
    )
    assert found == {"hip": "7.0.51831", "cuda": None, "arch": "gfx1100", "wave": 32}


def test_a_lost_device_stays_lost(found_on):
    code = "import torch_npu\nx = torch.ones(4, 4, device='npu')\nout['first'] = said(lambda: (x @ x).sum().item())\n"
    found = found_on(
        code + "out['then'] = said(lambda: torch.ones(2, device='npu').sum().item())", pose="npu", fail="lost:aten::mm"
    )
    assert "device is lost" in found["first"]
    assert "device is lost" in found["then"]


def test_the_allocation_that_was_named_fails(found_on):
    code = "import torch_npu\nout['all'] = [said(lambda: torch.empty(8, device='npu').shape) for _ in range(3)]"
    found = found_on(code, pose="npu", fail="oom:2")
    assert [text.startswith("OutOfMemoryError") for text in found["all"]] == [False, True, False]


def test_following_an_address_of_the_device_ends_the_process(run_on):
    done = run_on("import ctypes, torch_npu\nctypes.string_at(torch.ones(4, device='npu').data_ptr(), 4)", pose="npu")
    assert done.returncode == -signal.SIGSEGV


def test_launches_are_counted_in_the_log(run_on, tmp_path):
    log = tmp_path / "log.json"
    run_on(
        "import torch_npu\ntorch.ones(2, 2, device='npu').mm(torch.ones(2, 2, device='npu'))",
        pose="npu",
        more={"SIMULATOR_LOG": str(log)},
    )
    assert '"aten::mm": 1' in log.read_text()
