"""Nothing that goes to a browser tells how folders are called on this machine."""

from __future__ import annotations

import pytest

from trainer_core.panel.places import bare_text, hide_places


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("saved /home/me/out/loras/cat.safetensors (5 MB)", "saved cat.safetensors (5 MB)"),
        ("see '/home/me/My Pictures/cat 1.png'.", "see 'cat 1.png'."),
        ('see "/home/me/My Pictures/" there', "see 'My Pictures' there"),
        (r"see 'C:\Users\me\My Pictures\cat.png'", "see 'cat.png'"),
        (r"C:\Users\me\cat.png: broken", "cat.png: broken"),
        (r"\\server\share\cat.png is gone", "cat.png is gone"),
        ("D:/models/sdxl.safetensors", "sdxl.safetensors"),
        ("down/up blocks, 3 / 4, and/or, 10 images/s", "down/up blocks, 3 / 4, and/or, 10 images/s"),
        ("docs at https://example.org/a/b/c", "docs at https://example.org/a/b/c"),
        ("previews/step-1.png and lora/cat.safetensors", "previews/step-1.png and lora/cat.safetensors"),
        ("", ""),
    ],
)
def test_of_a_path_the_last_part_stays(text: str, bare: str) -> None:
    assert bare_text(text) == bare


def test_known_folders_are_cut_off_with_their_blanks() -> None:
    text = "/srv/My Drive/out/safe_scaler/run/run.log and /srv/My Drive/out"
    assert bare_text(text, ["/srv/My Drive", "/srv/My Drive/out"]) == "safe_scaler/run/run.log and out"


def test_all_texts_of_data_but_peoples_own_words() -> None:
    data = {"message": "at /a/b/c", "list": ["/a/b/d", {"deep": "/a/b/e"}], "prompt": "/a/b/c", "n": 1.5, "none": None}
    hidden = hide_places(data)
    assert hidden == {"message": "at c", "list": ["d", {"deep": "e"}], "prompt": "/a/b/c", "n": 1.5, "none": None}


def test_a_field_that_is_a_file_is_one_path() -> None:
    data = {"file": "/srv/My Drive/out/loras/my cat.safetensors", "lora": "lora/my cat.safetensors"}
    assert hide_places(data, ["/srv/My Drive/out"]) == {"file": "my cat.safetensors", "lora": "lora/my cat.safetensors"}
