"""One engine of bench/cpu.py, in whatever environment it is installed: reads names of workloads, answers with JSON.

    python cpu_child.py ENGINE MODEL THREADS OPTIONS BATCH_OUT [first]

decode: one request, 16 tokens in, 64 out; tokens a second without the prompt's step. prefill: 1,024 tokens in, one out.
batch: 32 requests at once, 128 in, BATCH_OUT out; tokens out a second, all told. All greedy, tokens from a seeded generator.
OPTIONS: those of the engine, as JSON. The engine `bandwidth` is none: it answers once with what memory can be read at.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from typing import Any

VOCABULARY = 30000
SHORT, DECODED, LONG, REQUESTS, EACH = 16, 64, 1024, 32, 128
_draw = random.Random(0)


def tokens(count: int) -> list[int]:
    """A prompt, another each time: nothing of it is in a prefix cache."""
    return [_draw.randrange(1000, VOCABULARY) for _ in range(count)]


def bandwidth(threads: int) -> dict[str, float]:
    """What a sum over half a gigabyte reads a second."""
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(1 << 27)
    times = []
    for _ in range(6):
        started = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - started)
    return {"read GB/s": numbers.nbytes / min(times) / 1e9}


class Offline:
    """vllm-core, and vLLM, which has the same offline interface."""

    def __init__(self, package: str, model: str, options: dict[str, Any], batch_out: int) -> None:
        self.batch_out = batch_out
        module = __import__(package)
        self._params = module.SamplingParams
        shared: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": REQUESTS}
        if package == "vllm":
            # Compiling takes it minutes at every start, for the few tokens of a benchmark.
            shared |= {"enforce_eager": True, "enable_prefix_caching": False}
        if options.get("load_format") == "dummy":
            shared["skip_tokenizer_init"] = True
        self.llm = module.LLM(model, **shared, **options)

    def generate(self, prompts: list[list[int]], count: int) -> float:
        """Seconds that it takes."""
        params = self._params(temperature=0.0, ignore_eos=True, max_tokens=count)
        started = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - started

    def decode(self) -> dict[str, float]:
        """The time of one token more is taken off."""
        prompt = tokens(SHORT)
        first = self.generate([tokens(SHORT)], 1)
        return {"decode tokens/s": (DECODED - 1) / (self.generate([prompt], DECODED) - first)}

    def prefill(self) -> dict[str, float]:
        """A prompt of its own each time."""
        return {"prefill tokens/s": LONG / self.generate([tokens(LONG)], 1)}

    def batch(self) -> dict[str, float]:
        """Everything counts, prompts too."""
        count = self.batch_out
        return {"batch tokens/s": REQUESTS * count / self.generate([tokens(EACH) for _ in range(REQUESTS)], count)}

    def first(self) -> None:
        """Text of a short answer."""
        outputs = self.llm.generate(["The capital of France is"], self._params(temperature=0.0, max_tokens=2), use_tqdm=False)
        print(outputs[0].outputs[0].text, flush=True)


class LlamaCpp:
    """llama-cpp-python; batches through its low-level interface, since its high-level one has none."""

    def __init__(self, model: str, threads: int, batch_out: int) -> None:
        self._batch_out = batch_out
        llama_cpp = self._lib = __import__("llama_cpp")
        self.llm = llama_cpp.Llama(model, n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = REQUESTS * 2 * EACH, 512, REQUESTS
        params.n_threads = params.n_threads_batch = threads
        self._model, self._params, self._context = self.llm.model, params, None

    def decode(self) -> dict[str, float]:
        """From the prompt's last token on."""
        self.llm.reset()
        self.llm.eval(tokens(SHORT))
        started = time.perf_counter()
        for _ in range(DECODED):
            self.llm.eval([self.llm.sample(temp=0.0)])
        return {"decode tokens/s": DECODED / (time.perf_counter() - started)}

    def prefill(self) -> dict[str, float]:
        """A prompt of its own each time."""
        self.llm.reset()
        prompt = tokens(LONG)
        started = time.perf_counter()
        self.llm.eval(prompt)
        self.llm.sample(temp=0.0)
        return {"prefill tokens/s": LONG / (time.perf_counter() - started)}

    def batch(self) -> dict[str, float]:
        """Prompts in batches of 512 tokens, then a token of every sequence a step."""
        lib = self._lib
        if self._context is None:
            self._context = lib.llama_init_from_model(self._model, self._params)
        context, vocab = self._context, lib.llama_n_vocab(lib.llama_model_get_vocab(self._model))
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        batch = lib.llama_batch_init(512, 0, 1)
        started = time.perf_counter()
        last: list[int] = []
        for begin in range(0, REQUESTS, 512 // EACH):
            sequences = range(begin, min(REQUESTS, begin + 512 // EACH))
            rows = [(token, at, seq, at == EACH - 1) for seq in sequences for at, token in enumerate(tokens(EACH))]
            last += self._run(batch, rows, vocab)
        for step in range(self._batch_out - 1):
            last = self._run(batch, [(token, EACH + step, seq, True) for seq, token in enumerate(last)], vocab)
        seconds = time.perf_counter() - started
        lib.llama_batch_free(batch)
        return {"batch tokens/s": REQUESTS * self._batch_out / seconds}

    def _run(self, batch: Any, rows: list[tuple[int, int, int, bool]], vocab: int) -> list[int]:
        """Decode rows of (token, position, sequence, wanted); the most likely token of each wanted one."""
        import numpy as np

        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        assert self._lib.llama_decode(self._context, batch) == 0, "llama_decode failed"
        found = []
        for i in (i for i, row in enumerate(rows) if row[3]):
            logits = np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, i), (vocab,))
            found.append(int(logits.argmax()))
        return found

    def first(self) -> None:
        """Text of a short answer."""
        print(self.llm("The capital of France is", max_tokens=2, temperature=0.0)["choices"][0]["text"], flush=True)


def main(name: str, model: str, threads: int, options: dict[str, Any], batch_out: int, rest: list[str]) -> None:
    """Load, then serve until the input ends."""
    if name == "bandwidth":
        print(json.dumps(bandwidth(threads)))
        return
    packages = {"ours": "vllm_core", "vllm": "vllm"}
    engine: Any = LlamaCpp(model, threads, batch_out) if name == "llama" else Offline(packages[name], model, options, batch_out)
    if rest:
        engine.first()
        return
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        answer = getattr(engine, line.strip())()
        answer["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
