import assert from "node:assert/strict";
import { test } from "node:test";

import { PanelClient } from "../../web/js/client.js";
import { event, runFinished, runStarted, snapshot, stepFinished } from "./events.mjs";

const RUN = "20261129T171500Z-1a2b";
const LISTED = { ...snapshot().run };

/** A server whose answers the test sets, and a clock that the test moves. */
function setUp(answers = {}) {
  const asked = [];
  let time = 1_000_000;
  let listeners = {};
  const given = { "GET /runs": { runs: [LISTED] }, [`GET /runs/${RUN}/snapshot`]: snapshot(), ...answers };
  const transport = {
    async request(method, path, body) {
      asked.push([method, path, body]);
      const answer = given[`${method} ${path.split("?")[0]}`];
      if (answer === undefined) throw Object.assign(new Error("not there"), { status: 404 });
      if (answer instanceof Error) throw answer;
      return typeof answer === "function" ? answer(body, path) : structuredClone(answer);
    },
    listen(onMessage, onReconnect, onPing) {
      listeners = { onMessage, onReconnect, onPing };
      return () => {};
    },
  };
  const clock = { now: () => time, setTimeout: () => 1, clearTimeout() {} };
  const client = new PanelClient(transport, clock);
  client.watchers = 1;
  return { client, asked, given, pass: (ms) => (time += ms), emit: (...list) => list.forEach((one) => listeners.onMessage(one)), listen: () => listeners };
}

const settle = () => new Promise((resolve) => setImmediate(resolve));
const message = (one, more = {}) => ({ run_id: RUN, node_id: "5", monitor_node_id: "7", event: one, ...more });

test("at the start the newest run is shown from its snapshot", async () => {
  const { client } = setUp();
  client.start();
  await settle();
  assert.equal(client.selected, RUN);
  assert.equal(client.current.run.step, 3);
  assert.equal(client.current.curves.last("loss"), 1);
  client.stop();
});

test("events that come while the snapshot is under way are folded on top of it", async () => {
  const { client, given, emit } = setUp();
  let answer;
  given[`GET /runs/${RUN}/snapshot`] = () => new Promise((resolve) => (answer = () => resolve(snapshot())));
  client.start();
  await settle();
  emit(message(stepFinished(10, 3, { loss: 77 })), message(stepFinished(11, 4, { loss: 0.5 })));
  answer();
  await settle();
  assert.deepEqual(client.current.curves.points(["loss"]), { x: [1, 2, 3, 4], lines: [[3, 2, 1, 0.5]] });
});

test("the steps of one message are folded in order, and nodes find their run", async () => {
  const { client, emit } = setUp();
  client.start();
  await settle();
  emit(message(stepFinished(13, 6), { earlier: [stepFinished(11, 4), stepFinished(12, 5)] }));
  assert.equal(client.current.run.step, 6);
  assert.equal(client.current.missed, false);
  assert.equal(client.runOfNode(7), client.current);
  assert.equal(client.runOfNode("99"), null);
  emit({ ...message(stepFinished(14, 7)), node_id: "12:3" });
  assert.equal(client.runOfNode(3), client.current);
});

test("a node of another graph with the same id does not show the run", async () => {
  const { client, emit } = setUp({ "GET /runs": { runs: [{ ...LISTED, node_ids: [] }] } });
  client.graphOf = () => "mine";
  client.start();
  await settle();
  emit(message(stepFinished(11, 4), { graph_id: "another" }));
  assert.equal(client.runOfNode(5), null);
  emit(message(stepFinished(12, 5), { graph_id: "mine" }));
  assert.equal(client.runOfNode(5), client.current);
  client.graphOf = () => "third";
  assert.equal(client.runOfNode(5), null);
  emit(message(stepFinished(13, 6))); // a prompt by API: its graph is not known
  assert.equal(client.runOfNode(5), client.current);
});

test("a page that is opened later shows a node's last run, also one that is over", async () => {
  const older = { ...LISTED, run_id: "20261128T000000Z-0000", state: "finished", live: false, graph_id: "mine" };
  const stopped = { ...LISTED, state: "stopped", live: false, graph_id: "mine" };
  const { client, given } = setUp({ "GET /runs": { runs: [stopped, older] } });
  const seen = snapshot();
  seen.run = { ...seen.run, ...stopped };
  given[`GET /runs/${RUN}/snapshot`] = seen;
  client.graphOf = () => "mine";
  client.start();
  await settle();
  assert.deepEqual([client.runOfNode(5).run.run_id, client.runOfNode(5).run.state], [RUN, "stopped"]);
  given["GET /runs"] = { runs: [older] };
  await client.refreshRuns();
  assert.equal(client.runOfNode(5).run.run_id, older.run_id); // the newer one was deleted
  assert.equal(client.runOfNode(5).run.state, "finished");
});

test("a queued run is shown in its own graph alone", async () => {
  const one = { prompt_id: "p", graph_id: "mine", node_id: "4", name: "dog", steps: 4, position: 1, waiting_for: null };
  const { client } = setUp({ "GET /runs": { runs: [LISTED], waiting: [one] } });
  client.start();
  await settle();
  client.graphOf = () => "mine";
  assert.deepEqual(client.waitingOfNode(4), one);
  client.graphOf = () => "another";
  assert.equal(client.waitingOfNode(4), null);
});

test("a run that goes on is running in every tab before its worker says a word", async () => {
  const stopped = snapshot();
  stopped.run.state = "stopped";
  const { client, given, pass } = setUp({ "GET /runs": { runs: [{ ...LISTED, state: "stopped" }] } });
  given[`GET /runs/${RUN}/snapshot`] = stopped;
  client.start();
  await settle();
  assert.equal(client.current.run.state, "stopped");
  given["GET /runs"] = { runs: [LISTED] };
  given[`GET /runs/${RUN}/snapshot`] = snapshot({ phase: null });
  pass(6000);
  await client._poll();
  await settle();
  assert.equal(client.current.run.state, "running");
});

test("a server that is gone is asked for the list alone, every five seconds", async () => {
  const { client, given, asked, pass } = setUp();
  client.start();
  await settle();
  pass(6000);
  const fails = () => { throw new Error("Failed to fetch"); };
  given["GET /runs"] = fails;
  given[`GET /runs/${RUN}/updates`] = fails;
  const before = asked.length;
  for (let second = 0; second < 20; second += 1) {
    await client._poll();
    pass(1000);
  }
  assert.equal(client.down, true);
  assert.deepEqual(asked.slice(before).map(([, path]) => path), ["/runs", "/runs", "/runs", "/runs"]);
  given["GET /runs"] = { runs: [LISTED] };
  given[`GET /runs/${RUN}/updates`] = { run: LISTED, events: [], health: { step: null, rows: [], norms: {} }, more: false };
  await client._poll();
  assert.equal(client.down, false);
});

test("lost messages bring a new snapshot", async () => {
  const { client, emit, asked, given, pass } = setUp();
  client.start();
  await settle();
  pass(5000);
  const later = snapshot();
  later.seq = 40;
  later.run.step = 9;
  given[`GET /runs/${RUN}/snapshot`] = later;
  const before = asked.length;
  emit(message(stepFinished(40, 9)));
  await settle();
  assert.deepEqual(asked.slice(before).map(([, path]) => path), [`/runs/${RUN}/snapshot`]);
  assert.equal(client.current.seq, 40);
});

test("of two snapshots under way the one asked for later counts, whichever comes first", async () => {
  for (const order of [[0, 1], [1, 0]]) {
    const { client, given, emit } = setUp();
    client.start();
    await settle();
    const answers = [];
    given[`GET /runs/${RUN}/snapshot`] = () => new Promise((resolve) => answers.push(resolve));
    const loads = [client.load(RUN), client.load(RUN)];
    emit(message(stepFinished(41, 10)));
    const [older, newer] = [snapshot(), snapshot({ seq: 40 })];
    newer.run.step = 9;
    for (const index of order) {
      answers[index](index === 0 ? older : newer);
      await settle();
    }
    await Promise.all(loads);
    assert.equal(client.current.run.step, 10, `answers in the order ${order}`);
    assert.equal(client.current.seq, 41);
    emit(message(stepFinished(42, 11)));
    assert.equal(client.current.run.step, 11);
  }
});

test("a snapshot that fails late does not take away a newer one", async () => {
  const { client, given } = setUp();
  client.start();
  await settle();
  const answers = [];
  given[`GET /runs/${RUN}/snapshot`] = () => new Promise((resolve, reject) => answers.push({ resolve, reject }));
  const loads = [client.load(RUN), client.load(RUN)];
  answers[1].resolve(snapshot());
  await settle();
  answers[0].reject(Object.assign(new Error("not there"), { status: 404 }));
  await Promise.all(loads);
  assert.equal(client.current?.run.step, 3);
  assert.equal(client.problem, "");
});

test("after a reconnect everything is read again", async () => {
  const { client, asked, listen } = setUp();
  client.start();
  await settle();
  const before = asked.length;
  await listen().onReconnect();
  assert.deepEqual(asked.slice(before).map(([, path]) => path), ["/runs", `/runs/${RUN}/snapshot`]);
});

test("a run that begins is followed, unless the user looks at an older one", async () => {
  const other = "20261130T000000Z-ffff";
  const { client, emit, given } = setUp();
  client.start();
  await settle();
  const began = snapshot({ seq: 1 });
  began.run = { ...began.run, run_id: other };
  given[`GET /runs/${other}/snapshot`] = began;
  emit({ ...message({ ...event("PhaseChanged", 1, 0, { phase: "caching" }), run_id: other }), run_id: other });
  await settle();
  assert.equal(client.selected, other); // already while it prepares its pictures
  client.runs = [began.run, LISTED];
  await client.select(RUN);
  emit({ ...message({ ...runStarted(2), run_id: other }), run_id: other });
  await settle();
  assert.equal(client.selected, RUN);
});

test("a run whose worker has said nothing yet is followed too, and the one that is looked at stays", async () => {
  const live = { ...LISTED, run_id: "20261128T000000Z-0000", live: true }; // an older one that goes on
  const { client, given } = setUp({ "GET /runs": { runs: [{ ...LISTED, state: "finished", live: false }] } });
  client.start();
  await settle();
  assert.equal(client.selected, RUN);
  given["GET /runs"] = { runs: [{ ...LISTED, state: "finished", live: false }, live] };
  given[`GET /runs/${live.run_id}/snapshot`] = snapshot();
  await client.refreshRuns();
  assert.equal(client.selected, live.run_id);
  await client.select(RUN);
  await client.refreshRuns();
  assert.equal(client.selected, RUN);
});

test("a run without socket messages is polled, one with them hardly", async () => {
  const { client, given, asked, pass, emit } = setUp();
  client.start();
  await settle();
  let step = 3;
  given[`GET /runs/${RUN}/updates`] = () => {
    step += 1;
    return { run: LISTED, events: [stepFinished(7 + step, step)], health: { step: null, rows: [], norms: {} }, more: false };
  };
  pass(1100);
  await client._poll();
  pass(1100);
  await client._poll();
  assert.equal(client.current.run.step, 5);
  const polled = () => asked.filter(([, path]) => path.includes("updates")).length;
  const before = polled();
  for (let round = 0; round < 4; round += 1) {
    pass(500);
    emit(message(stepFinished(100 + round, 6 + round)));
    await client._poll();
  }
  assert.equal(polled(), before);
});

test("nothing is asked while nobody looks", async () => {
  const { client, asked, pass } = setUp();
  client.start();
  await settle();
  client.watchers = 0;
  const before = asked.length;
  pass(60_000);
  await client._poll();
  assert.equal(asked.length, before);
});

test("the list knows of a run that died without a word", async () => {
  const { client, given } = setUp();
  client.start();
  await settle();
  given["GET /runs"] = { runs: [{ ...LISTED, state: "interrupted" }] };
  await client.refreshRuns();
  assert.equal(client.current.run.state, "interrupted");
});

test("a deleted run disappears and the next is shown", async () => {
  const { client, given, asked } = setUp();
  client.start();
  await settle();
  given[`DELETE /runs/${RUN}`] = (body) => {
    assert.deepEqual(body, { confirm: RUN });
    given["GET /runs"] = { runs: [] };
    return { deleted: RUN, bytes: 5 };
  };
  assert.equal((await client.remove(RUN)).bytes, 5);
  assert.equal(client.selected, null);
  assert.equal(client.current, null);
  assert.ok(asked.some(([method]) => method === "DELETE"));
});

test("a node does not ask for the run that is being deleted", async () => {
  const { client, given, asked } = setUp({ [`DELETE /runs/${RUN}`]: { deleted: RUN, bytes: 1 } });
  client.start();
  await settle();
  assert.equal(client.runOfNode(5).run.run_id, RUN);
  let answer;
  given["GET /runs"] = () => new Promise((resolve) => (answer = () => resolve({ runs: [] })));
  const removing = client.remove(RUN);
  await settle();
  const before = asked.length;
  assert.equal(client.runOfNode(5), null); // the node draws before the new list is there
  assert.equal(asked.length, before);
  answer();
  await removing;
  assert.equal(client.runOfNode(5), null);
});

test("a refused command is told in the server's words", async () => {
  const { client, given } = setUp();
  client.start();
  await settle();
  given[`POST /runs/${RUN}/commands`] = Object.assign(new Error("The run is not running."), { status: 409 });
  assert.deepEqual(await client.command(RUN, "stop"), { ok: false, message: "The run is not running." });
  given[`POST /runs/${RUN}/commands`] = { cmd: "pause", ok: true, message: "taken", answered: true };
  await client.command(RUN, "pause");
  assert.equal(client.current.paused, true);
});

test("a server that does not answer is said, and said no more when it does", async () => {
  const { client, given } = setUp();
  client.start();
  await settle();
  given["GET /runs"] = new Error("Failed to fetch");
  await client.refreshRuns();
  assert.equal(client.problem, "Failed to fetch");
  given["GET /runs"] = { runs: [LISTED] };
  await client.refreshRuns();
  assert.equal(client.problem, "");
});

test("silence after heartbeats means no connection", async () => {
  const { client, listen, pass } = setUp();
  client.start();
  assert.equal(client.connected, null);
  listen().onPing();
  assert.equal(client.connected, true);
  pass(16_000);
  assert.equal(client.connected, false);
});

test("what deserves an alert is handed on", async () => {
  const { client, emit } = setUp();
  const told = [];
  client.onAlert = (runId, one) => told.push([runId, one.type]);
  client.start();
  await settle();
  emit(message(stepFinished(11, 4)), message(event("Verdict", 12, 4, { kind: "exploding", severity: "error" })));
  emit(message(event("Verdict", 13, 4, { kind: "healthy", severity: "info" })), message(runFinished(14, 4)));
  assert.deepEqual(told, [[RUN, "Verdict"], [RUN, "RunFinished"]]);
});

test("messages of no known shape do no harm", async () => {
  const { client, emit } = setUp();
  client.start();
  await settle();
  emit(null, {}, { run_id: 5, event: {} }, { run_id: RUN }, { run_id: RUN, event: { seq: "x" } });
  assert.equal(client.current.run.step, 3);
});
