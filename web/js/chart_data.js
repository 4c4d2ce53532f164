/** Which charts there are, and the numbers each one draws. No DOM. */

import { rateName } from "./curves.js";
import { number } from "./format.js";
import { partName } from "./sentences.js";

const GB = 1024 ** 3;

/**
 * The charts of a run, in order. Each: `{key, title, note, groups: [{x, lines: [{label, y, role}]}], marks}`.
 * A group has its own steps. `role`: main, faint (raw values behind an average), part1 ... part8, limit.
 */
export function charts(state) {
  const curves = state.curves;
  return [
    {
      key: "loss",
      title: "Loss",
      groups: [group(curves, [["loss", "each step", "faint"], ["loss_avg", "average", "main"]])],
      marks: state.rejected,
    },
    {
      key: "validation",
      title: "Validation loss",
      groups: [points(state.validation.map((row) => [row.step, row.mean]), "stable loss", "main")],
    },
    {
      key: "norms",
      title: "Gradient norm",
      log: true,
      groups: [group(curves, [["grad_norm", "whole", "main"]]), ...norms(state.health.norms)],
      marks: state.rejected,
    },
    {
      key: "rate",
      title: "Learning rate",
      groups: [group(curves, curves.rates.map((part, index) => [rateName(part), partName(part), `part${index + 1}`]))],
    },
    { key: "scale", title: "Loss scale", log: true, groups: [group(curves, [["loss_scale", "scale", "main"]])] },
    {
      key: "memory",
      title: "Memory in use (GiB)",
      groups: [group(curves, [["vram_gib", "in use", "main"]])],
      limits: limits(state.memory),
    },
    { key: "time", title: "Step time (s)", groups: [group(curves, [["seconds", "step time", "main"]])] },
  ].filter((chart) => chart.groups.some((one) => one.lines.some((line) => line.y.some((value) => value !== null))));
}

/** Groups merged to one list of steps, as a chart library takes them: `{x, lines}` with null where a line has no point. */
export function merged(groups) {
  if (groups.length === 1) return groups[0];
  const steps = [...new Set(groups.flatMap((one) => one.x))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const lines = groups.flatMap((one) =>
    one.lines.map((line) => {
      const y = new Array(steps.length).fill(null);
      one.x.forEach((step, index) => {
        y[place.get(step)] = line.y[index];
      });
      return { ...line, y };
    }),
  );
  return { x: steps, lines };
}

function group(curves, wanted) {
  const present = wanted.filter(([name]) => curves.has(name));
  const { x, lines } = curves.points(present.map(([name]) => name));
  return { x, lines: present.map(([, label, role], index) => ({ label, role, y: lines[index] })) };
}

function points(pairs, label, role) {
  const sorted = pairs.filter(([, value]) => typeof value === "number").sort((a, b) => a[0] - b[0]);
  return { x: sorted.map(([step]) => step), lines: [{ label, role, y: sorted.map(([, value]) => value) }] };
}

const known = new WeakMap();

/** The norm lines of a table of norms; worked out once, because the table changes only with a new measurement. */
function norms(table) {
  if (!known.has(table)) known.set(table, partNorms(table));
  return known.get(table);
}

/** A line for each part: dozens of module groups could not be told apart. A norm of several is the root of their squares. */
function partNorms(table) {
  const parts = new Map();
  for (const [module, pairs] of Object.entries(table)) {
    const part = partOf(module);
    if (!parts.has(part)) parts.set(part, new Map());
    const sums = parts.get(part);
    for (const [step, norm] of pairs) sums.set(step, (sums.get(step) ?? 0) + norm * norm);
  }
  return [...parts]
    .sort(([a], [b]) => PARTS.indexOf(a) - PARTS.indexOf(b))
    .slice(0, 8)
    .map(([part, sums], index) => points([...sums].map(([step, sum]) => [step, Math.sqrt(sum)]), part, `part${index + 1}`));
}

const PARTS = ["UNet down", "UNet middle", "UNet up", "UNet", "Text encoder 1", "Text encoder 2"];

/** The part of a module group such as `down1.cross`, `mid.ff`, `te1`. */
export function partOf(module) {
  if (/^down\d/.test(module)) return "UNet down";
  if (/^up\d/.test(module)) return "UNet up";
  if (/^mid\b/.test(module)) return "UNet middle";
  return partName(module);
}

function limits(memory) {
  if (!memory) return [];
  const reserved = memory.current_reserved / GB;
  const peak = memory.peak_allocated / GB;
  const capacity = (memory.capacity ?? 0) / GB;
  return [
    ...(reserved > 0 ? [{ label: "reserved", value: reserved }] : []),
    ...(peak > 0 ? [{ label: "peak", value: peak }] : []),
    ...(capacity > 0 ? [{ label: "total", value: capacity }] : []),
  ];
}

/** What a legend says of each line: its value at place `index` of `x`, or with null its newest one. A newest value that is
 * older than another line's says of which step it is: parts are measured now and then, the whole at every step. */
export function legendWords(x, lines, index) {
  if (index !== null) return lines.map((line) => number(line.y[index]));
  const places = lines.map((line) => line.y.findLastIndex((value) => value !== null));
  const last = Math.max(...places);
  return lines.map((line, at) => {
    const place = places[at];
    return place >= 0 && place < last ? `${number(line.y[place])} (step ${x[place]})` : number(line.y[place]);
  });
}
