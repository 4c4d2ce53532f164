import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

const FOLDER = new URL("../../web/js/", import.meta.url);
const ours = readdirSync(FOLDER).filter((name) => name.endsWith(".js"));

test("no module of ours makes markup out of text", () => {
  assert.ok(ours.length > 10);
  for (const name of ours) {
    const source = readFileSync(new URL(name, FOLDER), "utf8");
    assert.doesNotMatch(source, /innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function/, name);
  }
});

test("nothing is loaded from elsewhere, and only the two stable modules of ComfyUI are imported", () => {
  const allowed = /^(\.\/[\w./-]+|\.\.\/\.\.\/\.\.\/scripts\/(app|api)\.js)$/;
  for (const name of ours) {
    const source = readFileSync(new URL(name, FOLDER), "utf8");
    assert.doesNotMatch(source, /https?:\/\//, name);
    for (const [, from] of source.matchAll(/(?:from|import)\s+["']([^"']+)["']/g)) assert.match(from, allowed, `${name}: ${from}`);
  }
});

test("modules do nothing when they are imported, but the entry", async () => {
  for (const name of ours.filter((one) => one !== "safe_scaler.js")) await import(new URL(name, FOLDER).href);
});
