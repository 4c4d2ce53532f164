import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const ROOT = new URL("../../", import.meta.url);
const read = (path) => readFileSync(new URL(path, ROOT), "utf8");
const EXTENSION = read("web/js/safe_scaler.js");

test("every setting and command has a Chinese text, and no text is left over", () => {
  const settings = [...EXTENSION.matchAll(/id: "(SafeScaler\.(?:Panel|Alerts)\.\w+)", name:/g)].map(([, id]) => id);
  const commands = ["SafeScaler.TogglePanel", ...[...EXTENSION.matchAll(/^ {2}\["(\w+)", "/gm)].map(([, name]) => `SafeScaler.${name}`)];
  assert.ok(settings.length >= 5 && commands.length >= 5);
  // ComfyUI's form of an id: dots become underscores.
  const keys = (ids) => ids.map((id) => id.replaceAll(".", "_")).sort();
  const settingTexts = JSON.parse(read("locales/zh/settings.json"));
  const commandTexts = JSON.parse(read("locales/zh/commands.json"));
  assert.deepEqual(Object.keys(settingTexts).sort(), keys(settings));
  assert.deepEqual(Object.keys(commandTexts).sort(), keys(commands));
  for (const text of Object.values(settingTexts)) assert.ok(text.name);
  for (const text of Object.values(commandTexts)) assert.ok(text.label);
});
