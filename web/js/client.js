/**
 * Keeps the store in step with the server: the run list, a snapshot for the chosen run, events from the socket, polling
 * where no socket brings the run's events. No DOM; the transport and the clock are handed in.
 *
 * transport: `{request(method, path, body) -> Promise<object>, listen(onMessage, onReconnect, onPing) -> stop}`;
 * `request` rejects with an Error that carries `status` for an answer that is no success.
 */

import { apply, foldHealth, fromSnapshot, newRun } from "./store.js";

const LIST_MS = 5000;
const SILENT_MS = 3000;
const PING_MS = 15000;
const HEALTH_MS = 3000;
const RESYNC_MS = 2000;

export class PanelClient {
  constructor(transport, clock = globalThis) {
    this.transport = transport;
    this.clock = clock;
    this.now = () => (clock.now ? clock.now() : Date.now());
    this.runs = [];
    this.runsLoaded = false;
    this.waiting = [];
    this.hasDataSets = false;
    this.selected = null;
    this.states = new Map();
    this.nodeRuns = new Map();
    this.intervalMs = 250;
    this.problem = "";
    this.lastPing = null;
    this.alerts = [];
    this.onAlert = () => {};
    this.version = 0;
    this.following = true;
    this.watchers = 0;
    this._waiting = new Map();
    this._lastEvent = new Map();
    this._lastUpdate = new Map();
    this._lastSnapshot = new Map();
    this._stop = null;
    this._timer = null;
    this._busy = false;
  }

  start() {
    if (this._stop) return;
    this._stop = this.transport.listen(
      (message) => this.take(message),
      () => this.resync(),
      () => {
        this.lastPing = this.now();
      },
    );
    this._nextList = 0;
    this._tick();
  }

  stop() {
    this._stop?.();
    this._stop = null;
    if (this._timer !== null) this.clock.clearTimeout(this._timer);
    this._timer = null;
  }

  /** The state of the run that is shown, or null. */
  get current() {
    return this.selected === null ? null : (this.states.get(this.selected) ?? null);
  }

  /** The run that a node shows: the newest whose events named that node. */
  runOfNode(nodeId) {
    // Inside a subgraph the server's id is `7:3`, the node's own is 3.
    const inside = [...this.nodeRuns.keys()].find((key) => key.endsWith(`:${nodeId}`));
    const runId = this.nodeRuns.get(String(nodeId)) ?? this.nodeRuns.get(inside);
    return runId === undefined ? null : (this.states.get(runId) ?? null);
  }

  /** Whether the server has been heard of lately; null while there has been no heartbeat at all. */
  get connected() {
    return this.lastPing === null ? null : this.now() - this.lastPing < PING_MS;
  }

  /** One message of the socket: `{run_id, node_id, monitor_node_id, event, earlier?}`. */
  take(message) {
    if (!message || typeof message.run_id !== "string" || !message.event) return;
    const { run_id: runId } = message;
    for (const node of [message.node_id, message.monitor_node_id]) {
      if (node) this.nodeRuns.set(String(node), runId);
    }
    this._lastEvent.set(runId, this.now());
    if (!this.runs.some((run) => run.run_id === runId)) this._nextList = 0;
    if (this.following && message.event.type === "RunStarted" && this.selected !== runId) this.select(runId, true);
    const events = [...(message.earlier ?? []), message.event];
    const waiting = this._waiting.get(runId);
    if (waiting) {
      waiting.push(...events);
      return;
    }
    if (!this.states.has(runId)) {
      this._waiting.set(runId, events);
      this.load(runId);
      return;
    }
    this._fold(runId, events);
  }

  /** Show a run. `automatic`: chosen by the panel itself, which goes on following new runs. */
  select(runId, automatic = false) {
    this.selected = runId;
    this.following = automatic || runId === this.runs[0]?.run_id;
    this.version += 1;
    if (runId !== null && !this._waiting.has(runId)) {
      if (!this.states.has(runId)) this.states.set(runId, newRun(runId));
      return this.load(runId);
    }
    return Promise.resolve();
  }

  /** Fetch a run's snapshot; events that come meanwhile are folded on top. */
  async load(runId) {
    if (!this._waiting.has(runId)) this._waiting.set(runId, []);
    this._lastSnapshot.set(runId, this.now());
    this._lastUpdate.set(runId, this.now());
    try {
      const snapshot = await this.transport.request("GET", `/runs/${encodeURIComponent(runId)}/snapshot`);
      this.states.set(runId, fromSnapshot(snapshot));
      this.problem = "";
    } catch (error) {
      this._failed(error, runId);
    }
    const waiting = this._waiting.get(runId) ?? [];
    this._waiting.delete(runId);
    if (this.states.has(runId)) this._fold(runId, waiting);
    this.version += 1;
  }

  /** After a lost connection: everything afresh. */
  async resync() {
    this.lastPing = this.now();
    await this.refreshRuns();
    const wanted = new Set([this.selected, ...this.nodeRuns.values()]);
    await Promise.all([...wanted].filter((runId) => runId !== null).map((runId) => this.load(runId)));
  }

  async refreshRuns() {
    try {
      const { runs, waiting } = await this.transport.request("GET", "/runs");
      this.runs = runs;
      this.waiting = waiting ?? [];
      this.runsLoaded = true;
      this.problem = "";
      for (const run of runs) {
        for (const node of run.node_ids) this.nodeRuns.set(String(node), run.run_id);
        const state = this.states.get(run.run_id);
        // A run that died says nothing; the list knows.
        if (state && state.run.state === "running" && run.state !== "running") state.run.state = run.state;
        if (state) state.run.live = run.live;
        if (state && run.data_set) state.run.data_set = run.data_set;
      }
      if (this.selected !== null && !runs.some((run) => run.run_id === this.selected) && !this._waiting.has(this.selected)) {
        this.selected = null;
      }
      if (this.selected === null && runs.length > 0) await this.select(runs[0].run_id, true);
      this.version += 1;
    } catch (error) {
      this._failed(error);
    }
  }

  /** Send `stop`, `save`, `preview`, `pause` or `resume`; resolves to `{ok, message}`. */
  async command(runId, cmd) {
    try {
      const answer = await this.transport.request("POST", `/runs/${encodeURIComponent(runId)}/commands`, { cmd });
      const state = this.states.get(runId);
      if (state && answer.ok && (cmd === "pause" || cmd === "resume")) state.paused = cmd === "pause";
      this.version += 1;
      return answer;
    } catch (error) {
      return { ok: false, message: error.message };
    }
  }

  async setInterval(intervalMs) {
    const answer = await this.transport.request("PATCH", "/config/refresh_rate", { interval_ms: intervalMs });
    this.intervalMs = answer.interval_ms;
    return answer;
  }

  async dataSets() {
    const answer = await this.transport.request("GET", "/data_sets");
    this.hasDataSets = answer.data_sets.length > 0;
    return answer;
  }

  async dataSet(id) {
    return this.transport.request("GET", `/data_sets/${encodeURIComponent(id)}`);
  }

  async captions(id, first, count, find) {
    const query = `first=${first}&count=${count}&find=${encodeURIComponent(find)}`;
    return this.transport.request("GET", `/data_sets/${encodeURIComponent(id)}/captions?${query}`);
  }

  async saveCaption(id, key, caption, version) {
    const path = `/data_sets/${encodeURIComponent(id)}/captions/${encodeURIComponent(key)}`;
    return this.transport.request("PATCH", path, { caption, version });
  }

  async disk(runId) {
    return this.transport.request("GET", `/runs/${encodeURIComponent(runId)}/disk`);
  }

  async share(runId, metadata) {
    return this.transport.request("GET", `/runs/${encodeURIComponent(runId)}/share?metadata=${metadata}`);
  }

  async remove(runId) {
    const answer = await this.transport.request("DELETE", `/runs/${encodeURIComponent(runId)}`, { confirm: runId });
    this.states.delete(runId);
    if (this.selected === runId) this.selected = null;
    await this.refreshRuns();
    return answer;
  }

  _fold(runId, events) {
    const state = this.states.get(runId);
    for (const event of events) {
      if (!apply(state, event)) continue;
      this._alert(runId, event);
    }
    if (state.missed) {
      state.missed = false;
      if (this.now() - (this._lastSnapshot.get(runId) ?? -Infinity) > RESYNC_MS) this.load(runId);
    }
    this.version += 1;
  }

  _alert(runId, event) {
    const serious = event.type === "RunFinished" || event.type === "StepRejected" || event.type === "Intervention";
    const verdict = event.type === "Verdict" && event.data?.severity !== "info";
    if (serious || verdict) this.onAlert(runId, event);
  }

  async _tick() {
    if (this._busy === false) {
      this._busy = true;
      try {
        await this._poll();
      } finally {
        this._busy = false;
      }
    }
    if (this._stop) this._timer = this.clock.setTimeout(() => this._tick(), Math.max(this.intervalMs, 500));
  }

  /** What is due: the list, and the chosen run's news where the socket does not bring them. Idle without watchers. */
  async _poll() {
    if (this.watchers === 0 && this.runsLoaded) return;
    const now = this.now();
    if (now >= this._nextList) {
      this._nextList = now + LIST_MS;
      await this.refreshRuns();
    }
    for (const runId of new Set([this.selected, ...this.nodeRuns.values()])) {
      const state = runId === null ? null : this.states.get(runId);
      if (!state || !state.loaded || state.run.state !== "running" || this._waiting.has(runId)) continue;
      const silent = now - (this._lastEvent.get(runId) ?? -Infinity) > SILENT_MS;
      const age = now - (this._lastUpdate.get(runId) ?? -Infinity);
      if (age > HEALTH_MS || (silent && age >= Math.max(this.intervalMs, 1000))) await this._update(runId, state);
    }
  }

  async _update(runId, state) {
    this._lastUpdate.set(runId, this.now());
    const query = `after_seq=${state.seq}&after_step=${state.health.step ?? -1}`;
    try {
      const news = await this.transport.request("GET", `/runs/${encodeURIComponent(runId)}/updates?${query}`);
      if (news.more) {
        await this.load(runId);
        return;
      }
      const missed = state.missed;
      this._fold(runId, news.events);
      state.missed = missed;
      if (news.run.state !== "running") state.run.state = news.run.state;
      state.run.live = news.run.live;
      if (foldHealth(state, news.health)) this.version += 1;
    } catch (error) {
      this._failed(error, runId);
    }
  }

  _failed(error, runId) {
    if (error.status === 404 && runId !== undefined) {
      this.states.delete(runId);
      if (this.selected === runId) this.selected = null;
    } else {
      this.problem = error.message;
    }
    this.version += 1;
  }
}
