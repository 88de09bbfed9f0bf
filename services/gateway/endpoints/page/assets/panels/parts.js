// How the time of steps divides between the parts of the model, by rank.

import { html } from "../vendor/preact-htm.js";
import { fixed, percent } from "../format.js";

const NAMES = { kv_write: "KV writes", collective: "collectives", send: "sends", receive: "receives", mlp: "MLP", norms: "norms, residuals" };
const SHADES = 6;

export function Parts({ ranks }) {
  const measured = ranks.filter((rank) => rank.parts.length);
  if (!measured.length) {
    return html`<p class="hint">No step has been measured part by part yet: one of each
      <code>scheduler.profile_every_steps</code> is, and <code>lockstep profile</code> orders more.</p>`;
  }
  const sum = (rank) => rank.parts.reduce((total, part) => total + part.seconds, 0);
  const secondsOf = (rank, name) => rank.parts.find((part) => part.part === name)?.seconds ?? 0;
  const most = (name) => Math.max(...measured.map((rank) => secondsOf(rank, name) / sum(rank)));
  const names = [...new Set(measured.flatMap((rank) => rank.parts.map((part) => part.part)))].sort((a, b) => most(b) - most(a));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Parts of steps by rank">
    <table class="parts">
      <caption>Share of each part in the steps that were measured part by part, and its mean time</caption>
      <thead><tr><th scope="col">Rank</th>${names.map((name) => html`<th scope="col">${NAMES[name] ?? name}</th>`)}</tr></thead>
      <tbody>
        ${measured.map((rank) => html`<tr key=${rank.rank}>
          <th scope="row">${rank.rank}</th>
          ${names.map((name) => {
            const part = rank.parts.find((one) => one.part === name);
            const share = secondsOf(rank, name) / sum(rank);
            return html`<td class="shade-${Math.min(SHADES - 1, Math.floor(share * SHADES * 1.5))}">
              ${percent(share)}${part ? html` <small>${fixed((1e6 * part.seconds) / part.runs, 0)} µs each</small>` : ""}
            </td>`;
          })}
        </tr>`)}
      </tbody>
    </table>
  </div>`;
}
