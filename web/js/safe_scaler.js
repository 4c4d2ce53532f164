/**
 * The only module here that does something when it is imported: it registers the extension with ComfyUI.
 * Everything else is imported by it. (ComfyUI imports every .js file below this folder as well; that is harmless,
 * because a module at one address is evaluated once.)
 */

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { Alerts } from "./alerts.js";
import { PanelClient } from "./client.js";
import { comfyEnvironment, comfyTransport } from "./comfy_host.js";
import { commandShownRun } from "./controls.js";
import { addDatasetWidget } from "./dataset_widget.js";
import { addMonitorWidget } from "./monitor_widget.js";
import { mountPanel } from "./panel.js";
import { addTrainWidget } from "./train_widget.js";

const TAB = "safeScaler";
const client = new PanelClient(comfyTransport(api));
let environment = null;
let unmount = null;
let mounted = null;

const COMMANDS = [
  ["Stop", "Stop training (saves first)", "pi pi-stop", "stop"],
  ["Pause", "Pause or go on with training", "pi pi-pause", "pause"],
  ["Save", "Save a checkpoint and the LoRA now", "pi pi-save", "save"],
  ["Preview", "Make preview pictures now", "pi pi-image", "preview"],
];

app.registerExtension({
  name: "SafeScaler.Panel",

  settings: [
    {
      id: "SafeScaler.Panel.IntervalMs", name: "Time between updates (ms)", type: "slider", defaultValue: 250,
      attrs: { min: 100, max: 10000, step: 50 }, category: ["Safe-Scaler", "Panel", "Interval"],
      tooltip: "How often new numbers are sent to the browser and drawn.",
      onChange: (value) => setInterval_(value),
    },
    {
      id: "SafeScaler.Panel.Unit", name: "Unit of memory", type: "combo", options: ["GiB", "GB"], defaultValue: "GiB",
      category: ["Safe-Scaler", "Panel", "Unit"],
    },
    {
      id: "SafeScaler.Panel.ConfirmStop", name: "Ask before stopping a run", type: "boolean", defaultValue: true,
      category: ["Safe-Scaler", "Panel", "ConfirmStop"],
    },
    {
      id: "SafeScaler.Alerts.Level", name: "Messages while training", type: "combo",
      options: ["off", "serious", "all"], defaultValue: "serious", category: ["Safe-Scaler", "Alerts", "Level"],
      tooltip: "serious: the end of a run, interventions and bad verdicts; all: every rejected step and verdict too.",
    },
    {
      id: "SafeScaler.Alerts.Notify", name: "Notice of the system when a run ends", type: "boolean", defaultValue: false,
      category: ["Safe-Scaler", "Alerts", "Notify"],
      onChange: (on) => {
        if (on && typeof Notification !== "undefined" && Notification.permission === "default") Notification.requestPermission();
      },
    },
  ], // prettier-ignore

  commands: [
    {
      id: "SafeScaler.TogglePanel",
      label: "Show or hide the training panel",
      icon: "pi pi-chart-line",
      function: () => app.extensionManager.command.execute(`Workspace.ToggleSidebarTab.${TAB}`),
    },
    ...COMMANDS.map(([name, label, icon, cmd]) => ({
      id: `SafeScaler.${name}`,
      label: `Safe-Scaler: ${label}`,
      icon,
      function: () => commandShownRun(client, environment, cmd),
    })),
  ],
  keybindings: [{ combo: { key: "g", ctrl: true, alt: true }, commandId: "SafeScaler.TogglePanel" }],
  menuCommands: [{ path: ["Extensions", "Safe-Scaler"], commands: ["SafeScaler.TogglePanel", "SafeScaler.Stop"] }],

  async setup() {
    environment = comfyEnvironment(app, api);
    const alerts = new Alerts(environment);
    client.onAlert = (runId, event) => {
      alerts.take(client.states.get(runId)?.run.name || runId, event);
      // A new LoRA appears in LoraLoader's list without a restart.
      if (event.type === "RunFinished" && event.data?.lora) app.refreshComboInNodes?.();
    };
    app.extensionManager.registerSidebarTab({
      id: TAB,
      icon: "pi pi-chart-line",
      title: "Training",
      tooltip: "Safe-Scaler: training runs, live",
      type: "custom",
      render: (element) => {
        // ComfyUI may call this again for the same element.
        if (element === mounted) return;
        unmount?.();
        unmount = mountPanel(element, client, environment);
        mounted = element;
      },
      destroy: () => {
        unmount?.();
        unmount = mounted = null;
      },
    });
    client.graphOf = () => (app.rootGraph ?? app.graph)?.id ?? null;
    client.start();
    window.safeScaler = { client, ready: true };
  },

  nodeCreated(node) {
    if (node.comfyClass === "SafeScalerGradientMonitor") addMonitorWidget(node, client, () => environment);
    if (node.comfyClass === "SafeScalerDataset") addDatasetWidget(node, client, noteChange);
    if (node.comfyClass === "SafeScalerTrain") addTrainWidget(node, client);
  },
});

/** Let ComfyUI notice a changed property, so that a reload finds it. */
function noteChange() {
  app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.checkState?.();
}

async function setInterval_(value) {
  if (!Number.isInteger(value) || value === client.intervalMs) return;
  try {
    await client.setInterval(value);
  } catch (error) {
    environment?.notify("warn", "Update rate", error.message);
  }
}
