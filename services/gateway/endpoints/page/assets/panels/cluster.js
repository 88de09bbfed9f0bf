// State of the world: epoch, recoveries, and its ranks with their hosts and links.

import { html } from "../vendor/preact-htm.js";
import { bytes, count, fixed, percent, seconds } from "../format.js";

const SMALL_SUM = "sum of 4 KiB of float32";
const COLUMNS = 3;

// Share of time in which a rank computed, since the snapshot before.
function busyShare(feed, rank) {
  const [now, before] = [feed.snapshot, feed.before];
  const earlier = before?.status.scheduler?.ranks[rank];
  const later = now.status.scheduler.ranks[rank];
  if (!earlier || now.at_s <= before.at_s || later.busy_s < earlier.busy_s) return null;
  return Math.min(1, (later.busy_s - earlier.busy_s) / (now.at_s - before.at_s));
}

function link(rank) {
  const small = rank.canary.find((one) => one.name === SMALL_SUM);
  const largest = [...rank.canary].filter((one) => one.name.startsWith("sum of")).sort((a, b) => b.bytes - a.bytes)[0];
  return {
    latency: small ? small.microseconds / 1e6 : null,
    bytesPerSecond: largest?.microseconds > 0 ? largest.bytes / (largest.microseconds / 1e6) : null,
  };
}

// Ranks stand in a row of boxes; a line joins each with the next, as in the ring of sums.
function Map({ ranks }) {
  const place = (rank) => [(rank % COLUMNS) * 240 + 10, Math.floor(rank / COLUMNS) * 130 + 10];
  const height = Math.ceil(ranks.length / COLUMNS) * 130;
  const width = Math.min(ranks.length, COLUMNS) * 240;
  return html`<svg class="map" viewBox="0 0 ${width} ${height}" style=${{ maxWidth: `${width}px` }} aria-hidden="true">
    ${ranks.slice(1).map((_, index) => {
      const [from, to] = [place(index), place(index + 1)];
      return html`<line class="link" x1=${from[0] + 100} y1=${from[1] + 50} x2=${to[0] + 100} y2=${to[1] + 50} />`;
    })}
    ${ranks.map((rank) => {
      const [x, y] = place(rank.rank);
      const limit = Math.max(rank.peak_bytes, rank.memory_bytes, 1);
      return html`<g class="rank ${rank.state}" transform="translate(${x} ${y})">
        <rect width="200" height="100" rx="8" />
        <text x="12" y="24" class="strong">Rank ${rank.rank}: ${rank.state}</text>
        <text x="12" y="44">${(rank.host || "–").slice(0, 24)}</text>
        <text x="12" y="64">${rank.share || ""}</text>
        <rect class="meter" x="12" y="78" width="176" height="8" rx="4" />
        <rect class="level" x="12" y="78" width=${(176 * rank.memory_bytes) / limit} height="8" rx="4" />
      </g>`;
    })}
  </svg>`;
}

function Ranks({ feed }) {
  const { ranks } = feed.snapshot.status.scheduler;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of ranks">
    <table>
      <caption>Ranks</caption>
      <thead>
        <tr>
          <th scope="col">Rank</th><th scope="col">State</th><th scope="col">Host</th><th scope="col">Device</th>
          <th scope="col">Holds</th><th scope="col">Weights</th><th scope="col">Memory</th><th scope="col">Peak</th>
          <th scope="col">Busy</th><th scope="col">Late, in all</th><th scope="col">Small sum</th>
          <th scope="col">Large sums</th><th scope="col">Heard</th><th scope="col">Clock</th>
        </tr>
      </thead>
      <tbody>
        ${ranks.map((rank) => {
          const { latency, bytesPerSecond } = link(rank);
          return html`<tr key=${rank.rank}>
            <th scope="row">${rank.rank}</th>
            <td>${rank.state}${rank.state === "loading" ? ` ${percent(rank.loaded)}` : ""}</td>
            <td>${rank.host}</td><td>${rank.device}</td><td>${rank.share}</td>
            <td>${bytes(rank.shard_bytes)}</td><td>${bytes(rank.memory_bytes)}</td><td>${bytes(rank.peak_bytes)}</td>
            <td>${percent(busyShare(feed, rank.rank))}</td><td>${seconds(rank.late_s)}</td>
            <td>${seconds(latency)}</td><td>${bytesPerSecond ? `${bytes(bytesPerSecond)}/s` : "–"}</td>
            <td>${seconds(rank.silence_s)} ago</td>
            <td>${rank.clock_error_s ? `± ${seconds(rank.clock_error_s)}` : "–"}</td>
          </tr>`;
        })}
      </tbody>
    </table>
  </div>`;
}

function Recoveries({ list }) {
  if (!list.length) return html`<p>No epoch has ended since the scheduler's start.</p>`;
  const last = list.at(-1);
  return html`<p>
    <strong>Last recovery</strong>, ${seconds(last.age_s)} ago: ${last.cause}
    ${" "}${last.seconds == null ? "It is not over." : `The cluster was ready again after ${seconds(last.seconds)}.`}
    ${list.length > 1 ? ` ${list.length} recoveries are known.` : ""}
  </p>`;
}

export function Cluster({ feed }) {
  const scheduler = feed.snapshot?.status.scheduler;
  if (!scheduler) return html`<p>The scheduler has not reported yet.</p>`;
  const activity = feed.snapshot.activity;
  return html`
    <dl class="facts">
      <div><dt>Epoch</dt><dd>${scheduler.epoch}</dd></div>
      <div><dt>Steps in it</dt><dd>${count(scheduler.steps)}</dd></div>
      <div><dt>Ranks</dt><dd>${scheduler.world_size}</dd></div>
      <div><dt>Split</dt><dd>${scheduler.sharding}</dd></div>
      <div><dt>Backend</dt><dd>${scheduler.backend}</dd></div>
      <div><dt>Tokens/s</dt><dd>${fixed(scheduler.gauges.tokens_per_second, 0)}</dd></div>
    </dl>
    ${activity && html`<${Recoveries} list=${activity.recoveries} />`}
    ${scheduler.world_change && html`<p>${scheduler.world_change}</p>`}
    <${Map} ranks=${scheduler.ranks} />
    <${Ranks} feed=${feed} />
  `;
}
