import json
import os

import torch
from safetensors.torch import save_file

import ckpt
from ckpt.saving.save import save
from tools.exit_codes import ExitCode
from tools.main import main


def test_quiet_names_problems_alone_and_a_terminal_gets_colours_unless_it_declines(
    run, damaged, tmp_path, monkeypatch, capsys
):
    ckpt.save(tmp_path / "sound", {"w": torch.zeros(4)})
    assert run("verify", "-q", tmp_path / "sound").out == ""
    (problem,) = run("verify", "-q", damaged).out.splitlines()
    assert str(damaged) in problem
    ours, theirs = os.openpty()
    for refused, term, is_coloured in (("", "xterm", 1), ("1", "xterm", 0), ("", "dumb", 0)):
        monkeypatch.setenv("NO_COLOR", refused)
        monkeypatch.setenv("TERM", term)
        with capsys.disabled(), os.fdopen(os.dup(theirs), "w") as terminal:
            monkeypatch.setattr("sys.stdout", terminal)
            main(["verify", str(tmp_path / "sound"), str(damaged)])
        shown = ""
        while shown.count(" compared\r\n") < 2:
            shown += os.read(ours, 4096).decode()
        assert ("\x1b[32msound\x1b[0m" in shown) == is_coloured
        assert ("\x1b[31mNOT SOUND, 1 problem\x1b[0m" in shown) == is_coloured
        assert ("\x1b" in shown) == is_coloured
    os.close(ours)
    os.close(theirs)


def test_a_sound_checkpoint_ends_with_zero(run, saved):
    ended = run("verify", saved)
    assert ended.code == ExitCode.FINE
    assert ended.out.startswith(f"{saved}: sound\n")
    assert "every bit" in ended.out


def test_a_flipped_bit_ends_with_one_and_names_file_tensor_and_bytes(run, damaged):
    ended = run("verify", damaged)
    (shard,) = damaged.glob("*.safetensors")
    assert ended.code == ExitCode.DIFFERENT
    assert ended.err == ""
    assert f"{shard}: model.embed.weight: bytes " in ended.out
    assert f"{damaged}: NOT SOUND, 1 problem\n" in ended.out


def test_json_has_the_report(run, damaged):
    ended = run("verify", damaged, "--json")
    assert ended.code == ExitCode.DIFFERENT
    report = json.loads(ended.out)
    assert report["sound"] is False
    (problem,) = report["problems"]
    assert problem["tensor"] == "model.embed.weight"
    assert problem["kind"] == "corrupt"
    assert problem["hi"] - problem["lo"] == 128


def test_a_format_without_checksums_is_not_called_more_than_it_is(run, tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "w.safetensors")
    ended = run("verify", tmp_path / "w.safetensors")
    assert ended.code == 0
    assert "structure and sizes only: this format has no checksums" in ended.out


def test_strays_are_notes(run, saved):
    (saved / "notes.txt").write_text("mine")
    ended = run("verify", saved)
    assert ended.code == 0
    assert "note: notes.txt is in the folder and not a part of the checkpoint\n" in ended.out


def test_many_problems_are_counted_and_the_first_are_shown(run, tmp_path):
    from ckpt.saving.save import save

    save(tmp_path / "c", {f"w{i:02d}": torch.ones(4) for i in range(30)})
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start : start + 30 * 16] = bytes(30 * 16)
    shard.write_bytes(data)
    out = run("verify", tmp_path / "c").out
    assert "... and 10 more; -v prints all\n" in out
    assert "NOT SOUND, 30 problems" in out
    assert "w29: bytes " not in out
    assert "w29: bytes " in run("verify", "-v", tmp_path / "c").out


def test_an_error_at_one_of_several_checkpoints_names_options(run, saved):
    ended = run("verify", "nothing://b/a", saved)
    assert f"{saved}: sound" in ended.out
    assert "check the URL, and --storage-option or the driver's" in ended.err


def test_several_checkpoints_are_verified_and_one_that_is_wrong_keeps_none_from_it(
    run, damaged, tmp_path
):
    for name in ("a", "b"):
        save(tmp_path / name, {"w": torch.ones(3)})
    ended = run("verify", tmp_path / "a", damaged, tmp_path / "b")
    assert ended.code == ExitCode.DIFFERENT
    assert [
        line.split(": ")[1][:9] for line in ended.out.splitlines() if "sound" in line.lower()
    ] == [
        "sound",
        "NOT SOUND",
        "sound",
    ]
    ended = run("verify", "--json", tmp_path / "none", tmp_path / "a", damaged)
    assert ended.code == ExitCode.NOT_A_CHECKPOINT
    assert "none" in ended.err
    reports = json.loads(ended.out)["reports"]
    assert [report["sound"] for report in reports] == [False, True, False]
