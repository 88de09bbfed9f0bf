// Open requests: how far each has come, what the cache had of it, and how fast it goes.

import { html, useState } from "../vendor/preact-htm.js";
import { count, fixed, percent, seconds } from "../format.js";

const SHOWN = 50;

function progress(request, place) {
  if (request.state === "waiting") return `waits, place ${place}`;
  if (request.state === "prefill") return `prefill, ${count(Math.min(request.computed_tokens, request.prompt_tokens))} of ${count(request.prompt_tokens)}`;
  return "decode";
}

function cached(request) {
  if (!request.cached) return "–";
  const { memory_tokens: memory, stored_tokens: stored } = request.cached;
  const parts = [];
  if (memory) parts.push(`${count(memory)} memory`);
  if (stored) parts.push(`${count(stored)} SSD`);
  parts.push(`${count(Math.max(0, request.prompt_tokens - memory - stored))} computed`);
  return parts.join(", ");
}

function drafts(request) {
  const all = request.drafts_accepted + request.drafts_rejected;
  return all ? `${percent(request.drafts_accepted / all)} of ${count(all)}` : "–";
}

function Row({ request, place, isOwn, cancel }) {
  const speed = request.generating_s > 0.5 ? request.completion_tokens / request.generating_s : null;
  return html`<tr>
    <th scope="row"><code title=${request.id}>${request.id.slice(-12)}</code></th>
    <td>${progress(request, place)}</td>
    <td>${count(request.prompt_tokens)}</td><td>${cached(request)}</td>
    <td>${count(request.completion_tokens)}</td><td>${fixed(speed, 1)}</td>
    <td>${drafts(request)}</td><td>${seconds(request.age_s)}</td>
    <td>${isOwn && html`<button type="button" aria-label="Cancel request ${request.id.slice(-12)}" onClick=${() => cancel(request.id)}>Cancel</button>`}</td>
  </tr>`;
}

export function Streams({ feed }) {
  const [all, showAll] = useState(false);
  const [words, say] = useState("");
  const activity = feed.snapshot?.activity;
  if (!activity) return html`<p>The scheduler does not answer, so the requests are not known.</p>`;
  const requests = activity.requests;
  const running = requests.filter((one) => one.state !== "waiting");
  const waiting = requests.length - running.length + activity.requests_omitted;
  const own = new Set(feed.own.requests);
  const cancel = async (id) => {
    const response = await fetch(`/v1/lockstep/requests/${encodeURIComponent(id)}`, { method: "DELETE", headers: feed.headers() });
    say(response.ok ? `Request ${id.slice(-12)} is cancelled.` : (await response.json()).error.message);
  };
  const shown = all ? requests : requests.slice(0, SHOWN);
  return html`
    <p>${count(running.length)} running, ${count(waiting)} waiting. <span role="status">${words}</span></p>
    ${requests.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of requests">
      <table>
        <caption>Open requests</caption>
        <thead>
          <tr>
            <th scope="col">Request</th><th scope="col">State</th><th scope="col">Prompt</th><th scope="col">From</th>
            <th scope="col">Tokens</th><th scope="col">Tokens/s</th><th scope="col">Drafts accepted</th>
            <th scope="col">Age</th><th scope="col">Action</th>
          </tr>
        </thead>
        <tbody>
          ${shown.map((one, index) => html`<${Row} key=${one.id} request=${one} place=${index - running.length + 1} isOwn=${own.has(one.id)} cancel=${cancel} />`)}
        </tbody>
      </table>
    </div>`}
    ${requests.length > SHOWN && html`<button type="button" onClick=${() => showAll(!all)}>${all ? "Show fewer" : `Show all ${requests.length}`}</button>`}
    ${activity.requests_omitted > 0 && html`<p>${count(activity.requests_omitted)} more wait.</p>`}
  `;
}
