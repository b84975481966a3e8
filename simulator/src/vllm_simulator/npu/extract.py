"""Writes `schemas.txt` from the vendor's published wheel: `python -m vllm_simulator.npu.extract WHEEL`.

The wheel needs CANN's libraries. Empty ones stand for them: every symbol that the wheel leaves undefined becomes a function
that returns an error. With them the real package loads and registers its real ops and Meta kernels; no call reaches a device.
A C compiler and `nm` are needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_simulator.npu.dispatch import SCHEMAS

ERROR = 507899
"""`ACL_ERROR_RT_INTERNAL_ERROR`: what a stub answers, so that nothing passes for done."""
LIBRARIES = ("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so", "libatb.so")
VALUES = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 0; return 0; }",
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B3"; }',
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "no CANN: a stub"; }',
}
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1")
TIME_LIMIT_S = 300
DUMP = """
import torch, torch_npu
for schema in torch._C._jit_get_all_schemas():
    if schema.name.partition("::")[0] in ("npu", "atb"):
        print("SCHEMA", schema)
"""


def _symbols(path: Path, *flags: str) -> Mapping[str, str]:
    """Dynamic symbols by name, with their kind."""
    done = subprocess.run(["nm", "-D", *flags, str(path)], capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[-1].partition("@")[0]: row[-2] for row in rows if len(row) >= 2}


def _system_libraries() -> Iterable[Path]:
    listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.partition(" ")[0] in SYSTEM and path:
            yield Path(path)


def make_stubs(unpacked: Path, torch_folder: Path, target: Path) -> None:
    """Write libraries into ``target`` that define what the package in ``unpacked`` takes from CANN."""
    mine = [*unpacked.glob("torch_npu/lib/*.so"), *unpacked.glob("torch_npu/_C*.so")]
    others = [*torch_folder.glob("lib/*.so*"), *unpacked.glob("torch_npu.libs/*"), *_system_libraries()]
    wanted: dict[str, str] = {}
    defined: set[str] = set()
    for path in mine:
        wanted.update(_symbols(path, "--undefined-only"))
    for path in [*mine, *others]:
        defined.update(_symbols(path, "--defined-only"))
    missing = [
        one for one, kind in sorted(wanted.items()) if kind == "U" and one not in defined and not one.startswith(("Py", "_Py"))
    ]
    source = [_stub(index, name) for index, name in enumerate(missing)]
    code = target / "stubs.c"
    code.write_text("\n".join(source), encoding="utf-8")
    compiler = os.environ.get("CC", "cc")
    shared = [compiler, "-shared", "-fPIC", "-O0"]
    subprocess.run([*shared, "-Wl,-soname,libascendcl.so", "-o", str(target / "libascendcl.so"), str(code)], check=True)
    empty = target / "empty.c"
    empty.write_text("", encoding="utf-8")
    for name in LIBRARIES:
        subprocess.run([*shared, f"-Wl,-soname,{name}", "-o", str(target / name), str(empty)], check=True)


def _stub(index: int, name: str) -> str:
    if name in VALUES:
        return VALUES[name]
    if name.startswith(("_ZTV", "_ZTI", "_ZTS")):  # data of C++ classes
        return f'extern long data{index}[64] __asm__("{name}"); long data{index}[64];'
    return f'extern int call{index}(void) __asm__("{name}"); int call{index}(void) {{ return {ERROR}; }}'


def run_with_wheel(wheel: Path, code: str, folder: Path) -> str:
    """Run Python ``code`` in a process where the wheel's torch_npu loads on stubs; returns what it prints.

    Raises RuntimeError with the end of its errors.
    """
    import torch

    unpacked, stubs = folder / "wheel", folder / "stubs"
    if not unpacked.exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        stubs.mkdir()
        make_stubs(unpacked, Path(torch.__file__).parent, stubs)
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIME_LIMIT_S, cwd=folder)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-5:]))
    return done.stdout


def published(wheel: Path) -> Mapping[str, str]:
    """The schemas of all ops of the wheel, by qualified name."""
    with tempfile.TemporaryDirectory(prefix="vllm-simulator-") as folder:
        printed = run_with_wheel(wheel, DUMP, Path(folder))
    lines = [line.removeprefix("SCHEMA ") for line in printed.splitlines() if line.startswith("SCHEMA ")]
    return {line.partition("(")[0]: line for line in lines}


def main(wheel: Path) -> None:
    """Write the schemas of all its ops."""
    found = published(wheel)
    version = wheel.name.split("-")[1]
    head = f"# Schemas as torch-npu {version} registers them; written by `python -m vllm_simulator.npu.extract WHEEL`."
    SCHEMAS.write_text("\n".join([head, *(found[name] for name in sorted(found))]) + "\n", encoding="utf-8")
    print(f"{len(found)} schemas written to {SCHEMAS}")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
