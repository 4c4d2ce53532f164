"""A ComfyUI page in a real browser: opens it, builds graphs in it, and notes what went wrong at our addresses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Response

OURS = ("/pack_under_test/", "/safe_scaler/")


def chromium() -> str | None:
    """The system's Chromium."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class ComfyPage:
    """One browser tab. `problems` collects errors that come from the pack.

    Tabs of one `BrowserContext` share what a browser keeps for a page (ComfyUI's last graph); a `Browser` gives each an
    own one.
    """

    def __init__(self, browser: Browser | BrowserContext, port: int, *, width: int = 1500, height: int = 1000) -> None:
        self.port = port
        self.problems: list[str] = []
        self.page: Page = browser.new_page()
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.set_default_timeout(240_000)
        self.page.on("console", self._console)
        self.page.on("pageerror", self._error)
        self.page.on("response", self._response)

    def open(self) -> None:
        self.page.goto(f"http://127.0.0.1:{self.port}/")
        self.wait("window.app?.graph && window.safeScaler?.ready")

    def reload(self) -> None:
        self.page.reload()
        self.wait("window.app?.graph && window.safeScaler?.ready")

    def wait(self, expression: str, timeout: float = 240_000) -> None:
        self.page.wait_for_function(expression, timeout=timeout)

    def run(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def open_panel(self) -> None:
        if self.page.locator("[data-testid=safe-scaler-panel]").count() == 0:
            self.run("() => app.extensionManager.command.execute('Workspace.ToggleSidebarTab.safeScaler')")
        self.page.wait_for_selector("[data-testid=safe-scaler-panel]")

    def close_panel(self) -> None:
        if self.page.locator("[data-testid=safe-scaler-panel]").count() > 0:
            self.run("() => app.extensionManager.command.execute('Workspace.ToggleSidebarTab.safeScaler')")

    def state(self) -> dict[str, Any]:
        """What the panel knows of the run that it shows."""
        return self.run(
            """() => {
              const state = window.safeScaler.client.current;
              if (!state) return {};
              const { x } = state.curves.points(["loss"]);
              return {
                id: state.run.run_id, state: state.run.state, step: state.run.step, points: x.length,
                loaded: state.loaded, previews: state.previews.length, log: state.log.length, first: x[0] ?? null,
              };
            }"""
        )

    def build(self, nodes: list[dict[str, Any]], links: list[tuple[str, str, str, str]]) -> dict[str, str]:
        """Put a graph on an empty canvas; returns the id of each node by its key.

        A node is `{key, type, pos, size?, widgets}`, a link (from key, output name, to key, input name).
        """
        return self.run(
            """({ nodes, links }) => {
              const graph = app.rootGraph ?? app.graph;
              graph.clear();
              const made = {};
              for (const { key, type, pos, size, widgets } of nodes) {
                const node = LiteGraph.createNode(type);
                if (!node) throw new Error(`no node type ${type}`);
                node.pos = pos;
                graph.add(node);
                for (const [name, value] of Object.entries(widgets ?? {})) {
                  const widget = node.widgets?.find((one) => one.name === name);
                  if (!widget) throw new Error(`${type} has no widget ${name}`);
                  widget.value = value;
                }
                if (size) node.setSize(size);
                made[key] = node;
              }
              for (const [from, output, to, input] of links) {
                const source = made[from].findOutputSlot(output);
                const target = made[to].findInputSlot(input);
                if (source < 0 || target < 0) throw new Error(`no link ${from}.${output} -> ${to}.${input}`);
                made[from].connect(source, made[to], target);
              }
              return Object.fromEntries(Object.entries(made).map(([key, node]) => [key, String(node.id)]));
            }""",
            {"nodes": nodes, "links": links},
        )

    def set_train_widgets(self, **values: Any) -> None:
        """Change widgets of the graph's Train node."""
        self.run(
            """(values) => {
              const train = (app.rootGraph ?? app.graph).nodes.find((node) => node.type === "SafeScalerTrain");
              const widget = (name) => train.widgets.find((one) => one.name === name);
              for (const [name, value] of Object.entries(values)) widget(name).value = value;
            }""",
            values,
        )

    def show_graph(self, scale: float, x: float, y: float) -> None:
        self.run(
            """([scale, x, y]) => {
              app.canvas.ds.scale = scale;
              app.canvas.ds.offset[0] = x;
              app.canvas.ds.offset[1] = y;
              app.canvas.setDirty(true, true);
            }""",
            [scale, x, y],
        )

    def queue(self) -> None:
        self.run("() => app.queuePrompt(0, 1)")

    def chart_pixels(self) -> str:
        """The loss chart's picture as a data URL."""
        return self.run("() => document.querySelector('.ss-charts canvas')?.toDataURL() ?? ''")

    def picture(self, path: Path, selector: str | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if selector is None:
            self.page.screenshot(path=path)
        else:
            self.page.locator(selector).first.screenshot(path=path)

    def _console(self, message: ConsoleMessage) -> None:
        place = message.location.get("url", "") if message.location else ""
        if message.type in ("error", "warning") and any(part in place + message.text for part in OURS):
            self.problems.append(f"{message.type} at {place}: {message.text}")

    def _error(self, error: Any) -> None:
        text = f"{error}\n{getattr(error, 'stack', '')}"
        if any(part in text for part in OURS):
            self.problems.append(text)

    def _response(self, response: Response) -> None:
        if response.status >= 400 and any(part in response.url for part in OURS):
            self.problems.append(f"{response.status} {response.url}")
