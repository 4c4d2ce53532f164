"""JSON and TOML that others wrote: what Python's own readers lose or stumble over is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainer_core.cli import main
from trainer_core.config_io import load_config
from trainer_core.data.dataset_file import load_dataset_file
from trainer_core.data.metadata import read_metadata
from trainer_core.errors import AdapterError, ConfigError, DatasetError, ModelFileError
from trainer_core.inspect_path import inspect_path
from trainer_core.models.tensor_file import read_header
from trainer_core.networks.lora_file import load_lora
from trainer_core.networks.peft_folder import read_peft_folder
from trainer_core.plain_text import parse_json, parse_toml
from trainer_core.runs.folder import read_config
from trainer_core.runs.protocol import BadCommand, decode_command

DEEP = "[" * 100_000
TWICE = '{"lora": {"rank": 4, "rank": 8}}'


def test_sound_text_is_read_as_ever() -> None:
    text = '{"a": [1, {"b": null}], "c": {"a": 1.5}}'
    assert parse_json(text) == json.loads(text)
    assert parse_toml("[a]\nb = 1") == {"a": {"b": 1}}
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json("[1,")


def test_a_config_that_names_a_setting_twice(tmp_path: Path) -> None:
    """JSON's readers take the last one without a word; TOML's refuse it by themselves."""
    file = tmp_path / "run.json"
    file.write_text(TWICE, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is not valid: 'rank' stands in it twice"):
        load_config(file, {}, check=False)
    with pytest.raises(DatasetError, match="'rank' stands in it twice"):
        load_dataset_file(file)
    with pytest.raises(ConfigError, match="it is damaged .*'rank' stands in it twice"):
        read_config(file)


@pytest.mark.parametrize("name", ["run.json", "run.toml"])
def test_brackets_without_end(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / name
    file.write_text(DEEP if name.endswith("json") else f"a = {DEEP}", encoding="utf-8")
    assert main(["train", str(file)]) == 2
    assert "is not valid: it is nested too deeply" in capsys.readouterr().err
    with pytest.raises(DatasetError, match="nested too deeply"):
        load_dataset_file(file)


def test_brackets_without_end_in_other_files(tmp_path: Path) -> None:
    file = tmp_path / "metadata.jsonl"
    file.write_text(f'{DEEP}\n{{"file_name": "a.png", "text": "a cat"}}\n', encoding="utf-8")
    found = read_metadata(file, tmp_path)
    assert any("line 1 is no JSON: it is nested too deeply" in problem for problem in found.problems)
    assert len(found.captions) == 1
    with pytest.raises(BadCommand, match="not a JSON object"):
        decode_command(DEEP.encode())
    header = f'{{"a": {DEEP}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelFileError, match="nested too deeply"):
        read_header(tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="nested too deeply"):
        inspect_path(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("content", [DEEP, "[1]", "5", "null"])
def test_peft_config_of_another_shape(tmp_path: Path, content: str, micro_model: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(AdapterError, match=r"adapter_config\.json' cannot be read"):
        read_peft_folder(tmp_path, None, "unet")  # type: ignore[arg-type]


PLACE = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


def write_lora(file: Path, **metadata: str) -> Path:
    pair = {
        f"{PLACE}.lora_A.weight": np.ones((2, 8), np.float32),
        f"{PLACE}.lora_B.weight": np.ones((8, 2), np.float32),
    }
    save_file(pair, file, metadata)
    return file


@pytest.mark.parametrize(
    "table",
    ["[1]", "5", "{", DEEP, '{"unet.lora_alpha": "x"}', '{"unet.alpha_pattern": [1]}', '{"unet.lora_alpha": []}'],
)
def test_damaged_alphas_in_metadata(tmp_path: Path, table: str) -> None:
    """Without them another alpha would be taken, and the file acts at another strength."""
    file = write_lora(tmp_path / "a.safetensors", lora_adapter_metadata=table)
    with pytest.raises(AdapterError, match=r"a\.safetensors': its metadata 'lora_adapter_metadata', .* are damaged"):
        load_lora(file)
    sound = load_lora(write_lora(tmp_path / "b.safetensors", lora_adapter_metadata='{"unet.lora_alpha": 1}'))
    assert set(sound.alphas.values()) == {1.0}


@pytest.mark.parametrize("table", [DEEP, '{"a": {"x": "many", "y": 3}}', '{"a": {"x": null, "y": 1}}'])
def test_odd_tags_of_a_foreign_file(tmp_path: Path, table: str) -> None:
    """They are only shown; what cannot be counted is left out."""
    _, text = inspect_path(str(write_lora(tmp_path / "a.safetensors", ss_tag_frequency=table)))
    assert "most frequent tags" not in text
