import assert from "node:assert/strict";
import { test } from "node:test";

import { charts, legendWords, merged } from "../../web/js/chart_data.js";
import { CURVE_NAMES, Curves } from "../../web/js/curves.js";
import { apply, foldHealth, newRun } from "../../web/js/store.js";
import { stepFinished } from "./events.mjs";

test("every step is a point while there is room", () => {
  const curves = new Curves(["loss"], 8);
  [1, 2, 3].forEach((step) => curves.add(step, { loss: step * 10 }));
  assert.deepEqual(curves.points(["loss"]), { x: [1, 2, 3], lines: [[10, 20, 30]] });
});

test("a long run keeps its extremes in bounded memory", () => {
  const curves = new Curves(["loss"], 600);
  for (let step = 1; step <= 100_000; step += 1) curves.add(step, { loss: step === 54_321 ? 99 : step === 777 ? -5 : 1 });
  const { x, lines } = curves.points(["loss"]);
  assert.ok(x.length <= 1200);
  assert.equal(Math.max(...lines[0]), 99);
  assert.equal(Math.min(...lines[0]), -5);
  const place = x[lines[0].indexOf(99)];
  assert.ok(Math.abs(place - 54_321) <= curves.stride);
  assert.equal(curves.stride, 256);
});

test("what is not finite leaves a gap and spoils no neighbour", () => {
  const curves = new Curves(["loss"], 4);
  [1, null, 3, NaN, Infinity, "7", undefined, 5].forEach((loss, index) => curves.add(index + 1, { loss }));
  assert.equal(curves.stride, 2);
  assert.deepEqual(curves.points(["loss"]).lines[0], [1, 1, 3, 3, null, null, 5, 5]);
  assert.equal(curves.last("loss"), 5);
});

test("a curve may begin later than the others", () => {
  const curves = new Curves(["loss"], 8);
  curves.add(1, { loss: 1 });
  curves.add(2, { loss: 2, "lr:unet": 1e-4 });
  assert.deepEqual(curves.points(["lr:unet"]).lines[0], [null, 1e-4]);
  assert.deepEqual(curves.rates, ["unet"]);
});

test("going back forgets what came after", () => {
  const curves = new Curves(["loss"], 8);
  for (let step = 1; step <= 6; step += 1) curves.add(step, { loss: step });
  curves.truncate(4);
  curves.add(5, { loss: 50 });
  assert.deepEqual(curves.points(["loss"]), { x: [1, 2, 3, 4, 5], lines: [[1, 2, 3, 4, 50]] });
  curves.truncate(0);
  assert.equal(curves.last("loss"), null);
});

test("a snapshot's table continues as if its steps had come one by one", () => {
  const one = new Curves(["loss"], 16);
  for (let step = 1; step <= 100; step += 1) one.add(step, { loss: step % 7 });
  const steps = [];
  const min = [];
  const max = [];
  for (let step = 1; step <= 60; step += 4) {
    const values = [0, 1, 2, 3].map((more) => (step + more) % 7);
    steps.push(step);
    min.push(Math.min(...values));
    max.push(Math.max(...values));
  }
  const nothing = Object.fromEntries(CURVE_NAMES.map((name) => [name, { min: min.map(() => null), max: max.map(() => null) }]));
  const late = Curves.from({ stride: 4, steps, metrics: { ...nothing, loss: { min, max } }, lr: {} }, 16);
  for (let step = 61; step <= 100; step += 1) late.add(step, { loss: step % 7 });
  assert.deepEqual(late.points(["loss"]), one.points(["loss"]));
});

test("a snapshot finer than the panel's room is folded", () => {
  const steps = Array.from({ length: 40 }, (_, index) => index + 1);
  const side = steps.map((step) => step);
  const curves = Curves.from({ stride: 1, steps, metrics: { loss: { min: side, max: side } }, lr: {} }, 16);
  assert.equal(curves.stride, 4);
  assert.equal(curves.last("loss"), 40);
});

test("groups with steps of their own are merged", () => {
  const a = { x: [1, 3], lines: [{ label: "a", y: [10, 30] }] };
  const b = { x: [2, 3], lines: [{ label: "b", y: [5, 6] }] };
  assert.deepEqual(merged([a, b]), {
    x: [1, 2, 3],
    lines: [{ label: "a", y: [10, null, 30] }, { label: "b", y: [null, 5, 6] }],
  });
});

test("a frame of a 100,000-step run takes less than 5 ms", () => {
  const state = newRun("r");
  let seq = 0;
  for (let step = 1; step <= 100_000; step += 1) {
    seq += 1;
    apply(state, stepFinished(seq, step, { loss: Math.sin(step) }));
  }
  const groups = ["down1", "down2", "mid", "up0", "up1"].flatMap((block) => ["self", "cross", "ff", "proj"].map((kind) => `${block}.${kind}`));
  const norms = [...groups, "te1", "te2"].map((group) => [group, Array.from({ length: 240 }, (_, index) => [1 + index * 416, 0.1])]);
  foldHealth(state, { step: 100_000, rows: [{ module: "te1", step: 100_000, data: {} }], norms: Object.fromEntries(norms) });
  // Processor time: what other programs take of this machine is not the panel's.
  const spent = () => process.cpuUsage().user / 1000;
  const times = [];
  for (let frame = 0; frame < 60; frame += 1) {
    const begin = spent();
    for (let more = 0; more < 25; more += 1) {
      seq += 1;
      apply(state, stepFinished(seq, 100_000 + frame * 25 + more + 1));
    }
    for (const chart of charts(state)) merged(chart.groups);
    times.push(spent() - begin);
  }
  times.sort((a, b) => a - b);
  const median = times[30];
  console.log(`frame logic at 100,000 steps: median ${median.toFixed(2)} ms, worst ${times[59].toFixed(2)} ms`);
  assert.ok(median < 5, `median ${median} ms`);
});

test("a legend says of which step a number is that is older than the others", () => {
  const lines = [{ y: [0.5, 0.01, 0.02] }, { y: [0.07, null, null] }, { y: [null, null, null] }];
  assert.deepEqual(legendWords([1, 2, 3], lines, null), ["0.02", "0.07 (step 1)", "–"]);
  assert.deepEqual(legendWords([1, 2, 3], lines, 1), ["0.01", "–", "–"]);
  assert.deepEqual(legendWords([1], [{ y: [0.5] }, { y: [0.7] }], null), ["0.5", "0.7"]);
});
