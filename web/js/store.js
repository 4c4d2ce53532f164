/**
 * What is known of a run: a snapshot, and events folded onto it. No DOM, no network.
 *
 * An event is `{seq, type, step, time, data}`. One whose `seq` is not above the state's is dropped, so a snapshot and
 * the socket may overlap in any way.
 */

import { CURVE_NAMES, Curves, rateName } from "./curves.js";
import { sentence } from "./sentences.js";

const MOST_LINES = 500;
const MOST_NORMS = 240;

/** An empty run. */
export function newRun(runId) {
  return {
    run: { run_id: runId, state: "running", step: 0, total_steps: null },
    seq: 0,
    loaded: false,
    paused: false,
    phase: null,
    last: null,
    curves: new Curves(),
    rejected: [],
    validation: [],
    previews: [],
    checkpoints: [],
    log: [],
    health: { step: null, rows: [], norms: {} },
    verdicts: new Map(),
    memory: null,
    missed: false,
    version: 0,
  };
}

/** What a line of the run list tells, until the snapshot is there. */
export function fromListed(listed) {
  const state = newRun(listed.run_id);
  Object.assign(state.run, listed);
  state.paused = Boolean(listed.paused);
  return state;
}

/** The state a snapshot describes. */
export function fromSnapshot(snapshot) {
  const state = newRun(snapshot.run.run_id);
  Object.assign(state.run, snapshot.run);
  state.seq = snapshot.seq;
  state.loaded = true;
  state.paused = Boolean(snapshot.run.paused);
  state.phase = snapshot.phase;
  state.last = snapshot.last ?? null;
  state.curves = Curves.from(snapshot.curves);
  state.rejected = [...(snapshot.curves?.rejected ?? [])];
  state.validation = [...snapshot.validation];
  state.previews = [...snapshot.previews];
  state.checkpoints = [...snapshot.checkpoints];
  state.memory = snapshot.memory;
  for (const event of snapshot.events) {
    tell(state, event);
    if (event.type === "Verdict") FOLDS.Verdict(state, event, event.data);
  }
  foldHealth(state, snapshot.health);
  return state;
}

/** Fold one event onto `state`. Returns whether it changed anything. */
export function apply(state, event) {
  if (!event || typeof event.seq !== "number" || event.seq <= state.seq) return false;
  state.seq = event.seq;
  const data = event.data ?? {};
  if (event.type in FOLDS) FOLDS[event.type](state, event, data);
  tell(state, event);
  state.version += 1;
  return true;
}

/** New health figures (`{step, rows, norms}`) from the server. */
export function foldHealth(state, fresh) {
  if (!fresh || fresh.rows.length === 0) return false;
  const rows = new Map(state.health.rows.map((row) => [row.module, row]));
  for (const row of fresh.rows) rows.set(row.module, row);
  const norms = { ...state.health.norms };
  for (const [module, points] of Object.entries(fresh.norms)) {
    const known = norms[module] ?? [];
    const after = known.length ? known[known.length - 1][0] : -Infinity;
    const joined = [...known, ...points.filter(([step]) => step > after)];
    // Old points are thinned before new ones: the newest stretch is what one looks at.
    norms[module] = joined.length <= MOST_NORMS ? joined : joined.filter((_, index) => index % 2 === joined.length % 2);
  }
  state.health = {
    step: Math.max(fresh.step ?? 0, state.health.step ?? 0),
    rows: [...rows.values()].sort((a, b) => a.module.localeCompare(b.module)),
    norms,
  };
  state.version += 1;
  return true;
}

const FOLDS = {
  RunStarted(state, event, data) {
    const { total_steps, parts, device, precision, pictures } = data;
    Object.assign(state.run, { total_steps, parts, device, precision, pictures, state: "running", message: "" });
    state.run.started ??= event.time;
    state.run.ended = null;
  },
  PhaseChanged(state, _event, data) {
    state.phase = data;
  },
  StepFinished(state, event, data) {
    step(state, event, data);
    Object.assign(state.run, { applied: data.applied, loss_avg: data.loss_avg, rejected: data.rejected_steps });
    state.last = data;
    if (state.phase?.phase !== "training") state.phase = { phase: "training", done: 0, total: 0, detail: "" };
  },
  StepRejected(state, event, data) {
    step(state, event, data);
    state.run.rejected = data.rejected_steps;
    state.rejected = [...state.rejected, event.step].slice(-MOST_LINES);
  },
  Verdict(state, event, data) {
    // "ok": what was said before holds no more.
    const key = `${data.kind}/${data.where ?? ""}`;
    if (data.severity === "ok") state.verdicts.delete(key);
    else state.verdicts.set(key, { step: event.step, ...data });
  },
  ValidationFinished(state, event, data) {
    const point = { step: event.step, mean: data.validation_loss, bands: data.bands, pictures: data.pictures };
    state.validation = [...state.validation.filter((row) => row.step !== event.step), point];
  },
  PreviewReady(state, event, data) {
    const id = `${event.step}-${data.index}`;
    const preview = { id, step: event.step, index: data.index, prompt: data.prompt, seed: data.seed, time: event.time };
    state.previews = [...state.previews.filter((row) => row.id !== id), preview];
  },
  CheckpointSaved(state, event, data) {
    const saved = { step: event.step, name: data.name, bytes: data.bytes, state: "good", time: event.time };
    state.checkpoints = [...state.checkpoints.filter((row) => row.name !== data.name), saved];
  },
  LoraSaved(state, _event, data) {
    state.run.lora = data.file;
  },
  MemoryState(state, _event, data) {
    state.memory = data;
  },
  Resumed(state, event) {
    goBack(state, event.step);
    for (const name of ["previews", "checkpoints"]) state[name] = state[name].filter((row) => row.step <= event.step);
    state.run.step = event.step;
    state.run.state = "running";
  },
  Ack(state, _event, data) {
    if (data.ok && data.cmd === "pause") state.paused = true;
    if (data.ok && (data.cmd === "resume" || data.cmd === "stop")) state.paused = false;
  },
  RunFinished(state, event, data) {
    Object.assign(state.run, { state: data.status, message: data.message, seconds: data.seconds, ended: event.time });
    if (data.lora) state.run.lora = data.lora;
    state.paused = false;
    state.phase = null;
  },
};

function step(state, event, data) {
  // Steps come one by one; a hole means that messages were lost while the socket was down.
  if (state.run.step > 0 && event.step > state.run.step + 1) state.missed = true;
  if (event.step <= state.run.step) goBack(state, event.step - 1); // a rollback takes the steps anew
  state.run.step = event.step;
  state.run.state = "running";
  const values = Object.fromEntries(CURVE_NAMES.map((name) => [name, data[name]]));
  for (const [part, rate] of Object.entries(data.lr ?? {})) values[rateName(part)] = rate;
  state.curves.add(event.step, values);
}

/** What was measured after `last` did not happen in this attempt. */
function goBack(state, last) {
  state.curves.truncate(last);
  state.validation = state.validation.filter((row) => row.step <= last);
  state.rejected = state.rejected.filter((number) => number <= last);
  const norms = Object.entries(state.health.norms).map(([module, points]) => [module, points.filter(([number]) => number <= last)]);
  state.health = { ...state.health, norms: Object.fromEntries(norms) };
}

function tell(state, event) {
  const told = sentence(event);
  if (told === null) return;
  state.log.push({ seq: event.seq, step: event.step, time: event.time, ...told });
  if (state.log.length > MOST_LINES) state.log.splice(0, state.log.length - MOST_LINES);
}
