import assert from "node:assert/strict";
import { test } from "node:test";

/** As much of a page as the widgets touch. */
class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], dataset: {}, parent: null, textContent: "", className: "", hidden: false, clientWidth: 0 });
    this.style = { setProperty() {} };
    this.classList = { toggle() {} };
  }

  get isConnected() {
    return this.tag === "body" || (this.parent?.isConnected ?? false);
  }

  append(...more) {
    for (const one of more) {
      if (one instanceof Element) one.parent = this;
      this.children.push(one);
    }
  }

  replaceChildren(...more) {
    this.children = [];
    this.append(...more);
  }

  remove() {
    if (this.parent) this.parent.children = this.parent.children.filter((one) => one !== this);
    this.parent = null;
  }

  addEventListener() {}
  setAttribute() {}
  removeAttribute() {}
}

const body = new Element("body");
globalThis.document = { hidden: true, createElement: (tag) => new Element(tag), getElementById: () => body, head: body };
globalThis.window = globalThis;
globalThis.navigator ??= { language: "en" };
globalThis.devicePixelRatio = 1;
globalThis.matchMedia = () => ({ addEventListener() {}, removeEventListener() {} });
globalThis.addEventListener = globalThis.dispatchEvent = () => {};
globalThis.getComputedStyle = () => ({ color: "rgb(0, 0, 0)" });
for (const name of ["ResizeObserver", "IntersectionObserver"]) {
  globalThis[name] = class {
    observe() {}
    disconnect() {}
  };
}

const { Controls, commandShownRun } = await import("../../web/js/controls.js");
const { addMonitorWidget } = await import("../../web/js/monitor_widget.js");
const { fromSnapshot, newRun } = await import("../../web/js/store.js");
const { snapshot } = await import("./events.mjs");

const shown = (runId) => ({ loaded: true, paused: false, run: { run_id: runId, state: "running", live: true } });

test("a stop is for the run that was shown when it was asked for", async () => {
  const sent = [];
  let agree;
  const client = { down: false, command: async (...asked) => (sent.push(asked), { ok: true }) };
  const confirm = () => new Promise((resolve) => (agree = () => resolve(true)));
  const controls = new Controls(client, { settings: { confirmStop: () => true }, confirm, reportUrl: () => "" });
  controls.update(shown("first"));
  const asked = controls.send("stop");
  controls.update(shown("second")); // the next run of the queue has begun
  agree();
  await asked;
  assert.deepEqual(sent, [["first", "stop"]]);
  assert.equal(controls.answer.textContent, "");
});

test("a stop by the palette or the menu asks first, as the settings want it", async () => {
  const sent = [];
  const told = [];
  const questions = [];
  const client = { current: shown("first"), command: async (...asked) => (sent.push(asked), { ok: true }) };
  const env = (confirmStop, agree) => ({
    settings: { confirmStop: () => confirmStop },
    confirm: async (title) => (questions.push(title), (client.current = shown("second")), agree),
    notify: (...words) => told.push(words),
  });
  await commandShownRun(client, env(true, false), "stop");
  assert.deepEqual([questions, sent, told], [["Stop training"], [], []]);
  client.current = shown("first");
  await commandShownRun(client, env(true, true), "stop");
  assert.deepEqual(sent, [["first", "stop"]]);
  await commandShownRun(client, env(false, false), "stop");
  await commandShownRun(client, env(true, false), "save");
  assert.deepEqual(sent.slice(1), [["second", "stop"], ["second", "save"]]);
  assert.equal(questions.length, 2);
  assert.deepEqual(told.at(-1), ["success", "Safe-Scaler", "save: sent"]);
});

test("the monitor shows nothing of the run before", async (context) => {
  let root = null;
  let state = fromSnapshot(snapshot());
  const client = { watchers: 0, intervalMs: 1, runOfNode: () => state };
  const node = { id: 5, addDOMWidget: (_name, _kind, element) => ((root = element), {}) };
  globalThis.requestAnimationFrame = (draw) => draw();
  document.hidden = false;
  addMonitorWidget(node, client, () => null);
  context.after(() => node.onRemoved()); // also after a failure: else its timer keeps the process
  body.append(root);
  const looks = async () => {
    await new Promise((resolve) => setTimeout(resolve, 30));
    const [, plots, figures, verdict] = root.children;
    return { plots: plots.children.length, figures: figures.textContent, verdict: verdict.textContent };
  };
  const first = await looks();
  assert.equal(first.plots, 2);
  assert.match(first.figures, /rejected 0/);
  state = newRun("another"); // it has begun and has no numbers yet
  assert.deepEqual({ ...(await looks()), figures: "" }, { plots: 0, figures: "", verdict: "" });
  state = null; // its graph is not the one on the page any more
  assert.deepEqual(await looks(), { plots: 0, figures: "", verdict: "" });
});
