import assert from "node:assert/strict";
import { test } from "node:test";

import { charts } from "../../web/js/chart_data.js";
import { apply, foldHealth, fromSnapshot, newRun } from "../../web/js/store.js";
import { event, runFinished, runStarted, snapshot, stepFinished, stepRejected } from "./events.mjs";

function fold(...events) {
  const state = newRun("r");
  for (const one of events) apply(state, one);
  return state;
}

test("a run told by events alone", () => {
  const state = fold(runStarted(1), stepFinished(2, 1), stepFinished(3, 2, { loss: 0.25 }), runFinished(4, 2));
  assert.equal(state.run.state, "finished");
  assert.equal(state.run.step, 2);
  assert.equal(state.run.total_steps, 20);
  assert.equal(state.run.lora, "cat.safetensors");
  assert.deepEqual(state.curves.points(["loss"]).lines[0], [0.5, 0.25]);
  assert.deepEqual(state.log.map((line) => line.tone), ["note", "good"]);
});

test("a snapshot and the socket may overlap in any way", () => {
  const whole = fromSnapshot(snapshot());
  assert.equal(fromSnapshot(snapshot({ last: { eta_seconds: 30 } })).last.eta_seconds, 30);
  for (const seq of [9, 10]) assert.equal(apply(whole, stepFinished(seq, 3, { loss: 99 })), false);
  assert.equal(apply(whole, stepFinished(11, 4, { loss: 0.5 })), true);
  assert.equal(apply(whole, stepFinished(11, 4, { loss: 0.5 })), false);
  assert.deepEqual(whole.curves.points(["loss"]), { x: [1, 2, 3, 4], lines: [[3, 2, 1, 0.5]] });
  assert.equal(whole.missed, false);
});

test("a hole in the steps is noticed", () => {
  const state = fromSnapshot(snapshot());
  apply(state, stepFinished(30, 9));
  assert.equal(state.missed, true);
});

test("a rejected step is marked, leaves a gap and names the picture", () => {
  const state = fold(runStarted(1), stepFinished(2, 1), stepRejected(3, 2), stepFinished(4, 3));
  assert.deepEqual(state.rejected, [2]);
  assert.deepEqual(state.curves.points(["loss"]).lines[0], [0.5, null, 0.5]);
  const line = state.log.at(-1);
  assert.equal(line.tone, "warn");
  assert.match(line.text, /the loss is not a number.*unet\.mid.*cat<1>\.png/);
  assert.deepEqual(charts(state)[0].marks, [2]);
});

test("going back to a checkpoint takes back what came after", () => {
  const state = fold(
    runStarted(1), stepFinished(2, 1), event("ValidationFinished", 3, 1, { validation_loss: 0.3, bands: [], pictures: 1 }),
    stepFinished(4, 2), event("ValidationFinished", 5, 2, { validation_loss: 0.2, bands: [], pictures: 1 }),
    event("PreviewReady", 6, 2, { file: "x.png", prompt: "p", index: 0, seed: 1 }), stepRejected(7, 3),
    event("Resumed", 8, 1, { checkpoint: "step-00000001", attempt: 1, differences: [], passed_over: [] }),
    stepFinished(9, 2, { loss: 0.1 }),
  ); // prettier-ignore
  assert.deepEqual(state.curves.points(["loss"]), { x: [1, 2], lines: [[0.5, 0.1]] });
  assert.deepEqual(state.validation.map((row) => row.step), [1]);
  assert.deepEqual(state.previews, []);
  assert.deepEqual(state.rejected, []);
  assert.equal(state.run.step, 2);
  assert.equal(state.missed, false);
});

test("a rollback takes the steps anew", () => {
  const state = fold(runStarted(1), stepFinished(2, 1), stepFinished(3, 2, { loss: 9 }), stepFinished(4, 3, { loss: 9 }));
  apply(state, event("Intervention", 5, 1, { action: "went back to step 1", reason: "exploding", attempt: 1 }));
  apply(state, stepFinished(6, 2, { loss: 0.2 }));
  assert.deepEqual(state.curves.points(["loss"]), { x: [1, 2], lines: [[0.5, 0.2]] });
  assert.equal(state.run.step, 2);
  assert.equal(state.missed, false);
});

test("a verdict that is over is shown no more, also after a reload", () => {
  const verdict = (seq, severity) => event("Verdict", seq, seq, { kind: "STALE", where: "te1", sentence: "s", severity });
  const state = fold(verdict(1, "warning"));
  assert.equal(state.verdicts.size, 1);
  apply(state, verdict(2, "ok"));
  assert.equal(state.verdicts.size, 0);
  const late = fromSnapshot(snapshot({ events: [verdict(1, "warning"), verdict(2, "ok"), verdict(3, "warning")] }));
  assert.deepEqual([...late.verdicts.values()].map((one) => one.step), [3]);
});

test("norms of module groups are one line a part", () => {
  const state = newRun("r");
  state.health.norms = { "up0.ff": [[1, 3]], "down1.cross": [[1, 3], [2, 0]], "down2.ff": [[1, 4], [2, 1]], te1: [[1, 0.5]] };
  const chart = charts(state).find((one) => one.key === "norms");
  const lines = chart.groups.slice(1).map((one) => [one.lines[0].label, one.x, one.lines[0].y]);
  assert.deepEqual(lines, [["UNet down", [1, 2], [5, 1]], ["UNet up", [1], [3]], ["Text encoder 1", [1], [0.5]]]);
});

test("the same preview told twice stands once", () => {
  const told = (seq) => event("PreviewReady", seq, 5, { file: "x.png", prompt: "p", index: 1, seed: 1 });
  assert.deepEqual(fold(told(1), told(2)).previews.map((row) => row.id), ["5-1"]);
});

test("pause is known from the answer to the command", () => {
  const ack = (seq, cmd) => event("Ack", seq, 3, { id: "1", cmd, ok: true, message: "" });
  const state = fold(runStarted(1), ack(2, "pause"));
  assert.equal(state.paused, true);
  apply(state, ack(3, "resume"));
  assert.equal(state.paused, false);
});

test("health figures are joined without repeats and thinned", () => {
  const state = fromSnapshot(snapshot());
  const rows = [{ module: "unet", step: 3, data: { norm: 0.7 } }];
  foldHealth(state, { step: 3, rows, norms: { unet: [[2, 0.5], [3, 0.7]] } });
  assert.deepEqual(state.health.norms.unet, [[2, 0.5], [3, 0.7]]);
  for (let step = 4; step < 2000; step += 1) {
    foldHealth(state, { step, rows: [{ module: "unet", step, data: { norm: step } }], norms: { unet: [[step, step]] } });
  }
  assert.ok(state.health.norms.unet.length <= 241);
  assert.equal(state.health.norms.unet.at(-1)[0], 1999);
  assert.equal(state.health.rows[0].data.norm, 1999);
});

test("the log does not grow without end", () => {
  const state = newRun("r");
  for (let seq = 1; seq <= 3000; seq += 1) apply(state, stepRejected(seq, seq));
  assert.ok(state.log.length <= 500);
  assert.ok(state.rejected.length <= 500);
});

test("unknown and malformed events do no harm", () => {
  const state = fold(runStarted(1), event("FromTheFuture", 2, 1, { a: 1 }), null, {}, { type: "StepFinished" }, "x");
  assert.equal(state.seq, 2);
  assert.equal(apply(state, event("Verdict", 3, 1, undefined)), true);
});
