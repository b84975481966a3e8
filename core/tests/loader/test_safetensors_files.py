from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save, save_file

from vllm_core.errors import WeightsError
from vllm_core.layers.shard import COLUMNS, ROWS, Cut
from vllm_core.loader.safetensors_files import INDEX, SINGLE, find, iterate


def sharded(write_folder, weight_map=None):
    first = {"b": torch.arange(4.0), "a": torch.ones(2, dtype=torch.bfloat16)}
    files = {"one.safetensors": save(first), "two.safetensors": save({"c": torch.zeros(3, dtype=torch.float16)})}
    default = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    return write_folder({**files, INDEX: {"weight_map": default if weight_map is None else weight_map}})


def test_single_file_keeps_dtypes_and_values(write_folder):
    tensors = {"x": torch.arange(6, dtype=torch.float16).reshape(2, 3), "y": torch.ones(1, dtype=torch.bfloat16)}
    got = dict(iterate(write_folder({SINGLE: save(tensors)})))
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) and got[name].dtype == tensors[name].dtype for name in tensors)


@pytest.mark.parametrize("cut", [Cut(ROWS, 1, 3), Cut(ROWS, 3, 6), Cut(COLUMNS, 2, 4), None])
def test_a_cut_is_that_of_the_whole_tensor(write_folder, cut):
    whole = torch.arange(20, dtype=torch.bfloat16).reshape(5, 4)
    asked = []

    def wanted(name, shape):
        asked.append((name, shape))
        return cut

    [(_, got)] = list(iterate(write_folder({SINGLE: save({"x": whole})}), wanted))
    assert asked == [("x", (5, 4))]
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, whole if cut is None else cut.take(whole))


def test_file_of_another_name_is_taken_where_it_is_the_only_one(write_folder):
    folder = write_folder({"weights.safetensors": save({"x": torch.ones(1)})})
    assert [name for name, _ in iterate(folder)] == ["x"]


def test_shards_are_read_in_order_each_tensor_once(write_folder):
    assert sorted(name for name, _ in iterate(sharded(write_folder))) == ["a", "b", "c"]


def test_tensors_that_the_index_does_not_name_are_left_out(write_folder):
    assert [name for name, _ in iterate(sharded(write_folder, {"a": "one.safetensors"}))] == ["a"]


def test_missing_shard_is_named(write_folder, four_parts):
    folder = sharded(write_folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"two\.safetensors") as caught:
        list(iterate(folder))
    assert caught.value.found == "1 of 2 files"
    four_parts(caught.value)


def test_tensor_missing_in_its_shard_is_named(write_folder):
    with pytest.raises(WeightsError, match="lost in"):
        list(iterate(sharded(write_folder, {"a": "one.safetensors", "lost": "two.safetensors"})))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "a\\b.safetensors", "x.bin", ".."]
)
def test_index_cannot_reach_outside_its_folder(write_folder, name):
    with pytest.raises(WeightsError, match="same folder"):
        find(sharded(write_folder, {"a": name}))


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_broken_index_is_an_error_in_four_parts(write_folder, four_parts, index):
    with pytest.raises(WeightsError) as caught:
        find(write_folder({INDEX: index}))
    four_parts(caught.value)


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.3, 0.5, 0.9, 0.99])
def test_truncated_file_is_an_error_with_its_size(tmp_path, four_parts, fraction):
    path = tmp_path / SINGLE
    save_file({"x": torch.zeros(100), "y": torch.zeros(100)}, path)
    size = int(path.stat().st_size * fraction)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(WeightsError, match=f"{size} bytes") as caught:
        list(iterate(tmp_path))
    four_parts(caught.value)


def test_header_of_absurd_length_is_an_error(write_folder):
    with pytest.raises(WeightsError, match="cannot be read"):
        list(iterate(write_folder({SINGLE: b"\xff" * 64})))


def test_pickled_weights_are_never_read_but_named(write_folder):
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin"):
        find(write_folder({"pytorch_model.bin": b"x"}))


def test_several_files_without_index_are_refused(write_folder):
    with pytest.raises(WeightsError, match="2 safetensors files and no index"):
        find(write_folder({"a.safetensors": b"", "b.safetensors": b""}))


def test_index_is_json_of_an_object(write_folder):
    folder = sharded(write_folder)
    assert json.loads((folder / INDEX).read_text())["weight_map"]["c"] == "two.safetensors"
    assert find(folder) == {"one.safetensors": ["a", "b"], "two.safetensors": ["c"]}
