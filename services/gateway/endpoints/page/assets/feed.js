// The gateway's events, and what is kept of them. Everything kept is bounded, so that a page may
// stay open for days.

import { eventsOf } from "./sse.js";

const PATH = "/v1/lockstep/activity";
const STEPS_MAX = 512;
const POINTS_MAX = 900;
const SILENCE_MS = 5000;
const RETRY_MS = 1000;
const KEY = "lockstep-api-key";

export const LINES = [
  "generated", "prompt", "running", "waiting", "kvShare",
  "first50", "first90", "first99", "next50", "next90", "next99",
];

export class Feed {
  constructor(onChange) {
    this.onChange = onChange;
    this.state = "connecting"; // "live", "lost", "key" (one is needed) or "refused" (it is wrong)
    this.problem = "";
    this.snapshot = null;
    this.before = null;
    this.own = { requests: [], misses: [] };
    this.steps = [];
    this.experts = [];
    this.times = [];
    this.lines = Object.fromEntries(LINES.map((name) => [name, []]));
    this.key = sessionStorage.getItem(KEY) || "";
    this.wake = () => {};
  }

  setKey(key) {
    this.key = key;
    sessionStorage.setItem(KEY, key);
    this.state = "connecting";
    this.onChange();
    this.wake();
  }

  headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  async run() {
    for (;;) {
      try {
        await this.connect();
      } catch (error) {
        this.problem = String(error.message || error);
      }
      if (this.state !== "key" && this.state !== "refused") this.state = "lost";
      this.onChange();
      await new Promise((resolve) => {
        this.wake = resolve;
        if (this.state === "lost") setTimeout(resolve, RETRY_MS);
      });
    }
  }

  async connect() {
    const stop = new AbortController();
    let timer = setTimeout(() => stop.abort(), SILENCE_MS);
    try {
      const response = await fetch(PATH, { headers: this.headers(), signal: stop.signal, cache: "no-store" });
      if (response.status === 401) {
        this.state = this.key ? "refused" : "key";
        return;
      }
      if (!response.ok) throw new Error(`the gateway answers ${response.status}`);
      for await (const events of eventsOf(response)) {
        clearTimeout(timer);
        timer = setTimeout(() => stop.abort(), SILENCE_MS);
        for (const event of events) this.receive(event);
        this.state = "live";
        this.onChange();
      }
      throw new Error("the gateway has ended the connection");
    } finally {
      clearTimeout(timer);
      stop.abort();
    }
  }

  receive({ name, data }) {
    if (name === "steps") this.addSteps(JSON.parse(data));
    if (name === "experts") this.experts = JSON.parse(data);
    if (name === "own") this.own = JSON.parse(data);
    if (name === "snapshot") this.addSnapshot(JSON.parse(data));
  }

  addSteps(steps) {
    const last = this.steps.at(-1);
    const isNew = (one) => !last || one.epoch > last.epoch || (one.epoch === last.epoch && one.step > last.step);
    this.steps = [...this.steps, ...steps.filter(isNew)].slice(-STEPS_MAX);
  }

  addSnapshot(snapshot) {
    this.before = this.snapshot;
    this.snapshot = snapshot;
    const scheduler = snapshot.status.scheduler;
    if (!scheduler) return;
    const [first, next] = [snapshot.latency.first_token_s, snapshot.latency.next_token_s];
    const ms = (values, place) => (values ? values[place] * 1e3 : null);
    const point = {
      generated: scheduler.gauges.tokens_per_second,
      prompt: this.rate("prefill_tokens_total"),
      running: scheduler.running,
      waiting: scheduler.waiting,
      kvShare: scheduler.kv_tokens_max ? (100 * scheduler.kv_tokens_used) / scheduler.kv_tokens_max : 0,
      first50: ms(first, 0), first90: ms(first, 1), first99: ms(first, 2),
      next50: ms(next, 0), next90: ms(next, 1), next99: ms(next, 2),
    };
    this.times = [...this.times, snapshot.at_s].slice(-POINTS_MAX);
    for (const name of LINES) this.lines[name] = [...this.lines[name], point[name]].slice(-POINTS_MAX);
  }

  // Change of a counter per second, since the snapshot before.
  rate(counter) {
    const [now, before] = [this.snapshot, this.before];
    if (!before?.status.scheduler) return null;
    const elapsed = now.at_s - before.at_s;
    const change = (now.status.scheduler.counters[counter] ?? 0) - (before.status.scheduler.counters[counter] ?? 0);
    return elapsed > 0 && change >= 0 ? change / elapsed : null;
  }
}
