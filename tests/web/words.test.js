import assert from "node:assert/strict";
import { test } from "node:test";

import { Alerts } from "../../web/js/alerts.js";
import { readReply, shortName } from "../../web/js/comfy_host.js";
import { isPast } from "../../web/js/controls.js";
import { bareName, bytes, clock, duration, memory, number, plural, tick } from "../../web/js/format.js";
import { byPrompt } from "../../web/js/gallery.js";
import { waitingWords } from "../../web/js/run_picker.js";
import { groupName, phaseWords, sentence, stateWord, tone, verdictWord, withoutPaths } from "../../web/js/sentences.js";
import { messageOf, whereWords } from "../../web/js/status_card.js";
import { progressWords } from "../../web/js/train_widget.js";
import { event, runFinished, stepFinished, stepRejected } from "./events.mjs";

test("numbers as a person reads them", () => {
  const told = [0, 0.0123456, 1.5, 65536, 0.0001, 1e7, 12.3456, null, NaN, Infinity].map((value) => number(value));
  assert.deepEqual(told, ["0", "0.0123", "1.5", "65,536", "1.0e-4", "1.0e7", "12.3", "–", "–", "–"]);
  assert.deepEqual([45, 720, 11_100, 300_000, -1, null].map(duration), ["45 s", "12 min", "3 h 05 min", "3 days", "–", "–"]);
  assert.deepEqual([0, 999, 12_345_678].map((value) => bytes(value)), ["0 B", "999 B", "12.3 MB"]);
  assert.equal(bytes(8.5 * 1024 ** 3, true), "8.5 GiB");
  assert.deepEqual([memory(8), memory(8, "GB"), memory(null)], ["8 GiB", "8.59 GB", "–"]);
  assert.equal(bareName("C:\\a\\b.safetensors"), "b.safetensors");
  assert.equal(clock(undefined), "–");
  assert.deepEqual([plural(1, "step"), plural(1200, "step")], ["1 step", "1,200 steps"]);
});

test("paths are shown without their folders", () => {
  const told = [
    "Go on with: safe-scaler resume /home/me/out/safe_scaler/2026-a1", "C:\\Users\\me\\a.safetensors is there",
    "1/2 of the steps, and/or", "see https://example.com/a/b", "the run folder's run.log", "/tmp/x.png, /tmp/y.png",
  ].map(withoutPaths); // prettier-ignore
  assert.deepEqual(told, [
    "Go on with: safe-scaler resume 2026-a1", "a.safetensors is there", "1/2 of the steps, and/or",
    "see https://example.com/a/b", "the run folder's run.log", "x.png, y.png",
  ]); // prettier-ignore
});

test("ticks differ from their neighbours", () => {
  assert.deepEqual([0.02855, 0.0286, 0.02865].map((value) => tick(value, 0.00005)), ["0.02855", "0.0286", "0.02865"]);
  assert.deepEqual([0, 500, 1000].map((value) => tick(value, 500)), ["0", "500", "1,000"]);
  assert.deepEqual([1e-4, 1.5e-4].map((value) => tick(value, 5e-5)), ["1.0e-4", "1.5e-4"]);
  assert.deepEqual([0.001, 0.1, 65536].map((value) => tick(value, 0)), ["0.001", "0.1", "65,536"]);
  assert.equal(tick(null, 1), "");
});

test("each kind of event has its sentence", () => {
  const told = (type, data, step = 3) => sentence(event(type, 1, step, data));
  assert.equal(told("Warned", { topic: "settings", message: "m" }).tone, "note");
  assert.equal(told("Warned", { topic: "checkpoint", message: "disk full" }).tone, "warn");
  assert.match(told("Intervention", { action: "Learning rate halved", reason: "spikes" }).text, /^Learning rate halved \(spikes\)\.$/);
  assert.deepEqual(told("Verdict", { kind: "dead", where: "te1", sentence: "Text encoder 1 gets no gradient", severity: "warning" }), {
    tone: "warn",
    text: "Text encoder 1 gets no gradient",
  });
  assert.match(told("LoraSaved", { file: "lora/a.safetensors", bytes: 1e6, final: true }).text, /^The finished LoRA a\.safetensors/);
  assert.match(told("Resumed", { checkpoint: "step-5", differences: ["lr"], passed_over: ["step-6"] }).text, /lr.*step-6/);
  assert.equal(sentence(runFinished(1, 5, "failed")).tone, "bad");
  assert.match(sentence(runFinished(1, 5, "stopped")).text, /can be resumed/);
  assert.doesNotMatch(told("RunFinished", { status: "stopped", applied: 0, rejected: 0, checkpoint: null }).text, /can be resumed/);
  assert.equal(sentence(stepFinished(1, 1)), null);
  assert.equal(told("Heartbeat", {}), null);
  assert.equal(told("PreviewReady", { prompt: "a cat" }), null); // the gallery shows it; a snapshot's log has none
  assert.equal(phaseWords({ phase: "caching", done: 3, total: 9 }), "Preparing pictures and captions 3 of 9");
  assert.deepEqual([stateWord("running", true), stateWord("interrupted")], ["Paused", "Interrupted"]);
  const verdicts = ["HEALTHY", "warning", "EXPLODING", "info", "NON-FINITE", "TE1-DEAD", "CLIP-SATURATED", "IMBALANCED"];
  assert.deepEqual(verdicts.map(tone), ["good", "warn", "bad", "note", "bad", "bad", "warn", "warn"]);
  const groups = ["down1.cross", "mid.ff", "te1", "up0.conv", "other"].map(groupName);
  assert.deepEqual(groups, ["Down 1 cross-attn", "Middle feed-forward", "Text encoder 1", "Up 0 conv", "other"]);
  assert.deepEqual(["TE1-DEAD", "HEALTHY"].map(verdictWord), ["Text encoder 1 dead", "Healthy"]);
});

test("alerts follow the setting, and a storm is one message", () => {
  const told = [];
  let level = "serious";
  let time = 0;
  const settings = { alerts: () => level, notifyAtEnd: () => false };
  const alerts = new Alerts({ settings, notify: (...words) => told.push(words) }, () => time);
  alerts.take("cat", stepRejected(1, 1));
  assert.equal(told.length, 0);
  alerts.take("cat", runFinished(2, 5));
  assert.equal(told[0][0], "success");
  level = "all";
  for (let seq = 3; seq < 200; seq += 1) alerts.take("cat", stepRejected(seq, seq));
  assert.equal(told.length, 2);
  time = 30_000;
  alerts.take("cat", stepRejected(300, 300));
  assert.equal(told.length, 3);
  level = "off";
  alerts.take("cat", runFinished(301, 300, "failed"));
  assert.equal(told.length, 3);
});

test("an answer that is no success becomes an error with the server's words", async () => {
  const reply = (status, body) => new Response(body, { status });
  assert.deepEqual(await readReply(reply(200, '{"a":1}')), { a: 1 });
  const refused = readReply(reply(409, '{"error":{"code":"running","message":"Stop it first."}}'));
  await assert.rejects(refused, (error) => error.status === 409 && error.message === "Stop it first.");
  await assert.rejects(readReply(reply(502, "<html>")), (error) => error.status === 502 && /502/.test(error.message));
});

test("previews by prompt and step", () => {
  const list = [[10, 1], [0, 0], [10, 0], [0, 1]].map(([step, index]) => ({ id: `${step}-${index}`, step, index, prompt: `p${index}` }));
  const table = byPrompt(list);
  assert.deepEqual(table.map((one) => [one.prompt, one.list.map((row) => row.id)]), [["p0", ["0-0", "10-0"]], ["p1", ["0-1", "10-1"]]]);
});

test("a GPU's name without the allocator", () => {
  assert.equal(shortName("cuda:0 NVIDIA GeForce RTX 3060 : cudaMallocAsync", 0), "GPU 0 NVIDIA GeForce RTX 3060");
  assert.equal(shortName("mps", 0), "GPU 0");
});

test("what a queued run waits for, and for how long", () => {
  const running = { run: { run_id: "r1", state: "running", step: 5 }, last: { eta_seconds: 720 } };
  const client = { runs: [{ run_id: "r1", name: "cat" }], states: new Map([["r1", running]]) };
  const one = { prompt_id: "p", node_id: "4", name: "dog", steps: 400, position: 1, waiting_for: "r1" };
  assert.equal(waitingWords(one, client), "Waiting for run cat, about 12 min left · 400 steps");
  assert.equal(waitingWords({ ...one, position: 3, steps: null }, client), "Waiting for run cat · 3 graphs before it");
  assert.equal(waitingWords({ ...one, waiting_for: null }, client), "Waiting for its turn · 400 steps");
  assert.equal(waitingWords({ ...one, position: 0 }, client), "Getting ready: the nodes before it come first");
});

test("what the card says of a run's progress, before its process has said a word too", () => {
  const run = { state: "running", step: 0, total_steps: 0 };
  assert.equal(whereWords({ run, phase: null, last: null }), "Starting");
  assert.equal(whereWords({ run, phase: { phase: "loading", done: 0, total: 0 }, last: null }), "Loading the model");
  const later = { ...run, step: 120, total_steps: 400 };
  assert.equal(whereWords({ run: later, phase: { phase: "training" }, last: { eta_seconds: 720 } }), "Step 120 of 400 · 30 % · 12 min left");
  assert.equal(whereWords({ run: { ...later, state: "stopped", seconds: 45 }, phase: null, last: null }), "Step 120 of 400 · 30 % · 45 s");
});

test("how to go on with a stopped run, in the words of the place", () => {
  const message = "Stopped after step 5 of 20 (5 applied).";
  const run = { state: "stopped", step: 5, message, lora: "out/cat-step00000005.safetensors" };
  const lora = "LoRA: cat-step00000005.safetensors";
  assert.equal(messageOf(run, "Press Run."), `${message} Press Run. ${lora}`);
  assert.equal(messageOf({ ...run, step: 0 }, "Press Run."), `${message} ${lora}`);
  assert.equal(messageOf({ ...run, state: "interrupted" }, "Press Run."), `The run ended without a last word. Press Run. ${lora}`);
  assert.equal(messageOf({ ...run, state: "finished" }, "Press Run."), lora);
  assert.equal(messageOf({ state: "failed", step: 5, message: "Out of memory." }, "Press Run."), "Out of memory.");
});

test("an answer to a button stands no longer than it is true", () => {
  const told = (cmd, ok = true) => ({ cmd, ok, at: 0 });
  assert.equal(isPast(told("pause"), true, 100), false);
  assert.equal(isPast(told("pause"), false, 100), true); // somebody else let it go on
  assert.equal(isPast(told("resume"), false, 100), false);
  assert.equal(isPast(told("resume"), true, 100), true);
  assert.equal(isPast(told("save"), false, 11_000), true);
  assert.equal(isPast(told("stop"), false, 60_000), false);
  assert.equal(isPast(told("save", false), false, 60_000), false);
});

test("the line in the Train node", () => {
  const client = { runs: [], states: new Map() };
  const run = { run_id: "r1", state: "running", step: 120, total_steps: 400 };
  const state = { run, phase: { phase: "training" }, last: { eta_seconds: 720, loss_avg: 0.0812 }, paused: false };
  assert.equal(progressWords(null, null, client), "Not trained yet");
  assert.equal(progressWords(state, null, client), "step 120 of 400 · 12 min left · loss 0.0812");
  assert.equal(progressWords({ ...state, paused: true }, null, client), "Paused · step 120 of 400 · 12 min left · loss 0.0812");
  const caching = { ...state, run: { ...run, step: 0 }, phase: { phase: "caching", done: 2, total: 9 }, last: null };
  assert.equal(progressWords(caching, null, client), "Preparing pictures and captions 2 of 9 · step 0 of 400");
  const previewing = { ...state, phase: { phase: "previewing", done: 0, total: 1 } };
  assert.equal(progressWords(previewing, null, client), "step 120 of 400 · 12 min left · loss 0.0812 · Making preview pictures 0 of 1");
  const stopped = { ...state, run: { ...run, state: "stopped" }, phase: null };
  assert.equal(progressWords(stopped, null, client), "Stopped · step 120 of 400 · Run goes on · loss 0.0812");
  const over = { ...state, run: { ...run, state: "finished", step: 400 }, phase: null };
  assert.equal(progressWords(over, null, client), "Finished · step 400 of 400 · loss 0.0812");
  const queued = { prompt_id: "p", node_id: "4", name: "dog", steps: 400, position: 1, waiting_for: null };
  assert.equal(progressWords(over, queued, client), "Waiting for its turn · 400 steps");
  assert.equal(progressWords(state, queued, client), "step 120 of 400 · 12 min left · loss 0.0812");
});
