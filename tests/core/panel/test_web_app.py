"""What the panel's own web application gives out; the routes themselves are tested with gradio (tests/panel_twin)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer_core.errors import ResourceError
from trainer_core.panel import app, web_app


@pytest.mark.parametrize(
    "name", ["js/panel.js", "css/panel.css", "js/vendor/uPlot-1.6.32.mjs", "js/standalone_boot.mjs"]
)
def test_the_panels_files_are_found(name: str) -> None:
    assert web_app.web_file(name) is not None


@pytest.mark.parametrize(
    "name",
    ["", "js", "js/", "../pyproject.toml", "js/../../pyproject.toml", "js/../package.json", "package.json", "docs/x.md",
     "js/none.js", "/etc/passwd", "js//etc/passwd", "js\\..\\..\\run.py", "js/\0.js", "js/panel.js\0", "C:/x.js",
     "js/vendor/uPlot-LICENSE.txt"],
)  # fmt: skip
def test_nothing_else_is(name: str) -> None:
    assert web_app.web_file(name) is None


def test_a_password_of_the_host_application_holds() -> None:
    open_app, guarded = SimpleNamespace(), SimpleNamespace(auth={"me": "x"}, tokens={"t0ken": "me"})
    assert web_app.signed_in(open_app, {})
    assert web_app.signed_in(SimpleNamespace(auth=None, auth_dependency=None), {})
    assert not web_app.signed_in(guarded, {})
    assert not web_app.signed_in(guarded, {"access-token": "wrong", "other": "t0ken"})
    assert web_app.signed_in(guarded, {"access-token-unsecure-abc": "t0ken"})
    assert not web_app.signed_in(
        SimpleNamespace(auth=None, auth_dependency=print, tokens={}), {"access-token": "t0ken"}
    )


def test_without_gradio_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    with pytest.raises(ResourceError, match="pip install gradio"):
        app.blocks()


def test_missing_files_of_the_panel_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    pytest.importorskip("starlette", reason="comes with gradio")
    monkeypatch.setattr(web_app, "WEB", tmp_path)
    with pytest.raises(ResourceError, match="part of the repository"):
        web_app.mount(SimpleNamespace(), SimpleNamespace())
