"""The configuration of ``hotspa train``: defaults, what is derived, and one clear line per mistake."""

import pydantic
import pytest
import yaml

from hotspa_plugin.config import ModelConfig, TrainingConfig, default_config_text, parse_config, read_config


def test_the_printed_defaults_are_the_defaults():
    assert parse_config(default_config_text()) == parse_config("")


def test_the_printed_defaults_name_every_key():
    printed = default_config_text()

    def keys(model):
        for name, field in model.model_fields.items():
            yield name
            if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
                yield from keys(field.annotation)

    assert [key for key in keys(TrainingConfig) if f" {key}:" not in printed and f"\n{key}:" not in printed] == []


def test_commented_sizes_are_those_of_the_preset():
    uncommented = default_config_text().replace("\n  # ", "\n  ")
    assert parse_config(uncommented).model == parse_config("").model


def test_a_config_survives_writing_and_reading():
    config = parse_config("model: {preset: tiny-gpt, dropout: 0.1}\nrun: {steps: 7}\npool: [tp1:64, tp2:128]")
    assert parse_config(yaml.safe_dump(config.model_dump(mode="json"))) == config


def test_numbers_without_a_dot_are_numbers():
    optimizer = parse_config("optimizer: {lr: 3e-4, eps: 1e-9, weight_decay: 0, betas: [0.8, 0.9]}").optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.weight_decay, optimizer.betas) == (3e-4, 1e-9, 0.0, (0.8, 0.9))


@pytest.mark.parametrize(
    "pool",
    ["tp1:64 tp2:256", "[tp1:64, tp2:256]", "{tp1: 64, tp2: 256}", "[{strategy: tp1, bound_tokens: 64}, tp2:256]"],
)
def test_pools(pool):
    config = parse_config(f"pool: {pool}\nhome: tp1")
    assert str(config.strategy_pool) == "tp1:64 tp2:256"
    assert str(config.strategy_pool.home) == "tp1"


def test_sections_left_empty_and_overrides():
    config = parse_config("data:\nmodel:\nrun:\n  steps: 3\n", overrides={"run.steps": 9, "optimizer.lr": 1.0})
    assert (config.run.steps, config.optimizer.lr, config.model.preset) == (9, 1.0, "tiny-llama")


def test_overlong_is_an_error_except_for_the_standard_library():
    assert parse_config("").data.overlong == "truncate"
    assert parse_config("data: {source: folder, path: x}").data.overlong == "error"
    assert parse_config("data: {overlong: drop}").data.overlong == "drop"


def test_sizes_that_follow_from_others():
    model = ModelConfig.model_validate({"num_layers": 2, "hidden_size": 96, "num_attention_heads": 6})
    assert (model.num_query_groups, model.head_dim, model.ffn_hidden_size) == (6, 16, 256)
    model = ModelConfig.model_validate({"preset": "tiny-gpt", "hidden_size": 64, "num_attention_heads": 4})
    assert (model.ffn_hidden_size, model.num_query_groups, model.tied_embeddings) == (256, 4, True)
    tiny_llama = ModelConfig.model_validate({"preset": "tiny-llama"})
    assert (tiny_llama.num_query_groups, tiny_llama.ffn_hidden_size, tiny_llama.name) == (4, 384, "tiny-llama")
    assert model.name == "tiny-gpt (4 layers of 64)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data:\n  pakcing: packed", "c.yaml:2: unknown key data.pakcing; did you mean packing?"),
        ("modle: {}", "c.yaml:1: unknown key modle; did you mean model?"),
        ("\nrun:\n  lr: 3", "c.yaml:3: unknown key run.lr; lr belongs under optimizer"),
        ("zzz: 3", "c.yaml:1: unknown key zzz; known here are model, pool, home, data, optimizer, run"),
        ("1: 2", "c.yaml:1: unknown key 1; keys are text"),
        ("run: {record: {trace_frist: 3}}", "c.yaml:1: unknown key run.record.trace_frist; did you mean trace_first?"),
        (
            "data:\n  packing: packd",
            "c.yaml:2: data.packing 'packd' is not one of packed, padded; did you mean packed?",
        ),
        ("optimizer:\n  lr: fast", "c.yaml:2: optimizer.lr 'fast' must be a number"),
        ("optimizer: {lr: .inf}", "c.yaml:1: optimizer.lr inf must be a finite number"),
        ("optimizer: {lr: 1, min_lr: 2}", "c.yaml:1: optimizer: min_lr 2 is above lr 1: lower it"),
        ("optimizer: {betas: [0.9]}", "c.yaml:1: optimizer.betas.1 is missing"),
        ("run: {steps: 0}", "c.yaml:1: run.steps 0 must be at least 1"),
        ("run: {steps: 1.5}", "c.yaml:1: run.steps 1.5 must be a whole number"),
        ("run: {steps: true}", "c.yaml:1: run.steps True must be a whole number"),
        ("run: {resume: 1}", "c.yaml:1: run.resume 1 must be true or false"),
        ("data: 5", "c.yaml:1: data 5 must be a section with keys of its own"),
        ("pool: 5", "c.yaml:1: pool 5 must be text or a list or a mapping"),
        ("\npool: tp3", "c.yaml:2: pool: entry at character 1: 'tp3' lacks a length bound"),
        ("pool: tp1:64\nhome: tp4", "c.yaml:1: pool: home tp4 is not in it; add it or use one of tp1"),
        ("- a", "c.yaml: holds ['a'], not sections"),
        ("a: [", "c.yaml:1: not valid YAML"),
        ("a: \x00", "c.yaml: not valid YAML"),
        ("run:\n  steps: 1\n  steps: 2", "c.yaml:3: key steps stands on line 2 already: keep one"),
        ("run: !!python/object/apply:os.getcwd []", "c.yaml:1: not valid YAML"),
        ("model: {preset: llama}", "c.yaml:1: model.preset 'llama' is not one of tiny-gpt, tiny-llama"),
        ("model: {num_layers: 2}", "c.yaml:1: model: hidden_size, num_attention_heads missing"),
        ("model: {preset: tiny-gpt, hidden_size: 100}", "c.yaml:1: model: hidden_size 100 is not a multiple of the 8"),
        ("model: {num_query_groups: 3}", "c.yaml:1: model: num_query_groups 3 does not divide the 8 attention heads"),
        ("model: {dropout: 1}", "c.yaml:1: model.dropout 1 must be below 1"),
        ("model: {max_positions: 7}", "c.yaml:1: model: max_positions 7 is for learned positions only"),
        ("data: {source: jsonl}", "c.yaml:1: data: path is missing: source jsonl needs one"),
        ("data: {path: x}", "c.yaml:1: data: path 'x' is given, but source stdlib reads none"),
        ("data: {end_of_document: </s>}", "c.yaml:1: data: end_of_document '</s>' names a token, but bytes have none"),
        ("optimizer: {warmup_steps: 99}", "c.yaml:1: optimizer.warmup_steps 99 is above run.steps 20"),
        (
            "data: {global_batch_sequences: 4, global_batch_tokens: 5}",
            "c.yaml:1: data: global_batch_sequences and global_batch_tokens are both given: keep one of them",
        ),
    ],
)
def test_each_mistake_is_one_clear_line(text, expected):
    with pytest.raises(ValueError) as caught:
        parse_config(text, name="c.yaml")
    message = str(caught.value)
    assert message.startswith(expected)
    assert "\n" not in message


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ValueError) as caught:
        parse_config("run:\n  stepps: 3\n  dtype: fp8\nmodle: {}", name="c.yaml")
    assert sorted(line.split(":")[1] for line in str(caught.value).splitlines()) == ["2", "3", "4"]


def test_files(tmp_path):
    with pytest.raises(ValueError, match="there is no such file; hotspa train --print-config"):
        read_config(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="cannot be read as text"):
        read_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="cannot be read as text"):
        read_config(tmp_path / "binary.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert read_config(tmp_path / "empty.yaml") == parse_config("")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("{source: folder, path: missing}", "data.path missing: there is no such folder"),
        ("{source: folder, path: file.txt}", "data.path file.txt: is not a folder"),
        ("{source: jsonl, path: .}", "data.path .: is not a file"),
        ("{source: megatron, path: tokens}", "there is no tokens.idx"),
        ("{tokenizer: missing.json}", "data.tokenizer missing.json: there is no such file; or write bytes"),
    ],
)
def test_paths_are_looked_at(tmp_path, monkeypatch, data, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "tokens.bin").write_bytes(b"")
    with pytest.raises(ValueError) as caught:
        parse_config(f"data: {data}").data.check_paths()
    assert text in str(caught.value)


def test_pool_is_checked_against_the_model():
    config = parse_config("pool: tp1:64 tp2:128 tp2pp2:256")
    pool = config.model.check_pool(config.strategy_pool, num_ranks=4, vocab_size=257)
    assert [strategy.dp for strategy in pool] == [4, 2, 1]
    with pytest.raises(ValueError, match="num_layers"):
        parse_config("model: {num_layers: 5, preset: tiny-gpt}").model.check_pool(pool, num_ranks=4, vocab_size=257)
    with pytest.raises(ValueError, match="vocab_size 100 is below the tokenizer's 257"):
        parse_config("model: {vocab_size: 100}").model.check_pool(pool, num_ranks=4, vocab_size=257)
    with pytest.raises(ValueError, match="max_positions"):
        parse_config("model: {preset: tiny-gpt, max_positions: 9}").model.check_pool(pool, num_ranks=4, vocab_size=1)
