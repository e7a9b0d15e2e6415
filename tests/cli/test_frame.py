"""Every way to end gives its exit code and at most one line of error."""

import json
import os
import signal
import subprocess
import sys

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


def test_an_interrupt_is_130_and_says_that_the_pull_can_go_on(run):
    code, output, errors = run("pull", "x", fails=raises(KeyboardInterrupt()))
    assert (code, output) == (130, "")
    assert errors.splitlines() == [
        "what has come so far is kept; the same command goes on from it",
        "armillary: interrupted",
    ]


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
