"""`run-batch`: a file of requests, each answered on its own."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_core.cli.main import main
from vllm_core.serve import batch_file
from vllm_core.serve.features import Features

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "Hi"}]


def line(name: str, body: Any, url: str = "/v1/chat/completions", **more: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **more})


async def answer(engine: Any, *lines: str) -> tuple[int, dict[str | None, Any]]:
    out = io.BytesIO()
    counts = await batch_file.answer_all(engine, io.BytesIO("\n".join(lines).encode()), out, Features())
    answers = [json.loads(one) for one in out.getvalue().splitlines()]
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in answers)
    assert len({one["id"] for one in answers}) == len(answers)
    assert sum(counts) == len(answers)
    return counts.failed, {one["custom_id"]: one for one in answers}


async def test_each_line_has_its_answer(engine: Any) -> None:
    lines = [line(str(number), {"messages": HI}) for number in range(300)]
    failed, answers = await answer(engine, *lines, "", line("text", {"prompt": "a"}, "/v1/completions"))
    assert failed == 0
    assert len(answers) == 301
    assert answers["7"]["response"]["status_code"] == 200
    assert answers["7"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello wörld"
    assert answers["text"]["response"]["body"]["object"] == "text_completion"


async def test_an_id_belongs_to_one_line(engine: Any) -> None:
    failed, answers = await answer(
        engine, line("a", {"messages": HI}), line("a", {"messages": HI}), line("b", {"messages": HI})
    )
    assert failed == 1
    assert answers[None]["error"]["message"].startswith("Id is in use: custom_id of line 2")
    assert {"a", "b"} < set(answers)


async def test_a_wrong_request_fails_alone(engine: Any) -> None:
    failed, answers = await answer(engine, line("good", {"messages": HI}), line("bad", {"messages": HI, "temperature": -1}))
    assert failed == 1
    assert answers["good"]["response"]["status_code"] == 200
    assert answers["bad"]["response"]["status_code"] == 400
    assert answers["bad"]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    "wrong",
    [
        "{",
        "[]",
        '{"custom_id": "a"}',
        '{"custom_id": 1, "url": "/v1/completions", "body": {}}',
        line("a", [], "/v1/completions"),
        line("a", {}, "/metrics"),
        line("a", {}, "/v1/completions", method="GET"),
        line("a", {"prompt": "a", "stream": True}, "/v1/completions"),
    ],
)
async def test_a_line_that_is_no_request_is_an_error_of_its_own(engine: Any, wrong: str) -> None:
    failed, answers = await answer(engine, wrong, line("good", {"messages": HI}))
    assert failed == 1
    assert "line 1" in answers[None]["error"]["message"]
    assert answers["good"]["response"]["status_code"] == 200


async def test_no_more_lines_are_read_than_there_are_places(engine: Any) -> None:
    engine.max_num_seqs = 2
    failed, answers = await answer(engine, *(line(str(number), {"messages": HI}) for number in range(40)))
    assert (failed, len(answers)) == (0, 40)


async def test_vectors_too(pooling_engine: Any) -> None:
    _, answers = await answer(pooling_engine, line("a", {"input": "ab"}, "/v1/embeddings"))
    assert answers["a"]["response"]["body"]["data"][0]["embedding"] == [0.5, -0.25, 2.0]


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.jsonl"
    assert main(["run-batch", "-i", str(missing), "-o", "-", "--model", "demo"]) != 0
    assert str(missing) in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_answers_a_file(model_file: Any, tmp_path: Path) -> None:
    model = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8, "temperature": 0}
    requests.write_text("\n".join(line(str(number), body) for number in range(3)), encoding="utf-8")
    options = ["--max-model-len", "512", "--kv-cache-memory-bytes", "100000000"]
    assert main(["run-batch", "-i", str(requests), "-o", str(answers), "--model", str(model), *options]) == 0
    texts = [
        json.loads(one)["response"]["body"]["choices"][0]["message"]["content"] for one in answers.read_text().splitlines()
    ]
    assert len(texts) == 3
    assert "Paris" in texts[0]


async def test_an_output_that_cannot_be_written_ends_the_batch(engine: Any) -> None:
    """All was computed for nothing, and an answer that alone was not written went unnoticed."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    engine.max_num_seqs = 1
    lines = "\n".join(line(str(number), {"messages": HI}) for number in range(40)).encode()
    with pytest.raises(OSError, match="No space left"):
        await batch_file.answer_all(engine, io.BytesIO(lines), Full(), Features())
    assert len(engine.calls) < 40, "what cannot be written is not computed"


async def test_a_line_that_is_too_long_is_one_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 300)
    failed, answers = await answer(engine, "x" * 1000, line("good", {"messages": HI}))
    assert (failed, set(answers)) == (1, {None, "good"})
