"""The command line: help, what reaches the functions behind it, bad input, exit codes."""

import contextlib
import json
import os
import subprocess
import sys
from typing import ClassVar

import pytest

from hotspa_plugin.cli import doctor_checks, options
from hotspa_plugin.cli.main import commands, run
from hotspa_plugin.cli.verify import default_lengths
from hotspa_plugin.runtime import launch, worker_pool
from hotspa_plugin.runtime.rank_failure import FailureKind, RankFailure, RankReport, UserError

POOL = "tp1:64 tp2:256 tp2pp2:1024"
RESULT = {
    "max_relative_gradient_error": 4e-7,
    "worst_tensor": "decoder.layers.3.mlp.linear_fc2.weight",
    "tensor_parallel_copies_identical": True,
    "max_relative_loss_error": 1e-7,
    "parameters_bit_identical": True,
    "sequences_in": 4,
    "sequences_trained": 4,
    "target_tokens": 197,
    "num_process_groups_after_start": 20,
    "num_process_groups_at_end": 20,
    "exact": True,
    "problems": [],
}


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch, tmp_path):
    for name in doctor_checks.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def calls(monkeypatch):
    """Puts recorders in place of the functions behind the commands; ``calls.answer`` is what they return or raise."""

    class Calls(list):
        answer = None
        planned: ClassVar[list] = []

    class Pool(contextlib.nullcontext):
        def __init__(self, num_ranks, extra_reference, device, **_):
            super().__init__(self)
            self.asked_for = (num_ranks, extra_reference, device)

    recorded = Calls()

    def record(*args, **kwargs):
        recorded.append((args, kwargs))
        if isinstance(recorded.answer, BaseException):
            raise recorded.answer
        return recorded.answer

    for name in ("RUN_DEMO", "TRAIN_RANK", "VERIFY_CASE", "WRITE_REPORT"):
        monkeypatch.setattr(options, name, record)
    monkeypatch.setattr(options, "PLAN_TRAINING", lambda config, **_: recorded.planned.append(config))
    monkeypatch.setattr(launch, "launch", lambda function, *args, **kwargs: function(*args, **kwargs))
    monkeypatch.setattr(worker_pool, "WorkerPool", Pool)
    return recorded


def test_help_needs_nothing_heavy():
    code = (
        "import sys; from hotspa_plugin.cli.main import run; code = run(['--help']); "
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'yaml'}; "
        "sys.exit(code or ', '.join(heavy & sys.modules.keys()) or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert shown.returncode == 0, shown.stderr
    listed = [line.split()[0] for line in shown.stdout.partition("Commands:")[2].splitlines() if line.startswith("  ")]
    assert listed[: len(commands.commands)] == list(commands.commands)


def test_no_command_shows_the_help(capsys):
    assert run([]) == 0
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize("command", list(commands.commands))
def test_each_command_has_help(capsys, command):
    assert run([command, "--help"]) == 0
    assert f"hotspa {command}" in capsys.readouterr().out


def test_demo_passes_on_what_was_asked_for(calls, tmp_path):
    arguments = ["demo", "--ranks", "2", "--steps", "3", "--pool", "tp1:32 tp2:64", "--out", "here", "--seed", "5"]
    assert run([*arguments, "--all-static", "--timeout", "60"]) == 0
    [((config,), kwargs)] = calls
    assert (config.pool, config.model.preset, config.data.source) == ("tp1:32 tp2:64", "tiny-llama", "stdlib")
    assert (config.run.steps, config.run.out, config.run.seed, config.run.timeout_s) == (3, "here", 5, 60.0)
    assert (kwargs["num_ranks"], kwargs["include_all_static"]) == (2, True)
    assert kwargs["command"] == (
        "hotspa demo --ranks 2 --steps 3 --pool 'tp1:32 tp2:64' --out here --seed 5 --all-static --timeout 60"
    )
    assert list(tmp_path.iterdir()) == []


def test_demo_takes_the_next_free_folder(calls, tmp_path):
    for name in ("demo", "demo-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    assert run(["demo"]) == 0
    assert calls[0][0][0].run.out == "runs/demo-3"


def test_train_reads_the_config_with_its_overrides(calls, tmp_path):
    (tmp_path / "c.yaml").write_text("run: {steps: 3, seed: 8, timeout_s: 60}\npool: tp1:64 tp2:128\n")
    assert run(["train", "c.yaml", "--ranks", "2", "--steps", "9", "--out", "there", "--resume"]) == 0
    [((num_ranks, (config, command)), kwargs)] = calls
    assert (config.run.steps, config.run.seed, config.run.out, config.run.resume) == (9, 8, "there", True)
    assert command == "hotspa train c.yaml --ranks 2 --steps 9 --out there --resume"
    assert num_ranks == 2
    assert (kwargs["timeout_s"], kwargs["device"]) == (60.0, "auto")
    assert calls.planned[-1] is config, "checked before ranks were started"


def test_train_under_torchrun(calls, tmp_path, monkeypatch, capsys):
    (tmp_path / "c.yaml").write_text("pool: tp1:64 tp2:128\n")
    for name, value in zip(doctor_checks.RANK_VARIABLES, ("1", "4", "localhost", "1234"), strict=True):
        monkeypatch.setenv(name, value)
    assert run(["train", "c.yaml"]) == 0
    assert calls[0][0][0] is None
    assert run(["train", "c.yaml", "--ranks", "2"]) == 2
    assert "torchrun started 4" in capsys.readouterr().err
    assert run(["verify", "--pool", POOL]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_train_prints_a_config_that_it_accepts(calls, tmp_path, capsys):
    assert run(["train", "--print-config"]) == 0
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    assert run(["train", "c.yaml", "--check"]) == 0
    (tmp_path / "d.yaml").write_text(capsys.readouterr().out)
    assert run(["train", "d.yaml", "--ranks", "4"]) == 0
    assert len(calls) == 1


def test_verify_within_bounds(calls, tmp_path, capsys):
    calls.answer = RESULT
    arguments = ["verify", "--pool", POOL, "--lengths", "7,129, 1 64", "--json", "r.json", "--dtype", "fp32"]
    assert run([*arguments, "--steps", "2", "--home", "tp2", "--model", "tiny-gpt", "--dropout", "0.1"]) == 0
    [((workers, case), _)] = calls
    assert workers.asked_for == (4, True, "auto")
    assert case.lengths == ((7, 129, 1, 64), (7, 129, 1, 64))
    assert (case.pool, case.home, case.packing, case.distributed_optimizer) == (POOL, "tp2", "packed", False)
    assert (case.model, case.model_changes["dropout"]) == ("tiny-gpt", 0.1)
    written = json.loads((tmp_path / "r.json").read_text())
    assert {key: written[key] for key in RESULT} == RESULT
    assert written["settings"]["pool"] == POOL
    captured = capsys.readouterr()
    assert "does not change the numbers" in captured.out
    assert captured.err == ""
    assert run(arguments) == 0, "an own result is written over"


def test_verify_beyond_bounds(calls, tmp_path, capsys):
    problem = "gradient of decoder.layers.3.mlp.linear_fc2.weight is off by nan, over 1e-05"
    calls.answer = {**RESULT, "max_relative_gradient_error": float("nan"), "exact": False, "problems": [problem]}
    assert run(["verify", "--pool", POOL, "--lengths", "7", "--json", "r.json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"beyond bounds: {problem}\n"
    assert "BEYOND BOUNDS" in captured.out
    assert "linear_fc2" in captured.out
    written = json.loads((tmp_path / "r.json").read_text())
    assert (written["exact"], written["max_relative_gradient_error"]) == (False, "nan")


def test_verify_in_bf16_shows_homes_own_error(calls, capsys):
    calls.answer = {**RESULT, "whole_gradient_error": 1.9e-3, "static_whole_gradient_error": 1e-3}
    assert run(["verify", "--pool", POOL, "--dtype", "bf16"]) == 0
    assert "1.90e-03   at most 2.00e-03, 2 x home's static run" in capsys.readouterr().out


def test_verify_takes_a_model_from_a_configuration(calls, tmp_path):
    from hotspa_plugin.config import ModelConfig

    calls.answer = RESULT
    (tmp_path / "c.yaml").write_text(
        "model: {num_layers: 2, hidden_size: 96, num_attention_heads: 4, activation: gelu, vocab_size: 50257}\n"
    )
    assert run(["verify", "--pool", "tp1:64 tp2:128", "--model", "c.yaml"]) == 0
    case = calls[0][0][1]
    rebuilt = ModelConfig.model_validate({"preset": case.model, **case.model_changes})
    assert (rebuilt.num_layers, rebuilt.ffn_hidden_size, rebuilt.num_query_groups) == (2, 384, 4)
    assert (rebuilt.activation, rebuilt.linear_bias, case.vocab_size) == ("gelu", False, 50257)


def test_verify_lengths(calls, tmp_path):
    calls.answer = RESULT
    (tmp_path / "lengths.txt").write_text("7 129 # two of them\n\n1,64\n")
    assert run(["verify", "--pool", POOL, "--lengths-file", "lengths.txt", "--steps", "1"]) == 0
    assert calls[0][0][1].lengths == ((7, 129, 1, 64),)
    assert run(["verify", "--pool", POOL, "--steps", "1"]) == 0
    [lengths] = calls[1][0][1].lengths
    for below, bound in ((0, 64), (64, 256), (256, 1024)):
        assert {below + 1, bound} <= set(lengths)
    assert default_lengths((1,)) == (1,)


def test_sequence_parallelism_can_be_switched_off(calls):
    calls.answer = RESULT
    assert run(["verify", "--pool", POOL, "--no-sequence-parallel", "--home", "tp2"]) == 0
    case = calls[0][0][1]
    assert case.pool == "tp1:64 tp2nosp:256 tp2pp2nosp:1024"
    assert case.home == "tp2nosp"


def test_report(calls, tmp_path, capsys):
    calls.answer = "here/report.html"
    (tmp_path / "here").mkdir()
    assert run(["report", "here"]) == 0
    assert capsys.readouterr().out == "here/report.html\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["verfy"], "there is no command verfy; did you mean verify?"),
        (["zzz"], "there is no command zzz; known are demo"),
        (["verify"], "'--pool'"),
        (["verify", "--poool", "x"], "--poool"),
        (["verify", "--pool", "tp3:64"], "use 3 or 6 ranks"),
        (["verify", "--pool", "tp1"], "lacks a length bound"),
        (["verify", "--pool", "tp1:64", "--ranks", "0"], "--ranks"),
        (["verify", "--pool", "tp2:64 tp1:32"], "ascending"),
        (["verify", "--pool", "tp16:64", "--ranks", "16"], "num_attention_heads"),
        (["verify", "--pool", "tp1:64", "--home", "tp2"], "home tp2 is not in it"),
        (["verify", "--pool", "cp2:64"], "not supported yet"),
        (["verify", "--pool", POOL, "--dtype", "fp16"], "'fp16' is not one of"),
        (["verify", "--pool", POOL, "--model", "tiny-bert"], "--model tiny-bert: neither a file nor one of tiny-gpt"),
        (["verify", "--pool", POOL, "--lengths", "7,x"], "'x' is no sequence length"),
        (["verify", "--pool", POOL, "--lengths", "7,0"], "'0' is no sequence length"),
        (["verify", "--pool", POOL, "--lengths", ","], "there is no length in it"),
        (
            ["verify", "--pool", POOL, "--lengths", "7,1025"],
            "sequence 2 has 1025 tokens, over the pool's last bound 1024",
        ),
        (["verify", "--pool", POOL, "--lengths-file", "none.txt"], "--lengths-file none.txt: cannot be read"),
        (["verify", "--pool", POOL, "--lengths-file", "wrong.txt"], "wrong.txt: '-3' (line 2) is no sequence length"),
        (["verify", "--pool", POOL, "--lengths", "7", "--lengths-file", "wrong.txt"], "both given"),
        (["verify", "--pool", POOL, "--json", "none/r.json"], "there is no folder none"),
        (["verify", "--pool", POOL, "--json", "wrong.txt"], "choose another name or add --force"),
        (["verify", "--pool", POOL, "--json", "other.json"], "choose another name or add --force"),
        (["verify", "--pool", POOL, "--json", "run"], "is a folder"),
        (["demo", "--out", "run"], "output folder run holds another run"),
        (["demo", "--out", "wrong.txt"], "output folder wrong.txt is a file"),
        (["demo", "--ranks", "3"], "world size 3"),
        (["demo", "--steps", "0"], "--steps"),
        (["train"], "CONFIG.yaml is missing"),
        (["train", "none.yaml"], "none.yaml: there is no such file"),
        (["train", "wrong.yaml", "--ranks", "4"], "wrong.yaml:1: unknown key rum; did you mean run?"),
        (["train", "good.yaml"], "the number of ranks is missing"),
        (["train", "good.yaml", "--ranks", "3"], "world size 3"),
        (["train", "good.yaml", "--ranks", "4", "--out", "run"], "output folder run holds another run"),
        (["train", "folder.yaml", "--ranks", "4"], "data.path texts: there is no such folder"),
        (["report", "none"], "none: there is no such folder"),
        (["report", "wrong.txt"], "wrong.txt: is a file"),
        (["report", "run", "--out", "wrong.txt"], "--out wrong.txt: is there already"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(calls, tmp_path, capsys, arguments, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "wrong.txt").write_text("7\n-3\n")
    (tmp_path / "other.json").write_text('{"format": "something else"}')
    (tmp_path / "good.yaml").write_text("pool: tp1:64 tp4:128\n")
    (tmp_path / "wrong.yaml").write_text("rum: {}\n")
    (tmp_path / "folder.yaml").write_text("data: {source: folder, path: texts}\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert text in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert calls == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_force_writes_over_another_file(calls, tmp_path):
    calls.answer = RESULT
    (tmp_path / "wrong.txt").write_text("mine")
    assert run(["verify", "--pool", POOL, "--json", "wrong.txt", "--force"]) == 0
    assert json.loads((tmp_path / "wrong.txt").read_text())["format"] == "hotspa verify"


def test_what_a_command_raises_becomes_a_message_and_an_exit_code(calls, capsys):
    reports = [
        RankReport(label="rank 2", kind=FailureKind.DIED, summary="killed by SIGKILL (signal 9)"),
        RankReport(label="rank 0", kind=FailureKind.PEER_LOST, summary="connection closed by peer"),
    ]
    for answer, exit_code, text in [
        (RankFailure(reports), 1, "rank 2: killed by SIGKILL (signal 9)\nrank 0: lost contact with another rank\n"),
        (RankFailure([RankReport(label="rank 1", kind=FailureKind.USER, summary="no text")]), 2, "error: no text\n"),
        (UserError("no text"), 2, "error: no text\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ]:
        calls.answer = answer
        assert run(["demo"]) == exit_code
        assert capsys.readouterr().err.lstrip("\n") == text
    calls.answer = KeyError("passed on by a pool")
    calls.answer.__cause__ = RankFailure([RankReport(label="rank 1", kind=FailureKind.RAISED, summary="KeyError")])
    assert run(["demo"]) == 1
    assert capsys.readouterr().err == "rank 1: KeyError\n"
    calls.answer = ValueError("from somewhere else: a bug")
    with pytest.raises(ValueError, match="a bug"):
        run(["demo"])


def test_missing_packages_are_named(calls, monkeypatch, capsys):
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    assert run(["demo"]) == 2
    assert "torch is not installed: pip install" in capsys.readouterr().err


def test_doctor(capsys, monkeypatch):
    assert run(["doctor", "--quick"]) == 0
    output = capsys.readouterr().out
    for subject in ("python", "torch", "megatron-core", "cores", "gpus"):
        assert subject in output
    monkeypatch.setattr(doctor_checks, "installed_version", lambda package: None)
    assert run(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "problems: torch, megatron-core" in captured.err


def test_doctor_starts_two_ranks():
    finding = doctor_checks._two_ranks()
    assert finding.status == "ok", finding.text


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("megatron-core", "0.16.1", "ok"),
        ("megatron-core", "1.0", "note"),
        ("megatron-core", "0.15.3", "problem"),
        ("torch", "2.5.0", "problem"),
        ("numpy", "2.0", "ok"),
    ],
)
def test_doctor_judges_versions(monkeypatch, package, version, status):
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    assert doctor_checks._judged(package, version, text=version).status == status


def test_doctor_knows_which_python_megatron_needs(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 1))
    assert doctor_checks._judged("megatron-core", "0.19.2", text="").status == "problem"
