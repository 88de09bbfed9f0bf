// Memory of rows and blocks, and why parts of the last prompts were computed.

import { html } from "../vendor/preact-htm.js";
import { bytes, clock, count, percent } from "../format.js";

const REASONS = {
  new: "no known text begins like it",
  diverged: "it differs from known text",
  evicted: "its blocks were evicted",
  unreadable: "a stored block could not be read",
  slow: "reading would have taken longer",
};

function Meter({ label, value, max, text }) {
  return html`<div class="meter-row">
    <span id="meter-${label.replace(/\W/g, "")}">${label}</span>
    <meter min="0" max=${max || 1} value=${Math.min(value, max || 1)} aria-labelledby="meter-${label.replace(/\W/g, "")}"></meter>
    <span>${text}</span>
  </div>`;
}

function Misses({ misses }) {
  if (!misses.length) return html`<p>No prompt of yours has missed the cache yet.</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of cache misses">
    <table>
      <caption>Last cache misses of your requests</caption>
      <thead>
        <tr>
          <th scope="col">At</th><th scope="col">Request</th><th scope="col">Known</th><th scope="col">Computed</th>
          <th scope="col">Why</th><th scope="col">Where the text differs</th>
        </tr>
      </thead>
      <tbody>
        ${misses.map((one) => html`<tr key=${one.request_id}>
          <td>${clock(one.at_s)}</td><th scope="row"><code>${one.request_id.slice(-12)}</code></th>
          <td>${count(one.memory_tokens + one.ssd_tokens)}</td><td>${count(one.computed_tokens)}</td>
          <td>${REASONS[one.miss] ?? one.miss}</td>
          <td>${one.diverged_at == null
            ? "–"
            : html`token ${count(one.diverged_at)}: <code>${one.text_before}</code><mark><code>${one.text_after}</code></mark>`}</td>
        </tr>`)}
      </tbody>
    </table>
  </div>`;
}

export function Cache({ feed }) {
  const scheduler = feed.snapshot?.status.scheduler;
  if (!scheduler) return html`<p>The scheduler has not reported yet.</p>`;
  const { gauges, counters } = scheduler;
  const hits = (counters.cache_hit_tokens_memory_total ?? 0) + (counters.cache_hit_tokens_ssd_total ?? 0);
  const prompts = counters.prompt_tokens_total ?? 0;
  return html`
    <dl class="facts">
      <div><dt>Prompt tokens from the cache</dt><dd>${prompts ? percent(hits / prompts) : "–"}</dd></div>
      <div><dt>Blocks in memory</dt><dd>${count(gauges.cache_blocks_resident)}</dd></div>
      <div><dt>Blocks known</dt><dd>${count(gauges.cache_blocks_known)}</dd></div>
      <div><dt>Blocks evicted</dt><dd>${count(counters.cache_blocks_evicted_total)}</dd></div>
      <div><dt>Restored from SSD</dt><dd>${count(counters.cache_blocks_restored_total)}</dd></div>
      <div><dt>SSD used</dt><dd>${bytes(gauges.cache_store_bytes)}</dd></div>
    </dl>
    <${Meter} label="KV rows" value=${scheduler.kv_tokens_used} max=${scheduler.kv_tokens_max}
      text="${count(scheduler.kv_tokens_used)} of ${count(scheduler.kv_tokens_max)} tokens" />
    <${Meter} label="Blocks in memory, per rank" value=${gauges.cache_resident_bytes ?? 0} max=${gauges.cache_resident_limit_bytes}
      text="${bytes(gauges.cache_resident_bytes)} of ${bytes(gauges.cache_resident_limit_bytes)}" />
    <${Misses} misses=${feed.own.misses} />
  `;
}
