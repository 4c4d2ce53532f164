from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trainer_core.diagnostics import write_report
from trainer_core.diagnostics.report_data import read_run, read_settings
from trainer_core.diagnostics.report_text import problem_groups, summary_sentences
from trainer_core.errors import CheckpointError, ConfigError

MakeRun = Callable[..., Any]
VOID = {"meta", "img", "line", "circle", "polyline", "br", "wbr"}


class Page(HTMLParser):
    """Collects text, tags and attributes, and checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def page_of(run: Any) -> tuple[str, Page]:
    path = write_report(run.path)
    assert path == run.path / "report.html"
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_every_section_is_there(make_run: MakeRun) -> None:
    _, page = page_of(make_run().whole())
    for title in (
        "heart", "Finished", "Before and after", "Curves", "Training loss", "Validation loss", "Gradient norm",
        "Learning rate", "Loss scale", "Problems", "The LoRA file and its proof", "Settings",
        "Different from the defaults",
    ):  # fmt: skip
        assert title in page.text, title
    assert page.tags.count("svg") == 5
    assert page.tags.count("h1") == 1


def test_summary_in_plain_words(make_run: MakeRun) -> None:
    _, page = page_of(make_run().whole())
    assert "The run finished: 60 steps on 24 pictures in 2 min 3 s (cpu, fp16)." in page.text
    assert "58 steps were applied and 2 rejected." in page.text
    assert re.search(r"The training loss fell from 0\.\d+ to 0\.0\d+ \(means of the first and last 5 steps", page.text)
    assert "The validation loss fell from 0.3 to 0.12 (step 0 to 60, 8 pictures)." in page.text
    assert "The LoRA is heart.safetensors (1.23 MB); it was read back after saving and proven." in page.text
    assert "986 tensors equal after reading" in page.text


def test_everything_from_outside_is_escaped(make_run: MakeRun) -> None:
    text, page = page_of(make_run().whole())
    assert "<script" not in text
    assert "script" not in page.tags
    assert "onerror" not in {name for _, name, _ in page.attributes}
    assert page.text.count('<script>alert("1")</script>') >= 3  # as text: prompt, left-out file, rejected sample


def test_nothing_is_loaded_from_anywhere(make_run: MakeRun) -> None:
    text, page = page_of(make_run().whole())
    assert not {"script", "link", "iframe", "object", "embed", "form", "base", "a"} & set(page.tags)
    sources = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "action", "poster")]
    assert sources
    assert all(value.startswith("data:image/") for value in sources)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(v for t, n, v in page.attributes if (t, n) == ("meta", "content") and "default-src" in v)
    assert "default-src 'none'" in policy


def test_before_and_after_stand_side_by_side(make_run: MakeRun) -> None:
    _, page = page_of(make_run().whole())
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("img", "alt")]
    red = [label for label in labels if label.endswith("a red glorp")]
    assert red == [
        "Preview before training: a red glorp",
        "Preview after step 60: a red glorp",
        "Preview step 20: a red glorp",
        "Preview step 40: a red glorp",
    ]


def test_big_previews_are_downsized(make_run: MakeRun) -> None:
    run = make_run(side=1024).whole()
    _, page = page_of(run)
    widths = [int(value) for tag, name, value in page.attributes if (tag, name) == ("img", "width")]
    assert set(widths) == {448, 144}
    assert (run.path / "report.html").stat().st_size < 1_000_000


def test_missing_damaged_and_foreign_pictures(make_run: MakeRun, tmp_path: Path) -> None:
    from trainer_core.events import PreviewReady

    run = make_run()
    run.start()
    (tmp_path / "outside.png").write_bytes(b"secret")
    (run.path / "previews" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    for index, name in enumerate(["previews/none.png", "previews/bad.png", "../../outside.png"]):
        run.bus.emit(PreviewReady(step=0, file=name, prompt="x", index=index, seed=0))
    run.finish()
    _, page = page_of(run)
    assert page.text.count("picture not found") == 3
    assert "img" not in page.tags


def test_problems_are_named(make_run: MakeRun) -> None:
    run = make_run().whole()
    groups = {group.title: group for group in problem_groups(read_run(run.path))}
    rejected = groups["2 steps were rejected"]
    assert rejected.lines[0] == "Steps 2 and 3: the gradient is not finite."
    assert "b.png" in rejected.lines[1]
    assert "lora_unet_input_blocks_4" in rejected.lines[2]
    assert "left out" in groups["The data set"].lines[0]
    assert groups["The run was resumed once"].severity == "note"
    assert "step-00000040" in groups["The run was resumed once"].lines[0]
    assert groups["Health of the gradients"].lines == ("Step 30: lora_te1 gets no gradient",)
    sentences = summary_sentences(read_run(run.path))
    assert sentences[-1].startswith("Please look at the problems below: ")


def test_a_clean_run_says_so(make_run: MakeRun) -> None:
    run = make_run()
    run.start()
    run.train(rejected=())
    run.finish()
    _, page = page_of(run)
    assert "Nothing needs your attention." in page.text
    assert "None." in page.text


def test_many_warnings_are_folded(make_run: MakeRun) -> None:
    from trainer_core.events import Warned

    run = make_run()
    run.start()
    for index in range(40):
        run.bus.emit(Warned(topic="data", message=f"left out: {index}.jpg: cut off"))
    run.finish()
    _, page = page_of(run)
    assert "28 more" in page.text
    assert "39.jpg" in page.text


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        ("failed", "The VAE made no usable latents.\nLook at x.png.", "The run failed after 60 steps"),
        ("stopped", "Stopped.", "It can be resumed."),
    ],
)
def test_other_ends(make_run: MakeRun, status: str, message: str, said: str) -> None:
    run = make_run()
    run.start()
    run.train()
    run.finish(status, message, lora=False)
    text, page = page_of(run)
    assert said in page.text
    assert f'class="status {status}"' in text
    assert "No LoRA file was written." in page.text
    if status == "failed":
        assert "Look at x.png." in page.text


def test_a_run_without_an_end(make_run: MakeRun) -> None:
    run = make_run()
    run.start()
    run.train()
    run.database.flush()
    _, page = page_of(run)
    assert "The run is still going, or it ended without a word" in page.text
    assert "Not ended" in page.text


def test_a_run_before_its_first_step(make_run: MakeRun) -> None:
    run = make_run()
    run.database.flush()
    _, page = page_of(run)
    assert "Curves" not in page.text
    assert "Settings" in page.text


def test_a_run_of_few_steps_claims_no_trend(make_run: MakeRun) -> None:
    """One step against another tells their noise levels, nothing of the training."""
    run = make_run(steps=9)
    run.start()
    run.train(rejected=())
    run.finish()
    _, page = page_of(run)
    assert "training loss fell" not in page.text
    assert "training loss rose" not in page.text
    assert "same: " not in page.text


def test_losses_that_do_not_fall(make_run: MakeRun) -> None:
    run = make_run(steps=400)
    run.start()
    run.train(rejected=(), falling=False)
    run.validate((0.3, 0.2, 0.15, 0.21))
    run.finish()
    text = " ".join(summary_sentences(read_run(run.path)))
    assert "stayed about the same" in text or "rose from" in text
    assert "It was lowest at step 266 (0.15) and is 40 % higher at the end: the LoRA may be over-trained." in text


def test_a_validation_loss_that_does_not_move(make_run: MakeRun) -> None:
    run = make_run()
    run.start()
    run.validate((0.3, 0.30001))
    run.finish()
    assert "The validation loss stayed at 0.3 (step 0 to 60, 8 pictures)." in " ".join(
        summary_sentences(read_run(run.path))
    )


def test_the_demos_score(make_run: MakeRun) -> None:
    run = make_run().whole()
    score = {"score_before": 0.11, "score_after": 0.953, "kept": 0.92, "word": "glorp", "samples": 64}
    (run.path / "score.json").write_text(json.dumps(score), encoding="utf-8")
    _, page = page_of(run)
    assert "Pictures drawn for 'glorp' were right in 11 % of the cases before and 95 % after training" in page.text
    assert "92 % was kept" in page.text
    (run.path / "score.json").write_text("{broken", encoding="utf-8")
    _, page = page_of(run)
    assert "glorp' were right" not in page.text


def test_settings_changed_first(make_run: MakeRun) -> None:
    run = make_run().whole()
    _, page = page_of(run)
    changed = [setting.key for setting in read_run(run.path).settings if setting.changed]
    assert changed == [
        "dataset.path", "dataset.batch_size", "preview.prompts", "preview.every_steps", "run.output_name",
        "run.max_train_steps", "run.seed",
    ]  # fmt: skip
    assert page.text.index("dataset.batch_size") < page.text.index("lora.rank")  # the latter is behind the fold
    unknown = read_settings({"lora": {"rank": 16, "from_the_future": 3}})
    assert next(s for s in unknown if s.key == "lora.from_the_future").value == 3


def test_writing_again_replaces_whole(make_run: MakeRun) -> None:
    run = make_run().whole()
    first = write_report(run.path).read_bytes()
    assert write_report(run.path).read_bytes() == first
    assert sorted(os.listdir(run.path)) == sorted(
        {"config.json", "run.db", "report.html", "checkpoints", "lora", "previews", *_side_files(run.path)}
    )


def _side_files(path: Path) -> set[str]:
    return {name for name in os.listdir(path) if name.startswith("run.db-")}


def test_odd_text_does_not_break_the_page(make_run: MakeRun) -> None:
    from trainer_core.events import Warned

    run = make_run()
    run.start()
    run.bus.emit(Warned(topic="data", message="bad \x00 \x1b[31m name \udcff \u202e 猫"))
    run.finish()
    text, page = page_of(run)
    assert "\x00" not in text
    assert "\x1b" not in text
    assert "\\udcff" in page.text
    assert "猫" in page.text


def test_not_a_run(tmp_path: Path, make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        write_report(tmp_path)
    run = make_run()
    run.database.close()
    run.folder.database_path.unlink()
    with pytest.raises(CheckpointError, match="no run record"):
        write_report(run.path)


def test_a_hundred_thousand_steps_stay_small() -> None:
    from trainer_core.diagnostics.report_charts import Chart, Series, chart_html

    points = [(float(step), 1.0 + (step % 97) / 97) for step in range(100_000)]
    points[50_123] = (50_123.0, 2.5)
    made = chart_html(Chart(title="Loss", meaning="", series=[Series(name="each step", points=points, style="c1")]))
    assert len(made) < 20_000
    assert "2.5" in made or re.search(r",\d+\.\d ", made)
