import json
import shutil
import time

import torch

import ckpt
from ckpt.display import size
from ckpt.saving.save import save
from tools.exit_codes import ExitCode

COUNTED = ("PARAMETERS", "SIZE", "RANKS")


def test_the_checkpoints_of_a_run_are_listed_in_the_order_of_their_numbers(run, tmp_path):
    for step in (10, 9, 100):
        save(tmp_path / f"step-{step}", {"w": torch.zeros(4), "step": step})
    lines = run("ls", tmp_path).out.splitlines()
    assert lines[0].split() == ["NAME", "FORMAT", "TENSORS", *COUNTED, "SAVED", "STATE"]
    assert [line.split()[0] for line in lines[1:]] == ["step-9", "step-10", "step-100"]
    *row, day, _, _, state = lines[1].split()
    on_disk = size(sum(file.stat().st_size for file in (tmp_path / "step-9").iterdir()))
    assert row == ["step-9", "ckpt", "1", "4", *on_disk.split(), "1"]
    assert (day, state) == (time.strftime("%Y-%m-%d", time.gmtime()), "complete")


def test_a_save_that_was_not_finished_is_listed_as_such(run, saved):
    begun = saved.parent / "step-4"
    begun.mkdir()
    for shard in saved.glob("*.safetensors"):
        shutil.copy(shard, begun)
    assert run("ls", saved.parent).out.splitlines()[-1].split()[-1] == "unfinished"


def test_a_save_that_is_being_written_is_listed_as_unfinished(run, saved):
    begun = saved.parent / "step-4"
    begun.mkdir()
    (begun / ".0123456789abcdef-00000.safetensors.1a2b3c4d.part").write_bytes(b"")
    assert run("ls", saved.parent).out.splitlines()[-1].split()[-1] == "unfinished"


def test_missing_and_damaged_files_are_told(run, saved):
    shutil.copytree(saved, saved.parent / "step-4")
    next((saved.parent / "step-4").glob("*.safetensors")).unlink()
    shutil.copytree(saved, saved.parent / "step-5")
    (saved.parent / "step-5" / "manifest.json").write_bytes(b"{}")
    shutil.copytree(saved, saved.parent / "step-6")
    with next((saved.parent / "step-6").glob("*.safetensors")).open("ab") as shard:
        shard.write(b"x")
    ended = run("ls", saved.parent)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[2].endswith("1 of 2 files missing")
    assert "corrupt: " in lines[3]
    assert lines[4].endswith("1 of 2 files cut or appended to")


def test_other_formats_and_nothing_else_are_listed(run, saved):
    torch.save({"w": torch.zeros(2)}, saved.parent / "old.pt")
    (saved.parent / "logs").mkdir()
    (saved.parent / "notes.txt").write_text("no checkpoint")
    names = [line.split()[0] for line in run("ls", saved.parent).out.splitlines()[1:]]
    assert names == ["old.pt", "step-3"]


def test_of_a_checkpoint_the_tensors_are_listed_tied_names_too(run, saved):
    lines = run("ls", saved).out.splitlines()
    assert lines[0].split() == ["model.embed.weight", "float32", "[8,", "4]", "128", "B"]
    assert lines[-1].split()[0] == "model.head.weight"
    assert len(lines) == 5


def test_json_lists_checkpoints_and_tensors(run, saved):
    (row,) = json.loads(run("ls", saved.parent, "--json").out)["checkpoints"]
    assert row["name"] == "step-3"
    assert row["tensors"] == 4
    assert row["state"] == "complete"
    tensors = json.loads(run("ls", saved, "--json").out)["tensors"]
    assert tensors[0]["shape"] == [8, 4]


def test_a_folder_with_nothing_to_list_is_no_checkpoint(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run("ls", tmp_path / "empty").code == ExitCode.NOT_A_CHECKPOINT


def test_a_damaged_checkpoint_by_itself_is_an_error(run, saved):
    (saved / "manifest.json").write_bytes(b"{}")
    assert run("ls", saved).code == ExitCode.DAMAGED
    assert run("ls", saved / "manifest.json").code == ExitCode.DAMAGED


def test_without_a_folder_the_working_one_is_listed(run, saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    assert "step-3" in run("ls").out


def test_a_link_that_leads_to_itself_hides_no_checkpoint(run, saved):
    (saved.parent / "loop").symlink_to("loop")
    (saved / "loop").symlink_to("loop")
    ended = run("ls", saved.parent)
    assert (ended.code, ended.err) == (0, "")
    assert [line.split()[0] for line in ended.out.splitlines()] == ["NAME", saved.name]
    for command in ("latest", "gc"):
        assert run(command, saved.parent).code == 0


def trained(folder):
    """A run of three steps, of which the second is cut."""
    with ckpt.Checkpointer(folder, every_steps=10, signals=()) as run:
        for step in (10, 20, 30):
            run.save(step, {"w": torch.zeros(4)}, {"loss": 10 / step, "accuracy": 0.5})
    with next((folder / "step-20").glob("*.safetensors")).open("ab") as shard:
        shard.write(b"x")


def test_the_checkpoints_of_a_run_show_steps_ages_soundness_and_metrics(run, tmp_path):
    trained(tmp_path)
    save(tmp_path / "final", {"w": torch.zeros(4)})
    lines = run("ls", tmp_path).out.splitlines()
    assert lines[0].split() == ["NAME", "STEP", "AGE", *COUNTED, "STATE", "METRICS"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["final", "-"],
        *([f"step-{step}", str(step)] for step in (10, 20, 30)),
    ]
    assert lines[2].split()[-3:] == ["complete", "accuracy=0.5,", "loss=1"]
    assert lines[3].endswith("1 of 2 files cut or appended to  accuracy=0.5, loss=0.5")
    assert lines[4].split()[3] == "s"


def test_a_file_beside_a_folder_of_dcp_hides_it_no_more_than_one_of_ours(run, saved, tmp_path):
    folder = tmp_path / "both"
    for name in ("model.safetensors", "dcp"):
        to = () if "." in name else ("--to", name)
        assert run("convert", "-q", saved, folder / name, *to, "--model-only").code == 0
    rows = run("ls", folder).out.splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [
        ["dcp", "dcp"],
        ["model.safetensors", "safetensors"],
    ]


def test_a_file_that_was_converted_into_the_folder_of_a_run_hides_no_checkpoint(run, tmp_path):
    trained(tmp_path)
    ckpt.convert(tmp_path / "step-30", tmp_path / "model.safetensors")
    lines = run("ls", tmp_path).out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "model.safetensors",
        *("step-10", "step-20", "step-30"),
    ]
    assert run("ls", tmp_path / "model.safetensors").out.split()[:2] == ["w", "float32"]
    (tmp_path / "step-30").rename(tmp_path / "first")
    for step in (10, 20):
        shutil.rmtree(tmp_path / f"step-{step}")
    lines = run("ls", tmp_path).out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["first", "model.safetensors"]


def test_the_program_of_a_run_is_shown_on_request(run, tmp_path):
    trained(tmp_path)
    assert "command: " not in run("ls", tmp_path).out
    text = run("ls", tmp_path, "-v").out
    assert text.count("    command: ") == text.count("    hosts: ") == 3
    assert f"    torch: {torch.__version__}\n" in text
    row = json.loads(run("ls", tmp_path, "--json").out)["checkpoints"][2]
    assert (row["step"], row["metrics"]) == (30, {"accuracy": 0.5, "loss": 10 / 30})
    assert row["program"]["host_count"] == 1
    assert 0 <= row["age_seconds"] < 600
