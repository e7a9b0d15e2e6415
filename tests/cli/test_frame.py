"""Every way to end gives its exit code and at most one line of error."""

import importlib
import io
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import typer

import armillary
from armillary import cli
from armillary.errors import UserError


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command line; `fails` is what its command, `pull`, does instead of pulling."""

    def run_it(*arguments, fails=None):
        if fails is not None:
            monkeypatch.setattr("armillary.checkpoints.locate.locate", fails)
        code = cli.main(arguments)
        output, errors = capsys.readouterr()
        return code, output, errors

    return run_it


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


def test_a_users_error_is_one_line_and_2(run):
    code, output, errors = run("pull", "x", fails=raises(UserError("x: is wrong;\nmend it")))
    assert (code, output, errors) == (2, "", "armillary: x: is wrong; mend it\n")


def test_control_characters_from_a_file_do_not_reach_the_terminal(run):
    _, _, errors = run("pull", "x", fails=raises(UserError("key '\x1b[31m\x07é' is unknown")))
    assert errors == "armillary: key '\\x1b[31m\\x07é' is unknown\n"


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback_too(run, place):
    arguments = ["--debug", "pull", "x"] if place == "before" else ["pull", "x", "--debug"]
    code, _, errors = run(*arguments, fails=raises(UserError("x: is wrong")))
    assert code == 2
    assert errors.startswith("Traceback")
    assert errors.endswith("armillary: x: is wrong\n")


def test_debug_does_not_stay_on_for_the_next_run(run):
    run("pull", "x", "--debug", fails=raises(UserError("x")))
    assert run("pull", "x", fails=raises(UserError("x")))[2] == "armillary: x\n"


def test_a_fault_of_ours_says_so_and_is_1(run):
    code, output, errors = run("pull", "x", fails=raises(KeyError("lost")))
    assert (code, output) == (1, "")
    assert errors == (
        "armillary: a fault of armillary's own (KeyError: 'lost'); "
        "run it again with --debug to see where\n"
    )


def test_what_the_system_refuses_is_the_users_to_mend(run):
    refusal = PermissionError(13, "Permission denied", "/root/cache")
    assert run("pull", "x", fails=raises(refusal)) == (
        2,
        "",
        "armillary: /root/cache: Permission denied\n",
    )


def test_an_interrupt_is_130_and_one_line(run):
    assert run("pull", "x", fails=raises(KeyboardInterrupt())) == (
        130,
        "",
        "armillary: interrupted\n",
    )


@pytest.mark.parametrize("command", [["pull"], ["inspect"], ["generate", "-"]])
def test_an_interrupted_transfer_says_that_it_can_go_on(run, monkeypatch, command):
    def fetch(name, *, progress):
        progress("x.gguf", 1, 2)
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a prompt")))
    code, output, errors = run(command[0], "x", *command[1:], fails=fetch)
    assert (code, output) == (130, "")
    assert errors.splitlines()[-1] == (
        "armillary: interrupted; what has come so far is kept; the same command goes on from it"
    )


def test_an_interrupt_in_the_middle_of_imports_is_130_and_one_line():
    program = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from armillary.__main__ import run\n"
        "sys.exit(run())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "armillary: interrupted\n")


def test_the_script_and_the_module_start_the_same_process():
    [script] = [
        entry for entry in entry_points(group="console_scripts") if entry.name == "armillary"
    ]
    assert script.load() is importlib.import_module("armillary.__main__").run


@pytest.mark.parametrize(
    ("closed", "command", "code", "error"),
    [
        ("stdout", ["--version"], 0, ""),
        ("stdin", ["generate", "x", "-"], 2, "armillary: x: no such alias"),
        ("stderr", ["generate", "nothing", "x"], 2, ""),
    ],
)
def test_a_stream_that_is_closed_is_an_empty_one(closed, command, code, error):
    number = {"stdin": 0, "stdout": 1, "stderr": 2}[closed]
    done = subprocess.run(
        [sys.executable, "-m", "armillary", *command],
        stdin=None if closed == "stdin" else subprocess.DEVNULL,
        stdout=None if closed == "stdout" else subprocess.PIPE,
        stderr=None if closed == "stderr" else subprocess.PIPE,
        preexec_fn=lambda: os.close(number),
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert not done.stdout
    assert (done.stderr or "").startswith(error)
    assert (done.stderr or "").count("\n") == bool(error)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_error_that_cannot_be_said_still_has_its_code():
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "armillary", "nothing"], stderr=full, check=False
        )
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pul"], "No such command 'pul'. Did you mean 'pull'? (see armillary --help)"),
        (["pull"], "Missing argument 'MODEL' (see armillary pull --help)"),
        (["pull", "x", "--jsn"], "--jsn"),
        (["--nothing"], "--nothing"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line_and_2(run, arguments, message):
    code, output, errors = run(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("armillary: ")
    assert errors.count("\n") == 1
    assert message in errors


def test_version(run):
    assert run("--version") == (0, f"armillary {armillary.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(run, arguments):
    code, output, errors = run(*arguments)
    assert (code, errors) == (0, "")
    for command in cli.COMMANDS:
        assert f"{command.__name__} " in output


@pytest.mark.parametrize("command", [command.__name__ for command in cli.COMMANDS])
def test_help_shows_examples_before_options(run, command):
    _, output, _ = run(command, "--help")
    assert 0 < output.index("Examples:") < output.index(f"  armillary {command} ")
    assert output.index(f"  armillary {command} ") < output.index("Options")
    assert "--debug" in output


@pytest.mark.parametrize("command", [command.__name__ for command in cli.COMMANDS])
def test_a_command_lies_in_the_module_of_its_name(command):
    assert hasattr(sys.modules[f"armillary.cli.{command}"], command)


def test_a_path_that_the_terminal_cannot_show_is_escaped(tmp_path):
    folder = tmp_path / "模型"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "armillary", "pull", str(folder)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}/\\u6a21\\u578b\n"


def test_output_that_nobody_reads_ends_quietly():
    program = "import sys; from armillary.cli import main; sys.exit(main(['--help']))"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=nobody, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_interrupted_process_ends_with_130_and_one_line():
    program = (
        "import os, signal, sys; from armillary import cli\n"
        "def locate(*_, **__): os.kill(os.getpid(), signal.SIGINT)\n"
        "import armillary.checkpoints.locate as place; place.locate = locate\n"
        "sys.exit(cli.main(['pull', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.endswith("armillary: interrupted\n")
    assert "Traceback" not in done.stderr


def test_json_is_one_object_a_line(run, tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    code, output, errors = run("pull", str(tmp_path), "--json")
    assert (code, errors) == (0, "")
    assert output.count("\n") == 1
    assert json.loads(output)["path"] == str(tmp_path)


def test_exit_codes_of_typer_pass_through(run):
    assert run("pull", "x", fails=raises(typer.Exit(7)))[0] == 7
