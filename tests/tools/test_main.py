import ast
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt.errors import ExistsError, NotACheckpointError
from ckpt.installation import __version__
from ckpt.saving.save import save
from formats.errors import CorruptError, HostileError, UnsupportedError
from sharding.errors import HoleError
from tests import dcp_alone
from tools.exit_codes import MEANINGS, ExitCode, code_of
from tools.main import EXAMPLES, HELPS, parser

WHOLE = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
WHOLE += "from ckpt.__main__ import main; sys.exit(main())"


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", WHOLE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def in_shell(redirected, *arguments):
    """A run of the command with its streams redirected by a shell."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-m", "ckpt", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A file whose description is longer than any pipe holds."""
    save_file({f"tensor.{i:04d}": torch.zeros(1) for i in range(3000)}, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


@pytest.mark.parametrize("command", ["", *HELPS])
def test_help_has_a_description_examples_and_the_exit_codes_of_its_command(run, command):
    """The fixture `run` compares the codes of all tests of the commands with these."""
    ended = run(*command.split(), "--help")
    codes = HELPS[command].every_code if command else set(ExitCode)
    shown = {code for code, text in MEANINGS.items() if f"{code.value:>3}  {text}" in ended.out}
    assert (ended.code, shown) == (0, codes)
    examples = HELPS[command].examples if command else EXAMPLES
    assert len(examples) == 2
    for line, effect in examples:  # options and arguments are those of the command
        assert f"  {line}\n      {effect}\n" in ended.out
        for part in re.findall(r"ckpt [a-z]+ (?:(?! >)[^()\"]|\([0-9]\))+", line):
            assert parser().parse_args(shlex.split(part)[1:])
    assert ended.out.index("\n\n") < ended.out.index("options:")


@pytest.mark.thorough
def test_no_text_of_the_product_names_a_page_that_a_wheel_lacks():
    root = Path(__file__).parents[2]
    for package in ("ckpt", "formats", "sharding", "tools"):
        for path in (root / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            texts = {
                id(node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            }  # docstrings
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    assert id(node) in texts or not re.search(r"docs/\w+\.md", node.value), path


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["lst"], "there is no command 'lst'; did you mean ls?"),
        (["delete", "x"], "there is no command 'delete'; did you mean rm?"),
        (["xyzzy"], "there is no command 'xyzzy'; see `ckpt --help`"),
        (["rm", "x", "--missing_okay"], "--missing_okay; did you mean --missing-ok?"),
    ],
)
def test_a_mistyped_command_or_option_is_told_with_the_nearest(run, arguments, meant):
    ended = run(*arguments)
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert meant in ended.err


def test_every_exit_code_has_a_meaning():
    assert set(MEANINGS) == set(ExitCode)


def test_the_version_is_printed(run):
    assert run("--version").out == f"ckpt {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["bogus"],
        ["inspect"],
        ["diff", "a"],
        ["convert", "a", "b", "--to", "floppy"],
        ["convert", "a", "b", "--max-shard-size", "many"],
    ],
)
def test_wrong_arguments_are_one_line_that_says_where_to_look(run, arguments):
    ended = run(*arguments)
    assert ended.code == ExitCode.USAGE
    assert ended.out == ""
    assert ended.err.startswith("ckpt: ")
    assert ended.err.count("\n") == 1
    assert "--help`" in ended.err


ARGUMENTS = {
    "ls": (["folder"], ["-o", "key=1"]),
    "inspect": (["checkpoint", "name", "other"], ["--depth", "2"]),
    "verify": (["checkpoint", "other", "third"], ["-v"]),
    "diff": (["a", "b"], ["--rtol", "0.1"]),
    "id": (["checkpoint", "other"], ["-v"]),
    "convert": (["src", "dst"], ["--overwrite"]),
    "merge": (["src", "other", "dst"], ["--weights", "1,2"]),
    "plan": (["checkpoint"], ["--world-size", "2"]),
    "top": (["run"], ["--once"]),
    "serve": (["run"], ["--port", "1"]),
    "latest": (["folder"], ["--verify"]),
    "rm": (["checkpoint", "other"], ["-n"]),
    "cp": (["src", "dst"], ["-q"]),
    "pin": (["checkpoint", "name"], ["--remove"]),
    "gc": (["folder"], ["--delete"]),
    "doctor": (["folder"], ["--read-only"]),
    "completion": (["bash"], []),
}
"""Of each command: arguments that are not options, as many as it takes, and an option."""


def test_the_table_of_arguments_has_every_command():
    assert list(ARGUMENTS) == re.findall(r"^    ([a-z]+)", parser().format_help(), re.MULTILINE)


@pytest.mark.parametrize("command", ARGUMENTS)
def test_an_option_may_stand_before_between_and_after_the_other_arguments(command):
    (plain, option), whole = ARGUMENTS[command], parser()
    parsed = [
        whole.parse_args([command, *plain[:at], *option, *plain[at:]])
        for at in range(len(plain) + 1)
    ]
    assert all(one == parsed[0] for one in parsed)


@pytest.mark.parametrize("command", ARGUMENTS)
@pytest.mark.parametrize("unknown", ["--bogus", "extra"])
def test_an_unknown_argument_is_told_with_the_help_of_its_command(run, command, unknown):
    plain, option = ARGUMENTS[command]
    if unknown == "extra" and command in ("id", "inspect", "merge", "verify", "rm"):
        return  # these take any number
    ended = run(command, *plain, *option, unknown)
    assert ended.code == ExitCode.USAGE
    assert ended.err == f"ckpt: unrecognized arguments: {unknown}; see `ckpt {command} --help`\n"


def test_two_dashes_end_the_options():
    found = parser().parse_args(["inspect", "--values", "--", "-checkpoint", "-name"])
    assert (found.url, found.patterns, found.values) == ("-checkpoint", ["-name"], True)


def test_an_optional_argument_is_not_told_as_missing(run):
    assert run("inspect").err.startswith("ckpt: the following arguments are required: CHECKPOINT;")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotACheckpointError("x"), ExitCode.NOT_A_CHECKPOINT),
        (ExistsError("x"), ExitCode.EXISTS),
        (UnsupportedError("x"), ExitCode.UNSUPPORTED),
        (CorruptError("x"), ExitCode.DAMAGED),
        (HostileError("x"), ExitCode.DAMAGED),
        (HoleError("x"), ExitCode.DAMAGED),
        (ValueError("x"), ExitCode.USAGE),
        (PermissionError("x"), ExitCode.STORE),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (BrokenPipeError(), ExitCode.BROKEN_PIPE),
        (ZeroDivisionError(), ExitCode.INTERNAL),
    ],
)
def test_an_error_has_the_exit_code_of_what_to_do_about_it(error, code):
    assert code_of(error) == code


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_where_there_is_no_checkpoint_one_line_says_so(run, tmp_path, command):
    ended = run(command, tmp_path / "nothing")
    assert ended.code == ExitCode.NOT_A_CHECKPOINT
    assert ended.out == ""
    assert ended.err == f"ckpt: {tmp_path}/nothing: no checkpoint here (nothing is there)\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["latest", "{}/rum"], "(nothing is there); did you mean {}/run?"),
        (["ls", "{}/rum/step-3"], "(nothing is there); did you mean {}/run/step-3?"),
        (["inspect", "{}/run/step-4"], "(nothing is there); did you mean {}/run/step-3?"),
        (["rm", "{}/run/step-4"], "; did you mean {}/run/step-3?"),
        (["rm", "{}/rum", "--keep", "last=1"], "; did you mean {}/run?"),
        (["gc", "{}/rum"], "; did you mean {}/run?"),
        (["top", "{}/rum"], "; did you mean {}/run?"),
        (["latest", "{}"], "{}/run is a folder of checkpoints: `ckpt latest {}/run` prints the"),
        (["inspect", "{}/run"], "give one of these folders, such as {}/run/step-3 (`ckpt latest"),
        (["convert", "{}/run", "{}/out"], "such as {}/run/step-3 (`ckpt latest {}/run` prints"),
        (["latest", "{}/run/step-3/manifest.json"], ": this is a file; give a folder of"),
        (["latest", "{}/run/step-3"], ": this is a checkpoint itself; give the folder that"),
        (["ls", "{}/empty"], ": no checkpoint here (the folder is empty)"),
        (["rm", "{}/run"], "; give one of these folders, such as {}/run/step-3"),
        (["verify", "{}/run/"], "; `ckpt verify {}/run/*/` verifies all"),
    ],
)
def test_an_error_names_the_checkpoint_that_is_near(run, saved, tmp_path, arguments, said):
    (tmp_path / "empty").mkdir()
    ended = run(*(argument.replace("{}", str(tmp_path)) for argument in arguments))
    assert ended.code == ExitCode.NOT_A_CHECKPOINT
    assert said.replace("{}", str(tmp_path)) in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("name", ["hf/model.safetensors", "a.pt", "a.gguf", "a.npz"])
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_error_of_a_file_begins_with_its_path(run, tmp_path, command, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    start = {".gguf": b"GGUF", ".npz": b"PK\3\4", ".pt": b"PK\3\4"}.get(file.suffix, b"1234567")
    file.write_bytes(start)
    for place in {file, tmp_path / name.partition("/")[0]}:
        ended = run(command, place)
        assert f"{ended.out}{ended.err}".removeprefix("ckpt: ").startswith(str(place))


def test_several_checkpoints_may_be_given_with_the_slash_of_a_shell(run, saved):
    assert run("verify", f"{saved}/").out.startswith(f"{saved}: sound")
    (saved / "manifest.json").unlink()
    for command in ("inspect", "rm"):
        assert run(command, saved).err.endswith("or of one under way: see `ckpt gc`\n")


def test_a_damaged_file_is_one_line_without_a_traceback(run, saved, monkeypatch):
    manifest = saved / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    monkeypatch.delenv("CKPT_TRACEBACK", raising=False)
    ended = run("inspect", saved)
    assert ended.code == ExitCode.DAMAGED
    assert ended.err.count("\n") == 1
    assert "manifest.json" in ended.err


def test_the_traceback_is_there_for_those_who_ask(run, saved, monkeypatch):
    (saved / "manifest.json").write_bytes(b"")
    monkeypatch.setenv("CKPT_TRACEBACK", "1")
    ended = run("inspect", saved)
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("ckpt: ")


def test_a_disk_that_fails_is_an_error_of_the_store(run, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    ended = run("ls", tmp_path / "loop")
    assert ended.code == ExitCode.STORE
    place = f"{tmp_path}/loop/manifest.json"
    assert ended.err.startswith(
        f"ckpt: {place}: reading it failed: Too many levels of symbolic links;"
    )


def test_names_from_a_file_send_no_commands_to_the_terminal(run, tmp_path):
    save_file({"w\x1b[2J": torch.zeros(1)}, tmp_path / "evil.safetensors")
    for command in ("ls", "inspect"):
        ended = run(command, tmp_path / "evil.safetensors")
        assert "\x1b" not in ended.out
        assert r"w\x1b[2J" in ended.out


@pytest.mark.thorough
def test_a_reader_that_stops_reading_ends_the_command_quietly(wide):
    process = start("inspect", wide)
    process.stdout.close()
    assert process.wait(60) == ExitCode.BROKEN_PIPE
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.thorough
def test_ctrl_c_ends_the_command_with_one_line(wide):
    process = start("inspect", wide, "--json")
    assert process.stdout.read(1) == "{"  # the rest does not fit into the pipe
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert err == "ckpt: interrupted\n"


@pytest.mark.costly
@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
@pytest.mark.parametrize("kind", ["ckpt", "zstd", "safetensors", "torch", "dcp"])
def test_looking_into_a_checkpoint_imports_neither_torch_nor_numpy(command, kind, tmp_path):
    state = {"w": torch.arange(6.0).reshape(2, 3), "step": 1}
    url = tmp_path / {"safetensors": "w.safetensors", "torch": "w.pt"}.get(kind, "w")
    if kind in ("ckpt", "zstd"):
        save(url, state, compress=kind == "zstd")
    elif kind == "safetensors":
        save_file({"w": state["w"]}, url)
    elif kind == "torch":
        torch.save(state, url)
    else:
        dcp_alone.save(state, url)
    code = (
        "import sys; from tools.main import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy', 'fsspec', 'tqdm'} & set(sys.modules)), file=sys.stderr); "
        "sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, command, str(url)], capture_output=True, text=True, check=False
    )
    by_library = kind == "safetensors" and command == "verify"  # safetensors itself imports numpy
    assert ended.stderr == ("['numpy']\n" if by_library else "[]\n")
    assert ended.returncode == 0
    assert "w" in ended.stdout


def test_the_package_and_the_help_of_the_command_start_without_torch():
    code = (
        "import sys, ckpt; from tools.main import main; main(['rm', '--help']); "
        "sys.exit(sorted({'torch', 'numpy', 'fsspec', 'tqdm', 'argcomplete'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.stderr == "[]\n"


def test_a_conversion_starts_without_torch(saved, tmp_path):
    code = (
        "import sys; from tools.main import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "convert", "-q", str(saved), str(tmp_path / "w.safetensors")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr.splitlines()[-1:]) == (0, ["False"])


def test_json_goes_to_stdout_alone(run, saved):
    for arguments in (["ls", saved], ["inspect", saved], ["verify", saved], ["diff", saved, saved]):
        ended = run(*arguments, "--json")
        assert ended.code == 0
        assert ended.err == ""
        assert isinstance(json.loads(ended.out), dict)


def test_what_others_borrow_from_is_not_removed_nor_said_to_be_overwritable(run, tmp_path: Path):
    save(tmp_path / "a", {"w": torch.ones(5)})
    save(tmp_path / "b", {"w": torch.ones(5)}, base=tmp_path / "a")
    ended = run("rm", tmp_path / "a")
    assert ended.code == ExitCode.EXISTS
    assert "b beside it borrows from it" in ended.err
    assert "not removed as others borrow from it" in run("rm", "--help").out
    assert "--overwrite" not in ended.err


def test_overwriting_is_suggested_only_where_it_helps(run, tmp_path: Path):
    save(tmp_path / "a", {"w": torch.ones(5)})
    ended = run("convert", tmp_path / "a", tmp_path / "a", "--overwrite")
    assert ended.code == ExitCode.EXISTS
    assert "is the source itself" in ended.err
    assert "--overwrite" not in ended.err


@pytest.mark.parametrize(
    ("said", "meant"), [("True", "true"), ("False", "false"), ("None", "null")]
)
def test_a_storage_option_in_python_s_spelling_is_not_taken_for_text(run, said: str, meant: str):
    ended = run("ls", "s3://bucket/run", "-o", f"anon={said}")
    assert ended.code == ExitCode.USAGE
    assert f"say anon={meant}" in ended.err


@pytest.mark.thorough
@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-", ">/dev/full 2>&1"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["diff", "{}", "{}/nothing"], ExitCode.NOT_A_CHECKPOINT),
        (["verify", "{}", "--bogus"], ExitCode.USAGE),
        (["latest", "{}"], ExitCode.NOT_A_CHECKPOINT),
    ],
)
def test_an_error_that_cannot_be_told_has_its_exit_code(saved, redirected, arguments, code):
    ended = in_shell(redirected, *(argument.format(saved) for argument in arguments))
    assert (ended.returncode, ended.stdout) == (code, "")


@pytest.mark.thorough
def test_an_error_that_nobody_reads_has_its_exit_code(saved):
    process = start("diff", saved, saved / "nothing")
    process.stderr.close()
    assert process.wait(60) == ExitCode.NOT_A_CHECKPOINT
    process.stdout.close()


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "latest", "top"])
def test_a_closed_stdout_is_no_bug(saved, command):
    ended = in_shell(">&-", command, saved.parent if command in ("latest", "top") else saved)
    assert (ended.returncode, ended.stdout, ended.stderr) == (ExitCode.FINE, "", "")


def test_a_result_that_cannot_be_written_is_an_error_of_the_store(saved):
    ended = in_shell(">/dev/full", "ls", saved)
    assert ended.returncode == ExitCode.STORE
    assert ended.stderr == "ckpt: [Errno 28] No space left on device\n"


def test_ctrl_c_before_the_command_is_imported_ends_with_one_line():
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'tools.verify':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from ckpt.__main__ import main\n"
        "sys.exit(main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "ls"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (ExitCode.INTERRUPTED, "")
    assert ended.stderr == "ckpt: interrupted\n"
