"""The patches for Megatron-LM trees: their form, and what is done to a tree."""

import re
import subprocess

import pytest

from hotspa_plugin.integrations.megatron import tree_patch

LINE = "import hotspa_plugin.megatron_adaptor  # noqa: F401"


def make_tree(folder, release, *, script=None):
    major, minor = release.split(".")
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 1\n")
    if script is None:
        at = tree_patch.read_patch(release)[0].after_line if release in tree_patch.supported_releases() else 1
        script = "".join(f"# line {n}\n" for n in range(1, at)) + "import torch\nfrom megatron import core\n"
    (folder / "pretrain_gpt.py").write_text(script)
    return folder


def test_every_supported_release_has_a_patch():
    assert tree_patch.supported_releases() == ["0.16", "0.17", "0.18", "0.19"]


@pytest.mark.parametrize("release", ["0.16", "0.17", "0.18", "0.19"])
def test_a_patch_holds_our_own_lines_only(release):
    text = (tree_patch.patches_folder() / release / "hotspa.patch").read_text()
    for line in text.splitlines():
        assert re.match(r"(--- a/|\+\+\+ b/|@@ -\d+,0 \+\d+ @@$|\+import hotspa_plugin)", line), line


@pytest.mark.parametrize("release", ["0.16", "0.17", "0.18", "0.19"])
def test_apply_and_revert_are_idempotent_and_exact(tmp_path, release):
    tree = make_tree(tmp_path, release)
    before = (tree / "pretrain_gpt.py").read_text()
    assert tree_patch.check(tree) == [("pretrain_gpt.py", "not applied")]
    assert tree_patch.apply(tree) == [("pretrain_gpt.py", True)]
    assert tree_patch.apply(tree) == [("pretrain_gpt.py", False)]
    assert tree_patch.check(tree) == [("pretrain_gpt.py", "applied")]
    assert (tree / "pretrain_gpt.py").read_text() == before.replace("import torch\n", f"import torch\n{LINE}\n")
    assert tree_patch.revert(tree) == [("pretrain_gpt.py", True)]
    assert tree_patch.revert(tree) == [("pretrain_gpt.py", False)]
    assert (tree / "pretrain_gpt.py").read_text() == before


def test_git_applies_the_file_alike(tmp_path):
    tree = make_tree(tmp_path, "0.19")
    patch = tree_patch.patches_folder() / "0.19" / "hotspa.patch"
    done = subprocess.run(["git", "apply", "--unidiff-zero", str(patch)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert tree_patch.check(tree) == [("pretrain_gpt.py", "applied")]


@pytest.mark.parametrize("script", ["import os\n", f"import torch\n{LINE}\n" + "# more\n" * 30])
def test_a_script_that_is_not_the_release_s_is_left_alone(tmp_path, script):
    tree = make_tree(tmp_path, "0.19", script=script)
    with pytest.raises(ValueError, match="line 24 is not 'import torch'.*hotspa_plugin.launch"):
        tree_patch.apply(tree)
    assert (tree / "pretrain_gpt.py").read_text() == script


def test_an_unknown_release_and_a_folder_that_is_no_tree_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is Megatron-LM 0\.99, and there are patches for 0\.16, 0\.17, 0\.18, 0\.19"):
        tree_patch.apply(make_tree(tmp_path / "new", "0.99"))
    with pytest.raises(ValueError, match="is no Megatron-LM tree"):
        tree_patch.check(tmp_path)


def test_the_commands(tmp_path):
    from click.testing import CliRunner

    from hotspa_plugin.cli.main import commands

    tree = make_tree(tmp_path, "0.18")
    run = CliRunner().invoke
    assert run(commands, ["patch", "check", "--tree", str(tree)]).exit_code == 1
    assert "patched" in run(commands, ["patch", "apply", "--tree", str(tree)]).output
    checked = run(commands, ["patch", "check", "--tree", str(tree)])
    assert (checked.exit_code, "applied" in checked.output) == (0, True)
    assert "restored" in run(commands, ["patch", "revert", "--tree", str(tree)]).output
    listed = run(commands, ["patch", "list"]).output
    assert "megatron.training.training.get_forward_backward_func" in listed
    assert "megatron.training.arguments.validate_args" in listed
