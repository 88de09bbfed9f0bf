// Steps on every rank: when the host built them, when the device computed, who waited for whom.

import { html, useState } from "../vendor/preact-htm.js";
import { count, fixed } from "../format.js";
import { Parts } from "./parts.js";

const WIDTH = 1000;
const LANE = 52;
const [CAME, BUILT, HANDED, BEGAN, ENDED] = [0, 1, 2, 3, 4];
const WINDOWS_MS = [20, 50, 100, 250, 1000, 5000];
const LETTERS = { prefill: "P", decode: "D", verify: "V", other: "" };

const keyOf = (step) => `${step.epoch}.${step.step}`;
const endOf = (step) => step.sent_ms + Math.max(...step.ranks.map((times) => times[ENDED]));
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
};

// How much later than the first rank each rank has ended a step, in milliseconds.
function lateness(step) {
  const ends = step.ranks.map((times) => times[ENDED]);
  const first = Math.min(...ends);
  return ends.map((end) => end - first);
}

function Lanes({ steps, from, window, chosen, choose }) {
  const x = (ms) => Math.max(-10, Math.min(WIDTH + 10, ((ms - from) / window) * WIDTH));
  const ranks = steps.at(-1).ranks.length;
  const bar = (step, rank) => {
    const times = step.ranks[rank].map((ms) => step.sent_ms + ms);
    const y = rank * LANE;
    const [begin, end] = [x(times[BEGAN]), x(times[ENDED])];
    const late = x(times[ENDED] - lateness(step)[rank]);
    return html`<g key="${keyOf(step)}.${rank}" class="step ${step.kind} ${keyOf(step) === chosen ? "chosen" : ""}"
      onClick=${() => choose(keyOf(step))}>
      <rect class="host" x=${x(times[CAME])} y=${y + 4} width=${Math.max(1, x(times[HANDED]) - x(times[CAME]))} height="8" />
      <rect class="device" x=${begin} y=${y + 16} width=${Math.max(1, end - begin)} height="24" />
      ${end - late > 1 && html`<rect class="late" x=${late} y=${y + 16} width=${end - late} height="24" />`}
      ${end - begin > 24 && html`<text x=${(begin + end) / 2} y=${y + 33}>${LETTERS[step.kind]}</text>`}
    </g>`;
  };
  return html`<svg viewBox="0 0 ${WIDTH} ${ranks * LANE}" preserveAspectRatio="none" aria-hidden="true">
    ${Array.from({ length: ranks }, (_, rank) => html`<rect class="idle" x="0" y=${rank * LANE + 16} width=${WIDTH} height="24" />`)}
    ${steps.flatMap((step) => step.ranks.map((_, rank) => bar(step, rank)))}
  </svg>`;
}

function words(step) {
  const work = [];
  if (step.prompt_tokens) work.push(`${count(step.prompt_tokens)} prompt tokens`);
  if (step.decodes) work.push(`${step.decodes} ${step.decodes === 1 ? "row decodes" : "rows decode"}`);
  if (step.drafts) work.push(`${step.drafts} drafts are verified`);
  return `Step ${step.step} of epoch ${step.epoch}, ${step.kind}: ${work.join(", ") || "no tokens"}`;
}

function Chosen({ step }) {
  const late = lateness(step);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Times of the chosen step">
    <table>
      <caption>${words(step)}. Milliseconds after its plan was sent.</caption>
      <thead>
        <tr>
          <th scope="col">Rank</th><th scope="col">Plan came</th><th scope="col">Graph built</th>
          <th scope="col">Handed over</th><th scope="col">Device began</th><th scope="col">Device ended</th>
          <th scope="col">Device took</th><th scope="col">After the first rank</th><th scope="col">Receipt left</th>
        </tr>
      </thead>
      <tbody>
        ${step.ranks.map((times, rank) => html`<tr key=${rank}>
          <th scope="row">${rank}</th>
          ${times.slice(0, 5).map((ms) => html`<td>${fixed(ms, 2)}</td>`)}
          <td>${fixed(times[ENDED] - times[BEGAN], 2)}</td><td>${fixed(late[rank], 2)}</td><td>${fixed(times[5], 2)}</td>
        </tr>`)}
      </tbody>
    </table>
  </div>`;
}

function Medians({ steps }) {
  const kinds = ["decode", "verify", "prefill"].filter((kind) => steps.some((step) => step.kind === kind));
  const rows = kinds.flatMap((kind) => {
    const same = steps.filter((step) => step.kind === kind);
    return same.at(-1).ranks.map((_, rank) => ({ kind, rank, same: same.filter((step) => step.ranks[rank]) }));
  });
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Medians by rank">
    <table>
      <caption>Medians of the last ${steps.length} steps, in milliseconds</caption>
      <thead>
        <tr>
          <th scope="col">Kind</th><th scope="col">Rank</th><th scope="col">Steps</th><th scope="col">Host builds</th>
          <th scope="col">Host hands over</th><th scope="col">Device</th><th scope="col">Ends after the first rank</th>
        </tr>
      </thead>
      <tbody>
        ${rows.map(({ kind, rank, same }) => html`<tr key="${kind}${rank}">
          <th scope="row">${kind}</th><td>${rank}</td><td>${same.length}</td>
          <td>${fixed(median(same.map((step) => step.ranks[rank][BUILT] - step.ranks[rank][CAME])), 2)}</td>
          <td>${fixed(median(same.map((step) => step.ranks[rank][HANDED] - step.ranks[rank][BUILT])), 2)}</td>
          <td>${fixed(median(same.map((step) => step.ranks[rank][ENDED] - step.ranks[rank][BEGAN])), 2)}</td>
          <td>${fixed(median(same.map((step) => lateness(step)[rank])), 2)}</td>
        </tr>`)}
      </tbody>
    </table>
  </div>`;
}

function Trace({ feed }) {
  const [words, say] = useState("");
  const record = async () => {
    say("Recording for 10 s …");
    try {
      const response = await fetch("/v1/lockstep/trace?seconds=10", { headers: feed.headers() });
      if (!response.ok) throw new Error((await response.json()).error.message);
      const anchor = document.createElement("a");
      anchor.href = URL.createObjectURL(await response.blob());
      anchor.download = "lockstep-trace.json";
      anchor.click();
      URL.revokeObjectURL(anchor.href);
      say("The trace is downloaded: open it at ui.perfetto.dev.");
    } catch (error) {
      say(`There is no trace: ${error.message}`);
    }
  };
  return html`<button type="button" onClick=${record}>Record a trace</button> <span role="status">${words}</span>`;
}

export function Timeline({ feed }) {
  const [held, hold] = useState(null);
  const [window, setWindow] = useState(100);
  const [chosen, choose] = useState("");
  const steps = (held ?? feed.steps).filter((step) => step.ranks.length);
  const loss = feed.snapshot?.activity?.loss;
  if (!steps.length) return html`<p>No step has been computed since this page was opened.</p><${Trace} feed=${feed} />`;
  const place = Math.max(0, steps.findIndex((step) => keyOf(step) === chosen));
  const step = chosen ? steps.find((one) => keyOf(one) === chosen) : null;
  const until = step && held ? Math.max(endOf(step) + window / 2, steps[0].sent_ms + window) : endOf(steps.at(-1));
  const from = until - window;
  const shown = steps.filter((one) => endOf(one) >= from && one.sent_ms <= until);
  const select = (key) => {
    hold(steps);
    choose(key);
  };
  const onKey = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
    if (!move) return;
    event.preventDefault();
    const now = chosen ? place : steps.length;
    select(keyOf(steps[Math.max(0, Math.min(steps.length - 1, now + move))]));
  };
  const release = () => {
    hold(null);
    choose("");
  };
  return html`
    ${loss && html`<p class="loss"><strong>Largest loss:</strong> ${loss}</p>`}
    <div class="controls">
      <label>Window <select value=${window} onChange=${(event) => setWindow(Number(event.target.value))}>
        ${WINDOWS_MS.map((ms) => html`<option value=${ms}>${ms < 1000 ? `${ms} ms` : `${ms / 1000} s`}</option>`)}
      </select></label>
      <button type="button" aria-pressed=${held ? "true" : "false"} onClick=${() => (held ? release() : hold(feed.steps))}>
        ${held ? "Go on" : "Hold"}
      </button>
      <${Trace} feed=${feed} />
    </div>
    <p class="legend">
      <span class="prefill">P prefill</span> <span class="decode">D decode</span> <span class="verify">V verify</span>
      <span class="late">after the first rank</span> <span class="host">host builds and hands over</span>
      <span class="idle">device idle</span>
    </p>
    <div class="lanes" tabindex="0" role="slider" aria-label="Step" aria-valuemin="0" aria-valuemax=${steps.length - 1}
      aria-valuenow=${step ? place : steps.length - 1} aria-valuetext=${words(step ?? steps.at(-1))} onKeyDown=${onKey}>
      <${Lanes} steps=${shown.length ? shown : steps.slice(-1)} from=${from} window=${window} chosen=${chosen} choose=${select} />
    </div>
    <p class="hint">Click a step, or move through the steps with the arrow keys, to see its plan and times.</p>
    ${step && html`<${Chosen} step=${step} />`}
    <${Medians} steps=${steps} />
    <${Parts} ranks=${feed.snapshot?.status.scheduler?.ranks ?? []} />
  `;
}
