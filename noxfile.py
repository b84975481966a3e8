"""Sessions of development; `nox -l` explains them, `nox -s tests -- core` runs one on one package.

Environments are kept and reused (`nox -R` also skips the installation). Torch comes from where pip is set up to look;
`run.py` says how to keep it to a CPU build.
"""

from __future__ import annotations

from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = {
    "core": "core",
    "conformance": "conformance",
    "cpu": "plugins/vllm-cpu",
    "triton": "plugins/vllm-triton",
    "cuda": "plugins/vllm-cuda",
    "rocm": "plugins/vllm-rocm",
    "xpu": "plugins/vllm-xpu",
    "ascend": "plugins/vllm-ascend",
    "simulator": "simulator",
    "toy": "examples/vllm-toy",
    "toy-static": "examples/vllm-toy-static",
}
PLATFORMS = ["toy", "cpu", "toy-static"]
SIMULATED = ["ascend", "rocm", "xpu"]
EXAMPLES = ["examples/vllm-toy", "examples/vllm-toy-static"]
PYPROJECT = nox.project.load_toml("pyproject.toml")

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]


def chosen(session: nox.Session) -> list[str]:
    """Packages named after `--`, or all; what starts with a dash is left for the tool."""
    names = [argument.removeprefix("vllm-") for argument in session.posargs if not argument.startswith("-")]
    unknown = [name for name in names if name not in PACKAGES]
    if unknown:
        session.error(f"no package {unknown[0]!r}; use one of: {', '.join(PACKAGES)}")
    return names or list(PACKAGES)


def options(session: nox.Session) -> list[str]:
    """Arguments after `--` that are for the tool."""
    return [argument for argument in session.posargs if argument.startswith("-")]


def install(session: nox.Session, *groups: str) -> None:
    """Install all packages from the checkout, and groups of pyproject.toml."""
    session.env.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"})
    requirements = [item for group in groups for item in nox.project.dependency_groups(PYPROJECT, group)]
    editable = [argument for path in PACKAGES.values() if path not in EXAMPLES for argument in ("-e", f"./{path}")]
    session.install("-c", "constraints.txt", *editable, *requirements)


def models(session: nox.Session, which: str) -> None:
    """Fetch model files for tests; quick when they are there."""
    session.run("python", "tools/fetch_models.py", which)


def pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest on two workers."""
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q", *arguments, *options(session))


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format, docstrings of the public API, and the borders between packages (ruff, interrogate, lint_borders)."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    paths = [PACKAGES[name] for name in chosen(session)] if session.posargs else ["."]
    session.run("ruff", "check", *paths)
    session.run("ruff", "format", "--check", *paths)
    session.run("interrogate", "--quiet", "core/src/vllm_core/api")
    session.run("python", "tools/lint_borders.py")


@nox.session
def types(session: nox.Session) -> None:
    """Static types: mypy in strict mode over all sources and tools."""
    install(session, "test", "lint")
    sources = [f"{PACKAGES[name]}/src" for name in chosen(session)]
    session.run("mypy", *sources, *([] if session.posargs else ["tools", "run.py"]))


@nox.session
def tests(session: nox.Session) -> None:
    """Tests that take minutes at most, real models included; the examples' in `examples`."""
    install(session, "test")
    models(session, "all")
    paths = [f"{PACKAGES[name]}/tests" for name in chosen(session) if PACKAGES[name] not in EXAMPLES]
    pytest(session, "-m", "not slow", *paths, *([] if session.posargs else ["tests"]))


@nox.session
def examples(session: nox.Session) -> None:
    """Tests of the simulated accelerators; a C++ compiler is needed."""
    install(session, "test")
    models(session, "demo")
    session.install("--no-deps", *(argument for path in EXAMPLES for argument in ("-e", f"./{path}")))
    pytest(session, *(f"{path}/tests" for path in EXAMPLES))


@nox.session
def conformance(session: nox.Session) -> None:
    """What platforms claim, proved by the suite; `-- cpu` names the platforms, `--subset=ci` runs the part that CI does."""
    install(session, "test")
    session.install("--no-deps", *(argument for path in EXAMPLES for argument in ("-e", f"./{path}")))
    platforms = [name for name in session.posargs if not name.startswith("-")] or PLATFORMS
    session.run("python", "tools/claims.py", *platforms, *options(session))


@nox.session
def kernels(session: nox.Session) -> None:
    """Tests of device code alone: the reference ops of core, and each plugin's own."""
    install(session, "test")
    folders = [ROOT / PACKAGES[name] / "tests" / "ops" for name in chosen(session)]
    present = [str(folder.relative_to(ROOT)) for folder in folders if folder.is_dir()]
    if not present:
        session.skip("no package named here has tests of ops")
    pytest(session, *present)


@nox.session
def sanitize(session: nox.Session) -> None:
    """Tests of vllm-cpu's native kernels, built with the address and undefined-behaviour sanitizers; cmake is needed."""
    install(session, "test")
    build = Path(session.create_tmp()) / "native"
    kind = ["-DVLLM_SANITIZE=ON", "-DVLLM_WIDE=OFF", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    session.run("cmake", "-S", PACKAGES["cpu"], "-B", str(build), *kind, external=True)
    session.run("cmake", "--build", str(build), "--parallel", "2", external=True)
    session.run("python", "tools/sanitized.py", str(build / "libvllm_cpu_ops.so"), *options(session))


@nox.session
def imitated(session: nox.Session) -> None:
    """vllm-cpu's kernels for AVX-512, VNNI, BF16 and AMX on a CPU with AVX2, by SIMDe (Debian: libsimde-dev)."""
    install(session, "test")
    build = Path(session.create_tmp()) / "imitated"
    session.run("cmake", "-S", PACKAGES["cpu"], "-B", str(build), "-DVLLM_IMITATED=ON", external=True)
    session.run("cmake", "--build", str(build), "--parallel", "2", external=True)
    session.env["VLLM_CORE_OPS_PATH"] = str(build / "libvllm_cpu_ops.so")
    names = ("attention", "guard", "invariance", "linear", "one_row", "ops")
    pytest(session, *(f"{PACKAGES['cpu']}/tests/test_native_{name}.py" for name in names))


@nox.session
def neon(session: nox.Session) -> None:
    """vllm-cpu's kernels for NEON, under an emulator (Debian: g++-aarch64-linux-gnu, qemu-user)."""
    install(session, "test")
    build, tests = Path(session.create_tmp()) / "neon", f"{PACKAGES['cpu']}/tests"
    machine = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"]
    session.run("cmake", "-S", PACKAGES["cpu"], "-B", str(build), *machine, external=True)
    session.run("cmake", "--build", str(build), "--parallel", "2", external=True)
    caller = str(build / "elsewhere")
    source = f"{tests}/native/elsewhere.c"
    session.run("aarch64-linux-gnu-gcc", "-O1", "-Icore/include", source, "-o", caller, "-ldl", external=True)
    session.env["VLLM_TEST_LIBRARY"] = str(build / "libvllm_cpu_ops.so")
    session.env["VLLM_TEST_EMULATOR"] = f"qemu-aarch64 -L /usr/aarch64-linux-gnu {caller}"
    pytest(session, f"{tests}/test_native_elsewhere.py")


@nox.session(name="xpu-kernels")
def xpu_kernels(session: nox.Session) -> None:
    """vllm-xpu's kernels by Intel's Triton to SPIR-V, and run on Intel's runtime for processors (400 MB, no GPU)."""
    install(session, "test")
    session.run("python", "tools/intel_kernels.py", "--required", "--all", *options(session))


@nox.session
def vendors(session: nox.Session) -> None:
    """Calls of the vendors' own packages against those packages: signatures, schemas, Meta kernels (230 MB, nothing is run)."""
    install(session, "test")
    session.run("python", "tools/vendors.py", "--required", *options(session))


@nox.session
def wheels(session: nox.Session) -> None:
    """Wheels and sdists into dist/, their contents checked, each installed alone with only what it declares."""
    session.install("build", "tomli; python_version < '3.11'")
    names = chosen(session)
    session.run("python", "tools/wheels.py", "build", *names)
    for name in names:
        session.run("python", "tools/clean_install.py", name)


@nox.session
def docs(session: nox.Session) -> None:
    """The examples in README and docs run, links lead somewhere, the support matrix is up to date."""
    install(session, "test")
    models(session, "demo")
    pytest(session, "tests/test_docs.py", "tests/test_matrix.py")


@nox.session
def bench(session: nox.Session) -> None:
    """Host time per step on a null model (`vllm-core bench host`), with its profile."""
    install(session)
    session.run("vllm-core", "bench", "host", *options(session))


@nox.session
def full(session: nox.Session) -> None:
    """Everything: slow tests, all models; the suite on simulated hardware; tox where its Pythons are; vendors, xpu-kernels."""
    install(session, "test", "lint")
    models(session, "all")
    paths = [f"{PACKAGES[name]}/tests" for name in chosen(session)]
    pytest(session, *paths, *([] if session.posargs else ["tests"]))
    if not session.posargs:
        session.run("python", "tools/claims.py", *SIMULATED)
        session.notify("vendors")
        session.notify("xpu-kernels")
    session.run("tox", "run", *([] if not session.posargs else ["-e", ",".join(chosen(session))]))
