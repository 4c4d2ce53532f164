/** What happened in a run, in plain language. One event gives at most one line of the log. */

import { bareName, bytes, duration, number, plural } from "./format.js";

const PHASES = {
  loading: "Loading the model",
  scanning: "Looking at the pictures",
  caching: "Preparing pictures and captions",
  training: "Training",
  validating: "Measuring the validation loss",
  previewing: "Making preview pictures",
  saving: "Saving",
  finishing: "Finishing",
};

const STATES = {
  running: "Running",
  finished: "Finished",
  stopped: "Stopped",
  failed: "Failed",
  interrupted: "Interrupted",
};

const PARTS = { unet: "UNet", te1: "Text encoder 1", te2: "Text encoder 2" };

const TELL = {
  RunStarted: (data) => {
    const from = data.resumed_from ? `, going on from ${data.resumed_from}` : "";
    const where = `${plural(data.pictures, "picture")}, ${data.device}, ${data.precision}`;
    return line("note", `Training begins: ${plural(data.total_steps, "step")} on ${where}${from}.`);
  },
  StepRejected: (data) => {
    const who = data.samples?.length ? ` Pictures: ${data.samples.slice(0, 3).join(", ")}.` : "";
    const place = data.where || data.culprits?.[0];
    const where = place ? ` First seen in ${place}.` : "";
    const row = data.in_a_row > 1 ? ` (${data.in_a_row} in a row)` : "";
    return line("warn", `Step rejected${row}, nothing was changed: ${data.reason}.${where}${who}`);
  },
  Verdict: (data) => {
    const place = data.where ? `${data.where}: ` : "";
    return line(tone(data.severity), data.sentence || `${place}${data.kind}`);
  },
  Intervention: (data) => line("warn", capital(`${data.action}${data.reason ? ` (${data.reason})` : ""}.`)),
  ValidationFinished: (data) => line("note", `Validation loss ${number(data.validation_loss)}.`),
  CheckpointSaved: (data) => line("good", `Checkpoint ${data.name} saved (${bytes(data.bytes)}).`),
  LoraSaved: (data) => {
    const what = data.final ? "The finished LoRA" : "LoRA";
    return line("good", `${what} ${bareName(data.file)} saved and proven (${bytes(data.bytes)}).`);
  },
  Warned: (data) => line(NOTES.has(data.topic) ? "note" : "warn", data.message),
  Resumed: (data) => {
    const changed = data.differences?.length ? ` Changed settings: ${data.differences.join("; ")}.` : "";
    const passed = data.passed_over?.length ? ` Damaged and passed over: ${data.passed_over.join(", ")}.` : "";
    return line("note", `Went on from ${data.checkpoint}.${changed}${passed}`);
  },
  RunFinished: (data) => {
    const took = data.seconds ? ` after ${duration(data.seconds)}` : "";
    const counts = `${plural(data.applied, "step")} applied, ${data.rejected} rejected`;
    if (data.status === "finished") return line("good", `Training is finished${took}: ${counts}.`);
    const more = data.checkpoint ? " It can be resumed." : ""; // one that is stopped before its first step leaves nothing
    if (data.status === "stopped") return line("note", `Training was stopped${took}: ${counts}.${more}`);
    return line("bad", `Training failed: ${data.message}`);
  },
};

const NOTES = new Set(["settings", "model", "network", "validation"]);

/** `{tone, text}` of an event, or null for one that is not told (progress, heartbeats). */
export function sentence(event) {
  const tell = TELL[event.type];
  const told = tell ? tell(event.data ?? {}) : null;
  return told && { ...told, text: withoutPaths(told.text) };
}

/** Folders are cut off from absolute paths: what stands in the way of reading, and may be seen in a screenshot. */
export function withoutPaths(text) {
  return String(text).replace(/(?<![\w.:/\\])(?:[A-Za-z]:)?(?:[\\/][^\\/\s:*?"<>|,;]+){2,}/g, (path) => bareName(path));
}

export function phaseWords(phase) {
  if (!phase) return "";
  const words = PHASES[phase.phase] ?? phase.phase;
  const count = phase.total > 0 && phase.phase !== "training" ? ` ${phase.done} of ${phase.total}` : "";
  return `${words}${count}`;
}

export function stateWord(state, paused = false) {
  return paused && state === "running" ? "Paused" : (STATES[state] ?? state);
}

/** Whether the Train node goes on with a run when its graph is queued again with the same settings and pictures. */
export function canGoOn(run) {
  return (run.state === "stopped" || run.state === "interrupted") && run.step > 0;
}

export function partName(part) {
  return PARTS[part] ?? part;
}

const BLOCKS = { down: "Down", up: "Up", mid: "Middle" };
const KINDS = { self: "self-attn", cross: "cross-attn", ff: "feed-forward", proj: "projections", conv: "conv" };

/** A module group in few letters: `down1.cross` is "Down 1 cross-attn". */
export function groupName(group) {
  const found = /^(down|up|mid)(\d*)\.(\w+)$/.exec(group);
  if (!found) return partName(group);
  return [BLOCKS[found[1]], found[2], KINDS[found[3]] ?? found[3]].filter(Boolean).join(" ");
}

/** Tone of a severity or of a verdict's word. */
export function tone(word) {
  const text = String(word ?? "").toLowerCase();
  if (/error|critical|fatal|bad|explod|non-?finite|halt|dead|disconnected|lost|frozen/.test(text)) return "bad";
  if (/warn|vanish|stale|spik|clip|drift|collaps|unstable|saturat|imbalanced|missing|changed/.test(text)) return "warn";
  if (/^(healthy|good|ok|fine|stable)$/.test(text)) return "good";
  return "note";
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** A verdict as words: "EXPLODING" is "Exploding", "TE1-DEAD" is "Text encoder 1 dead". */
export function verdictWord(kind) {
  const words = String(kind ?? "").replace(/^TE(\d)-/, "text encoder $1 ").replaceAll("-", " ");
  return capital(words.toLowerCase());
}

function line(kind, text) {
  return { tone: kind, text };
}
