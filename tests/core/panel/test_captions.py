"""The caption table: which captions there are, writing one, and when that is refused."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from trainer_core.config import BucketConfig, DatasetConfig
from trainer_core.panel.api import PanelApi
from trainer_core.panel.data_sets import ScannedSet, data_set_id
from trainer_core.panel.exchange import Reply, Request
from trainer_core.runs.folder import RunFolder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three pictures; the second's caption has two lines, the third has none."""
    folder = tmp_path / "my pictures"
    folder.mkdir()
    for index, name in enumerate(("a.png", "b.png", "ü.png")):
        Image.new("RGB", (640, 320), (90 * index, 20, 20)).save(folder / name)
    (folder / "a.txt").write_text("a red cat", encoding="utf-8")
    (folder / "b.txt").write_text("first\nsecond\n", encoding="utf-8")
    return folder


class Panel:
    """Requests to an API that knows one scanned data set."""

    def __init__(self, output: Path, dataset: DatasetConfig) -> None:
        self.dataset = dataset
        self.id = data_set_id(dataset)
        scan = ScannedSet("my pictures", 3, f"3 pictures usable in {dataset.path}", 1.0, dataset, BucketConfig())
        known: Mapping[str, ScannedSet] = {self.id: scan}
        self.live: list[str] = []
        self.api = PanelApi(lambda: [output], live=lambda: dict.fromkeys(self.live), scanned=lambda: known)  # type: ignore[arg-type]

    def get(self, path: str = "", **query: str) -> Reply:
        return self.api.handle(Request("GET", f"/data_sets/{self.id}{path}", query))

    def rows(self, **query: str) -> list[dict[str, Any]]:
        reply = self.get("/captions", **query)
        assert reply.status == 200, reply.data
        return reply.data["rows"]

    def write(self, key: str, body: Any) -> Reply:
        headers = {"content-type": "application/json"}
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.api.handle(Request("PATCH", f"/data_sets/{self.id}/captions/{key}", {}, headers, raw))


@pytest.fixture
def panel(tmp_path: Path, pictures: Path) -> Panel:
    return Panel(tmp_path / "output", DatasetConfig(path=str(pictures)))


def make_run(output: Path, folder: Path, run_id: str = "20261129T171500Z-1a2b") -> RunFolder:
    run = RunFolder.create(output, run_id)
    run.write_config({"run_id": run_id, "config": {"dataset": {"path": str(folder)}}, "config_hash": "h"})
    return run


def code(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.data["error"]["code"]


def test_the_table_shows_every_picture_with_its_caption(panel: Panel, pictures: Path) -> None:
    rows = panel.rows()
    assert [(row["file"], row["caption"]) for row in rows] == [
        ("a.png", "a red cat"), ("b.png", "first\nsecond"), ("ü.png", ""),
    ]  # fmt: skip
    assert all(row["editable"] and not row["problem"] for row in rows)
    answer = panel.get("/captions", first="1", count="1").data
    assert (answer["total"], [row["file"] for row in answer["rows"]]) == (3, ["b.png"])
    assert [row["file"] for row in panel.rows(find="SECOND")] == ["b.png"]
    assert [row["file"] for row in panel.rows(find="ü")] == ["ü.png"]
    told = b"".join(panel.get(path).body() for path in ("", "/captions"))
    assert str(pictures.parent).encode() not in told
    picture = panel.get(f"/pictures/{rows[0]['key']}")
    assert (picture.content_type, picture.body()[:3]) == ("image/jpeg", b"\xff\xd8\xff")


def test_a_caption_is_written_whole_and_the_scan_sees_it(panel: Panel, pictures: Path) -> None:
    from trainer_core.data.scan import scan_folder_json

    first, _, third = panel.rows()
    words = "ein Kätzchen, 猫 <b>&"
    reply = panel.write(first["key"], {"caption": words + "  \r\nline two\n", "version": first["version"]})
    assert reply.status == 200, reply.data
    assert reply.data["row"]["caption"] == words + "  \nline two"
    assert (pictures / "a.txt").read_bytes() == (words + "  \nline two\n").encode()
    reply = panel.write(third["key"], {"caption": "new", "version": third["version"]})
    assert (pictures / "ü.txt").read_text(encoding="utf-8") == "new\n"
    assert reply.data["row"]["version"] != ""
    assert sorted(path.name for path in pictures.iterdir()) == sorted(
        ["a.png", "a.txt", "b.png", "b.txt", "ü.png", "ü.txt"]
    )
    report = scan_folder_json(str(pictures))
    assert [row["caption"] for row in report["items"]] == [f"{words} line two", "first second", "new"]


def test_a_caption_that_was_changed_meanwhile_is_not_overwritten(panel: Panel, pictures: Path) -> None:
    row = panel.rows()[0]
    (pictures / "a.txt").write_text("from an editor", encoding="utf-8")
    assert code(panel.write(row["key"], {"caption": "mine", "version": row["version"]})) == (409, "changed")
    assert (pictures / "a.txt").read_text(encoding="utf-8") == "from an editor"


def test_nothing_is_written_while_a_run_trains_on_the_pictures(panel: Panel, pictures: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "output", pictures.parent)  # its folder holds this one
    row = panel.rows()[0]
    body = {"caption": "mine", "version": row["version"]}
    with run.lock():
        assert panel.get("/captions").data["locked_by"] == run.run_id
        reply = panel.write(row["key"], body)
        assert code(reply) == (409, "in_use")
        assert run.run_id in reply.data["error"]["message"]
    assert (pictures / "a.txt").read_text(encoding="utf-8") == "a red cat"
    assert panel.get("/captions").data["locked_by"] is None
    panel.live.append(run.run_id)  # its worker has been started and does not write yet
    assert code(panel.write(row["key"], body)) == (409, "in_use")
    panel.live.clear()
    assert panel.write(row["key"], body).status == 200


def test_a_failed_write_leaves_the_old_caption(panel: Panel, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = panel.rows()[0]

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    reply = panel.write(row["key"], {"caption": "mine", "version": row["version"]})
    assert code(reply) == (422, "problem")
    assert "a.txt could not be written: No space left" in reply.data["error"]["message"]
    assert str(pictures) not in reply.data["error"]["message"]
    assert (pictures / "a.txt").read_text(encoding="utf-8") == "a red cat"
    assert len(list(pictures.iterdir())) == 5


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"caption": 1, "version": ""}, (400, "bad_caption")),
        ({"caption": "x"}, (400, "bad_caption")),
        ({"caption": "x", "version": "", "path": "/etc/passwd"}, (400, "bad_caption")),
        (b'{"caption": "\\ud800", "version": "V"}', (422, "problem")),
        (b'{"caption": "a\\u0000b", "version": "V"}', (422, "problem")),
        ({"caption": "x" * 8001, "version": "V"}, (422, "problem")),
        ({"caption": "x" * 70_000, "version": "V"}, (413, "too_long")),
        (b"[]", (400, "bad_json")),
    ],
)
def test_what_is_no_caption_is_refused(panel: Panel, pictures: Path, body: Any, expected: tuple[int, str]) -> None:
    row = panel.rows()[0]
    if isinstance(body, bytes):
        body = body.replace(b'"V"', json.dumps(row["version"]).encode())
    elif body.get("version") == "V":
        body = {**body, "version": row["version"]}
    assert code(panel.write(row["key"], body)) == expected
    assert (pictures / "a.txt").read_text(encoding="utf-8") == "a red cat"


@pytest.mark.parametrize("name", ["..", "a.png", "0" * 16, "../../etc/passwd", "%2e%2e", "", "0" * 400])
def test_only_ids_name_pictures_and_data_sets(panel: Panel, name: str) -> None:
    assert panel.write(name, {"caption": "x", "version": ""}).status == 404
    for path in (f"/data_sets/{name}/captions", f"/data_sets/{panel.id}/pictures/{name}", f"/data_sets/{name}x"):
        assert panel.api.handle(Request("GET", path)).status == 404


def test_foreign_pages_and_forms_change_nothing(panel: Panel, pictures: Path) -> None:
    row = panel.rows()[0]
    raw = json.dumps({"caption": "x", "version": row["version"]}).encode()
    path = f"/data_sets/{panel.id}/captions/{row['key']}"
    json_type = {"content-type": "application/json", "host": "127.0.0.1:8188"}
    foreign = {**json_type, "origin": "http://evil.example"}
    assert code(panel.api.handle(Request("PATCH", path, {}, foreign, raw))) == (403, "foreign_origin")
    form = {"content-type": "text/plain"}
    assert code(panel.api.handle(Request("PATCH", path, {}, form, raw))) == (415, "not_json")
    assert code(panel.api.handle(Request("POST", path, {}, json_type, raw))) == (405, "method")
    assert (pictures / "a.txt").read_text(encoding="utf-8") == "a red cat"


def test_captions_of_other_places_are_shown_and_not_changed(tmp_path: Path, pictures: Path) -> None:
    (pictures / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "listed"}\n', encoding="utf-8")
    panel = Panel(tmp_path / "output", DatasetConfig(path=str(pictures)))
    row = panel.rows()[0]
    assert (row["caption"], row["editable"], row["why"]) == (
        "listed", False, "it stands in metadata.jsonl, edit that file",
    )  # fmt: skip
    assert code(panel.write(row["key"], {"caption": "x", "version": row["version"]})) == (409, "not_editable")


def test_pictures_that_the_program_wrote_are_read_only(tmp_path: Path, pictures: Path) -> None:
    place = tmp_path / "output" / "safe_scaler" / "pictures" / "graph-0123"
    place.parent.mkdir(parents=True)
    pictures.rename(place)
    panel = Panel(tmp_path / "output", DatasetConfig(path=str(place)))
    assert panel.get("/captions").data["read_only"] is True
    row = panel.rows()[0]
    assert code(panel.write(row["key"], {"caption": "x", "version": row["version"]})) == (409, "generated")


def test_a_caption_in_another_encoding_becomes_utf_8_that_is_read_right(tmp_path: Path, pictures: Path) -> None:
    from trainer_core.data.scan import scan_folder_json

    (pictures / "a.txt").write_bytes("кошка".encode("cp1251"))
    panel = Panel(tmp_path / "output", DatasetConfig(path=str(pictures), caption_encoding="cp1251"))
    row = panel.rows()[0]
    assert row["caption"] == "кошка"
    assert panel.write(row["key"], {"caption": "кот", "version": row["version"]}).status == 200
    report = scan_folder_json(str(pictures), caption_encoding="cp1251")
    assert report["items"][0]["caption"] == "кот"


def test_a_link_is_replaced_and_the_linked_file_stays(panel: Panel, pictures: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.txt"
    elsewhere.write_text("a red cat", encoding="utf-8")
    (pictures / "a.txt").unlink()
    (pictures / "a.txt").symlink_to(elsewhere)
    row = panel.rows()[0]
    assert panel.write(row["key"], {"caption": "mine", "version": row["version"]}).status == 200
    assert elsewhere.read_text(encoding="utf-8") == "a red cat"
    assert (pictures / "a.txt").read_text(encoding="utf-8") == "mine\n"


def test_a_run_names_its_data_set(tmp_path: Path, pictures: Path) -> None:
    run = make_run(tmp_path / "output", pictures)
    api = PanelApi(lambda: [tmp_path / "output"])
    listed = api.handle(Request("GET", "/runs")).data
    identity = listed["runs"][0]["data_set"]
    assert listed["waiting"] == []
    sets = api.handle(Request("GET", "/data_sets")).data["data_sets"]
    assert [(one["id"], one["title"]) for one in sets] == [(identity, "my pictures")]
    rows = api.handle(Request("GET", f"/data_sets/{identity}/captions")).data["rows"]
    assert len(rows) == 3
    assert run.path.exists()


def test_relative_folders_begin_where_the_run_was_started(tmp_path: Path, pictures: Path) -> None:
    stored = {"config": {"dataset": {"path": pictures.name}}, "config_hash": "h"}
    run = RunFolder.create(tmp_path / "output", "20261129T171500Z-1a2b")
    run.write_config({**stored, "run_id": run.run_id})
    api = PanelApi(lambda: [tmp_path / "output"])
    assert api.handle(Request("GET", "/runs")).data["runs"][0]["data_set"] == ""  # unknown, not a wrong folder
    run.write_config({**stored, "run_id": run.run_id, "started_in": str(tmp_path)})
    os.utime(run.config_path, (1, 1))
    identity = api.handle(Request("GET", "/runs")).data["runs"][0]["data_set"]
    assert identity == data_set_id(DatasetConfig(path=str(pictures)))
    assert len(api.handle(Request("GET", f"/data_sets/{identity}/captions")).data["rows"]) == 3


def test_a_folder_that_is_gone_is_told(panel: Panel, pictures: Path) -> None:
    pictures.rename(pictures.with_name("moved"))
    reply = panel.get("/captions")
    assert code(reply) == (422, "problem")
    assert "does not exist" in reply.data["error"]["message"]
    assert str(pictures.parent) not in reply.data["error"]["message"]


def test_a_page_of_a_large_set_is_quick(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for index in range(3000):
        (folder / f"{index:05d}.png").touch()
        (folder / f"{index:05d}.txt").write_text(str(index))
    panel = Panel(tmp_path / "output", DatasetConfig(path=str(folder)))
    started = time.process_time()
    assert [row["caption"] for row in panel.rows(first="2990", count="5")] == [str(n) for n in range(2990, 2995)]
    assert time.process_time() - started < 1
