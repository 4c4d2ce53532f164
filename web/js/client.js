/**
 * Keeps the store in step with the server: the run list, a snapshot for the chosen run, events from the socket, polling
 * where no socket brings the run's events. No DOM; the transport and the clock are handed in.
 *
 * transport: `{request(method, path, body) -> Promise<object>, listen(onMessage, onReconnect, onPing) -> stop}`;
 * `request` rejects with an Error that carries `status` for an answer that is no success.
 */

import { apply, foldHealth, fromListed, fromSnapshot, newRun } from "./store.js";

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
    /** Which graph the page shows now: its id, or null where there is none. */
    this.graphOf = () => null;
    this.nodeRuns = new Map(); // node in its graph -> {graph, node, runId, told}
    this.down = false;
    this.intervalMs = 250;
    this.problem = "";
    this.lastPing = null;
    this.alerts = [];
    this.onAlert = () => {};
    this.version = 0;
    this.following = true;
    this.watchers = 0;
    this._waiting = new Map();
    this._loads = new Map(); // run -> {asked, answered}: numbers of the last snapshot asked for and of the one shown
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

  /** The run that a node of the page's graph shows: the one it trains, else the newest that it began; null without. */
  runOfNode(nodeId) {
    const graph = this.graphOf();
    let found = null;
    for (const one of this.nodeRuns.values()) {
      if (!isNode(one, graph, nodeId)) continue;
      if (found === null || Number(one.told) - Number(found.told) > 0 || (one.told === found.told && one.runId > found.runId)) {
        found = one;
      }
    }
    if (found === null) return null;
    if (!this.states.has(found.runId) && !this._waiting.has(found.runId)) {
      const listed = this.runs.find((run) => run.run_id === found.runId);
      if (listed) {
        this.states.set(found.runId, fromListed(listed));
        this.load(found.runId);
      }
    }
    return this.states.get(found.runId) ?? null;
  }

  /** The queued run of a node of the page's graph, or null. */
  waitingOfNode(nodeId) {
    const graph = this.graphOf();
    return this.waiting.find((one) => isNode({ graph: one.graph_id ?? null, node: one.node_id }, graph, nodeId)) ?? null;
  }

  /** Whether the server has been heard of lately; null while there has been no heartbeat at all. */
  get connected() {
    return this.lastPing === null ? null : this.now() - this.lastPing < PING_MS;
  }

  /** One message of the socket: `{run_id, graph_id, node_id, monitor_node_id, event, earlier?}`. */
  take(message) {
    if (!message || typeof message.run_id !== "string" || !message.event) return;
    const { run_id: runId } = message;
    for (const node of [message.node_id, message.monitor_node_id]) {
      if (node) this._place(message.graph_id, node, runId, true);
    }
    const first = !this._lastEvent.has(runId); // long before RunStarted: model, pictures and captions come first
    this._lastEvent.set(runId, this.now());
    if (!this.runs.some((run) => run.run_id === runId)) this._nextList = 0;
    const begins = first || message.event.type === "RunStarted";
    if (this.following && begins && this.selected !== runId) this.select(runId, true);
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
    this.following = automatic || runId === (this.runs.find((run) => run.live) ?? this.runs[0])?.run_id;
    this.version += 1;
    if (runId !== null && !this._waiting.has(runId)) {
      if (!this.states.has(runId)) this.states.set(runId, newRun(runId));
      return this.load(runId);
    }
    return Promise.resolve();
  }

  /** Fetch a run's snapshot; events that come meanwhile are folded on top. Of several the one asked for last counts. */
  async load(runId) {
    if (!this._waiting.has(runId)) this._waiting.set(runId, []);
    this._lastSnapshot.set(runId, this.now());
    this._lastUpdate.set(runId, this.now());
    const loads = this._loads.get(runId) ?? { asked: 0, answered: 0 };
    this._loads.set(runId, loads);
    const number = (loads.asked += 1);
    const isStale = () => number < loads.answered; // one asked for later was answered first
    try {
      const snapshot = await this.transport.request("GET", `/runs/${encodeURIComponent(runId)}/snapshot`);
      if (isStale()) return;
      this.states.set(runId, fromSnapshot(snapshot));
      this.problem = "";
      this.down = false;
    } catch (error) {
      if (isStale()) return;
      this._failed(error, runId);
    }
    loads.answered = number;
    this.version += 1;
    if (number < loads.asked) return; // events wait for the snapshot that is still under way
    const waiting = this._waiting.get(runId) ?? [];
    this._waiting.delete(runId);
    if (this.states.has(runId)) this._fold(runId, waiting);
  }

  /** After a lost connection: everything afresh. */
  async resync() {
    this.lastPing = this.now();
    await this.refreshRuns();
    await Promise.all([...this._shown()].map((runId) => this.load(runId)));
  }

  async refreshRuns() {
    try {
      const { runs, waiting } = await this.transport.request("GET", "/runs");
      this.runs = runs;
      this.waiting = waiting ?? [];
      this.runsLoaded = true;
      this.problem = "";
      this.down = false;
      this._placeListed(runs);
      for (const run of runs) {
        const state = this.states.get(run.run_id);
        // Nothing has been heard of its worker yet: a run that goes on, in this tab or in another one.
        const silent = state?.loaded && state.run.state !== "running" && run.state === "running";
        if (silent && this.now() - (this._lastSnapshot.get(run.run_id) ?? -Infinity) > RESYNC_MS) this.load(run.run_id);
        // A run that died says nothing; the list knows.
        if (state && state.run.state === "running" && run.state !== "running") state.run.state = run.state;
        if (state) state.run.live = run.live;
        if (state && run.data_set) state.run.data_set = run.data_set;
      }
      if (this.selected !== null && !runs.some((run) => run.run_id === this.selected) && !this._waiting.has(this.selected)) {
        this.selected = null;
      }
      // A worker says its first word half a minute after its run is there, on a slow machine.
      const begun = runs.find((run) => run.live);
      if (this.following && begun && begun.run_id !== this.selected) await this.select(begun.run_id, true);
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
    this.runs = this.runs.filter((run) => run.run_id !== runId);
    this._placeListed(this.runs);
    if (this.selected === runId) this.selected = null;
    await this.refreshRuns();
    return answer;
  }

  /** Runs that something on the page shows. */
  _shown() {
    const placed = [...this.nodeRuns.values()].map((one) => one.runId).filter((runId) => this.states.has(runId));
    return new Set([this.selected, ...placed].filter((runId) => runId !== null));
  }

  /** Note that a node shows a run. `told`: by an event of it, or because it is followed now; not by the list alone. */
  _place(graphId, nodeId, runId, told) {
    const graph = graphId ?? null;
    const node = String(nodeId);
    this.nodeRuns.set(`${graph ?? ""}/${node}`, { graph, node, runId, told });
  }

  _placeListed(runs) {
    const known = new Set(runs.map((run) => run.run_id));
    for (const [key, { runId }] of this.nodeRuns) {
      if (!known.has(runId) && this.states.get(runId)?.run.state !== "running") this.nodeRuns.delete(key);
    }
    for (const run of runs) {
      for (const node of run.node_ids) {
        const before = this.nodeRuns.get(`${run.graph_id ?? ""}/${node}`);
        if (run.live || !before || (!before.told && before.runId < run.run_id)) {
          this._place(run.graph_id, node, run.run_id, run.live);
        }
      }
    }
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
    if (this.down) return; // one request at a time until it answers
    for (const runId of this._shown()) {
      const state = this.states.get(runId);
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
      this.down = error.status === undefined || error.status >= 500;
    }
    this.version += 1;
  }
}

/** Whether `nodeId` of the graph `graph` is meant. Who does not know its graph (a prompt by API) means any. */
function isNode(one, graph, nodeId) {
  if (one.graph !== null && graph !== null && one.graph !== graph) return false;
  // Inside a subgraph the server's id is `7:3`, the node's own is 3.
  return one.node === String(nodeId) || one.node.endsWith(`:${nodeId}`);
}
