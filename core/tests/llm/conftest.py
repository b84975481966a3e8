"""Small random models of transformers, written once, and engines on them through `LLM`."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_core import LLM, AsyncLLM, SamplingParams
from vllm_core.outputs import CompletionOutput, RequestOutput

END = 256
"""The tokenizer's end token; the others are bytes, in the order of the byte-level alphabet."""

VOCAB = 257
NEAR_TIE = 1e-4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": END,
}
OPTIONS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 23, "block_size": 16}


@dataclass
class Tiny:
    """A model in a folder, and transformers' own to compare with."""

    path: Path
    model: Any
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [n, V] of one sequence, computed whole."""
        key = tuple(tokens)
        if key not in self.known:
            with torch.inference_mode():
                self.known[key] = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
        return self.known[key]

    def greedy(
        self, prompt: Sequence[int], count: int, adjust: Callable[[torch.Tensor, list[int]], torch.Tensor] | None = None
    ) -> list[int]:
        """The most likely tokens, each of ``adjust(logits, tokens so far)``; a near-tie would compare nothing."""
        tokens = list(prompt)
        for _ in range(count):
            logits = self.logits(tokens)[-1].clone()
            logits = logits if adjust is None else adjust(logits, tokens)
            best = logits.topk(2).values
            assert best[0] - best[1] > NEAR_TIE, "near-tie in the reference: take another prompt"
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]


@dataclass
class Engines:
    """Makes engines and gives their memory back."""

    made: list[LLM] = field(default_factory=list)

    def __call__(self, model: Tiny | Path, **options: Any) -> LLM:
        path = model.path if isinstance(model, Tiny) else model
        self.made.append(LLM(str(path), **{**OPTIONS, **options}))
        return self.made[-1]

    def close(self) -> None:
        for llm in self.made:
            llm.shutdown()


def write_tokenizer(folder: Path, **config: Any) -> None:
    """A byte-level tokenizer: a token a byte, and `END`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", **config}), encoding="utf-8")


def write_model(folder: Path, architecture: str, **changes: Any) -> Tiny:
    """Random weights with a fixed seed, large enough that tokens differ and that attention matters."""
    import transformers

    cls = getattr(transformers, architecture)
    config = cls.config_class(**{**SIZES, **changes}, attn_implementation="eager", experts_implementation="eager")
    model = cls(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.1 * noise if parameter.ndim == 1 else 0.25 * noise)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(folder)
    return Tiny(folder, model)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Engines log their plans; failures should not drown in them."""
    caplog.set_level(logging.ERROR, logger="vllm_core")


@pytest.fixture(scope="session", autouse=True)
def one_thread(platform: str) -> Iterator[None]:
    """Models this small gain nothing from threads, and wait for each other where the machine has other work."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Tiny]:
    """Writes a model of an architecture into a folder."""
    return write_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Full attention alone."""
    return write_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Three layers, of which two see 24 tokens."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    changes = {"num_hidden_layers": 3, "layer_types": types, "sliding_window": 24, "query_pre_attn_scalar": 16}
    return write_model(tmp_path_factory.mktemp("gemma"), "Gemma3ForCausalLM", **changes)


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Makes engines for one test."""
    made = Engines()
    yield made
    made.close()


@pytest.fixture(scope="session")
def shared(llama: Tiny) -> Iterator[LLM]:
    """One engine on `llama` for all tests that leave no trace in it."""
    made = Engines()
    yield made(llama)
    made.close()


@pytest.fixture(scope="session")
def run() -> Callable[..., list[list[int]]]:
    """Generate and return the token ids."""

    def call(llm: LLM, prompts: Any, params: Any, **options: Any) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False, **options)]

    return call


@pytest.fixture(scope="session")
def one() -> Callable[..., CompletionOutput]:
    """Generate for one prompt and return its sequence."""

    def call(llm: LLM, prompt: Any, **params: Any) -> CompletionOutput:
        return llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0].outputs[0]

    return call


@pytest.fixture(scope="session")
def room() -> dict[str, Any]:
    """Options with which a request that nobody ends runs for seconds: a test that has to wait for a core still finds it."""
    return {"max_model_len": 8192, "hf_overrides": {"max_position_embeddings": 8192}, "kv_cache_memory_bytes": 1 << 25}


@pytest.fixture(scope="session")
def started() -> Callable[..., AbstractAsyncContextManager[AsyncLLM]]:
    """An engine in a process of its own, on a `Tiny` or a folder; it is shut down, and its process has ended, afterwards."""

    @asynccontextmanager
    async def start(model: Tiny | Path | str, **options: Any) -> AsyncIterator[AsyncLLM]:
        path = model.path if isinstance(model, Tiny) else model
        llm = AsyncLLM(model=str(path), **{**OPTIONS, **options})
        await llm.start()
        try:
            yield llm
        finally:
            process = llm._process
            llm.shutdown()
            if process is not None:
                await process.wait()

    return start


@pytest.fixture(scope="session")
def last() -> Callable[..., Awaitable[RequestOutput]]:
    """The final output of a request."""

    async def call(llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> RequestOutput:
        return [output async for output in llm.generate(prompt, params, name)][-1]

    return call


@dataclass
class Site:
    """A folder on the path of this process and, through `environ`, of its children."""

    folder: Path
    environ: dict[str, str]
    platform: str
    modules: list[str] = field(default_factory=list)

    def kernels(self, name: str, ops: dict[str, str], body: str) -> None:
        """Install a distribution that adds ``ops`` (name of the op to function in ``body``) to the platform under test."""
        plugin, kernels = f"plugin_{uuid.uuid4().hex}", f"kernels_{uuid.uuid4().hex}"
        entries = {op: f"{kernels}:{function}" for op, function in ops.items()}
        (self.folder / f"{kernels}.py").write_text(body, encoding="utf-8")
        (self.folder / f"{plugin}.py").write_text(
            "from vllm_core.api import Offer, hookimpl\n\n@hookimpl\ndef offers(device):\n"
            f"    return [Offer(provider={name!r}, kind='kernel', priority=99, ops={entries!r})]\n",
            encoding="utf-8",
        )
        info = self.folder / f"{self.platform}_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.platform}-{name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[vllm.platforms]\n{self.platform}.{name} = {plugin}\n", encoding="utf-8")
        self.modules += [plugin, kernels]
        importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str) -> Iterator[Site]:
    """An empty folder for plugins, found by this process and by engine processes."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", path)
    made = Site(folder, {**os.environ, "PYTHONPATH": path}, platform)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)
